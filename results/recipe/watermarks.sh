#!/usr/bin/env bash
# The runs of watermarks-plan.md on one CPU core; resumable. Leaves their records beside this file.
#   watermarks.sh DATA_DIR [main|others|networks]      DATA_DIR/mnist/*.gz; the three parts of the plan
# PYTHON is the interpreter.
set -euo pipefail
data=$1 part=${2:-main} here=$(dirname "$0") python=${PYTHON:-python3}
export OMP_NUM_THREADS=1

sweep() { # FOLDER METHODS DATASETS OPTIONS...
  "$python" -m sandmask sweep run "runs/watermarks/$1" --plugin "$here/../../examples/plugins/watermarks.py" --data-dir "$data" --algorithms "$2" --datasets "$3" \
    --n-hparams 1 --space recipe --device cpu --workers 1 --no-calibrate --hparam batch_size=256 "${@:4}"
}

penalties="--hparam irm_penalty_anneal_iters=30 --hparam vrex_penalty_anneal_iters=30 --hparam penalty_anneal_iters=90"
fast_own="--hparam irm_penalty_anneal_iters=30 --hparam ib_penalty_anneal_iters=30 --hparam eqrm_burnin_iters=150 --hparam linear_steps=30"
compared=ERM,IRM,VREx,GroupDRO,CORAL,Fishr,ANDMask,SANDMask

if [ "$part" = others ]; then
  slow="MLDG URM TRM CAD CondCAD MMD CausIRL_MMD RDM SelfReg ADRMX" # last, a sweep each: a stopped script leaves whole methods
  fast=$("$python" -c "
from sandmask.algorithms import ALGORITHMS
print(','.join(entry.name for entry in ALGORITHMS.values() if entry.name not in '$compared,ARM,${slow// /,}'.split(',')))")
  for held_out in 0,1 2,3; do
    sweep "others-$held_out" "$fast" Watermarks-16 --test-envs "$held_out" --n-trials 1 $fast_own
    for method in $slow; do
      case $method in
        RDM) own="--hparam rdm_penalty_anneal_iters=90" ;;
        TRM) own="--hparam iters=12" ;;
        *) own="" ;;
      esac
      sweep "$method-$held_out" "$method" Watermarks-16 --test-envs "$held_out" --n-trials 1 $own
    done
  done
elif [ "$part" = networks ]; then
  sweep unmarked ERM Unmarked-16 --test-envs 0,1,2,3 --n-trials 3
  convnet=(--test-envs 0,1,2,3 --n-trials 1 --plugin "$here/small_convnet.py" --network small-convnet)
  sweep convnet ERM,ANDMask,SANDMask Watermarks-16 "${convnet[@]}"
  sweep unmarked-convnet ERM Unmarked-16 "${convnet[@]}" # added after the others
else
  sweep methods "$compared" Watermarks-16 --test-envs 0,1,2,3 --n-trials 3 $penalties
  sweep domains ANDMask,SANDMask Watermarks-4,Watermarks-8,Watermarks-12,Watermarks-24 --test-envs 0,1,2,3 --n-trials 1
fi
"$python" "$here/../methods/archive.py" runs/watermarks "$here/watermarks.records.parquet"
