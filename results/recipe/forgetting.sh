#!/usr/bin/env bash
# The runs of forgetting-plan.md on a CPU (about 45 minutes of one core); resumable. Leaves their records beside this script.
set -eu
here=$(dirname "$0") python=${PYTHON:-python3}

sweep() { # FOLDER METHODS TRIALS OPTIONS...
  "$python" -m sandmask sweep run "runs/forgetting/$1" --datasets Spirals:seed=12 --algorithms "$2" --n-trials "$3" \
    --test-envs 1,3,5,9,14 --n-hparams 1 --steps 1001 --checkpoint-every 100 --space recipe --device cpu \
    --plugin "$here/forgetting.py" --no-calibrate --max-stack 1 "${@:4}"
}

sweep recipe ANDMask 1 --workers "${WORKERS:-1}"
sweep without ANDMask 1 --workers "${WORKERS:-1}" --hparam weight_decay=0
sweep variants ForgettingANDMask-to-zero,ForgettingANDMask-at-once 1 --workers "${WORKERS:-1}" --hparam weight_decay=0
sweep forgetting ForgettingANDMask,ForgettingSANDMask 3 --workers "${WORKERS:-1}" --hparam weight_decay=0
"$python" "$here/../methods/archive.py" runs/forgetting "$here/forgetting.records.parquet"
