#!/usr/bin/env bash
# The runs of watermarks-plan.md on one CPU core; resumable. Leaves their records beside this file.
#   watermarks.sh DATA_DIR      DATA_DIR/mnist/*.gz
# PYTHON is the interpreter.
set -euo pipefail
data=$1 here=$(dirname "$0") python=${PYTHON:-python3}
export OMP_NUM_THREADS=1

sweep() { # FOLDER METHODS DATASETS OPTIONS...
  "$python" -m sandmask sweep run "runs/watermarks/$1" --plugin "$here/watermarks.py" --data-dir "$data" --algorithms "$2" --datasets "$3" \
    --test-envs 0,1,2,3 --n-hparams 1 --space recipe --device cpu --workers 1 --no-calibrate --hparam batch_size=256 "${@:4}"
}

sweep methods ERM,IRM,VREx,GroupDRO,CORAL,Fishr,ANDMask,SANDMask Watermarks-16 --n-trials 3 \
  --hparam irm_penalty_anneal_iters=30 --hparam vrex_penalty_anneal_iters=30 --hparam penalty_anneal_iters=90
sweep domains ANDMask,SANDMask Watermarks-4,Watermarks-8,Watermarks-12,Watermarks-24 --n-trials 1
"$python" "$here/../methods/archive.py" runs/watermarks "$here/watermarks.records.parquet"
