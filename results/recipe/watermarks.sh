#!/usr/bin/env bash
# The runs of watermarks-plan.md on one CPU core; resumable. Leaves their records beside this file.
#   watermarks.sh DATA_DIR [others]      DATA_DIR/mnist/*.gz; others: the second part of the plan
# PYTHON is the interpreter.
set -euo pipefail
data=$1 part=${2:-main} here=$(dirname "$0") python=${PYTHON:-python3}
export OMP_NUM_THREADS=1

sweep() { # FOLDER METHODS DATASETS OPTIONS...
  "$python" -m sandmask sweep run "runs/watermarks/$1" --plugin "$here/../../examples/plugins/watermarks.py" --data-dir "$data" --algorithms "$2" --datasets "$3" \
    --n-hparams 1 --space recipe --device cpu --workers 1 --no-calibrate --hparam batch_size=256 "${@:4}"
}

penalties="--hparam irm_penalty_anneal_iters=30 --hparam vrex_penalty_anneal_iters=30 --hparam penalty_anneal_iters=90"
others_own="--hparam irm_penalty_anneal_iters=30 --hparam ib_penalty_anneal_iters=30 --hparam rdm_penalty_anneal_iters=90
  --hparam eqrm_burnin_iters=150 --hparam linear_steps=30 --hparam iters=12"
compared=ERM,IRM,VREx,GroupDRO,CORAL,Fishr,ANDMask,SANDMask

if [ "$part" = others ]; then
  others=$("$python" -c "
from sandmask.algorithms import ALGORITHMS
print(','.join(entry.name for entry in ALGORITHMS.values() if entry.name not in '$compared,ARM'.split(',')))")
  for held_out in 0,1 2,3; do
    sweep "others-$held_out" "$others" Watermarks-16 --test-envs "$held_out" --n-trials 1 $others_own
  done
else
  sweep methods "$compared" Watermarks-16 --test-envs 0,1,2,3 --n-trials 3 $penalties
  sweep domains ANDMask,SANDMask Watermarks-4,Watermarks-8,Watermarks-12,Watermarks-24 --test-envs 0,1,2,3 --n-trials 1
fi
"$python" "$here/../methods/archive.py" runs/watermarks "$here/watermarks.records.parquet"
