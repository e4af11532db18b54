#!/usr/bin/env bash
# The runs of plan.md on ColoredMNIST on one GPU: 459 runs of 501 steps; resumable. Leaves the finished records in $OUT (default: results/methods).
#   mnist.sh SECONDS DATA_DIR      DATA_DIR/mnist/*.gz
# OPTIONS are more options of `sweep run`, such as --workers 2; PYTHON is the interpreter.
set -u
seconds=$1 data=$2
end=$(( $(date +%s) + seconds ))
python=${PYTHON:-python3} out=${OUT:-results/methods}
shown=ERM,ANDMask,SANDMask,CORAL,Fishr,SAGM
others=$("$python" -c "
from sandmask.algorithms import ALGORITHMS
print(','.join(entry.name for entry in ALGORITHMS.values() if entry.name not in '$shown'.split(',')))") || exit 1

# Steps at which a penalty or a second stage sets in are a tenth of the defaults, which are for ten times as many steps.
starts="--hparam irm_penalty_anneal_iters=50 --hparam vrex_penalty_anneal_iters=50 --hparam ib_penalty_anneal_iters=50
  --hparam eqrm_burnin_iters=250 --hparam rdm_penalty_anneal_iters=150 --hparam linear_steps=50 --hparam iters=20"

sweep() { # FOLDER METHODS OPTIONS...
  local left=$(( end - $(date +%s) ))
  [ "$left" -gt 10 ] || return 0
  timeout --signal=INT --kill-after=30 "$left" "$python" -m sandmask sweep run "runs/$1" --algorithms "$2" --n-hparams 1 \
    --space recipe --checkpoint-every 100 --device cuda --workers 3 --no-calibrate --checkpoint-seconds 3600 "${@:3}" \
    ${OPTIONS:-} 2>&1 | tail -8
}

common=(--datasets ColoredMNIST --data-dir "$data" --n-trials 3 --precision bf16 --steps "${STEPS:-501}")
sweep methods-mnist/shown "$shown" "${common[@]}" --average sma,swad --hparam penalty_anneal_iters=150 --hparam sma_start=10
sweep methods-mnist/others "$others" "${common[@]}" $starts --hparam eqrm_lr=0.001 --hparam linear_lr=0.001 --hparam rdm_lr=0.0003
mkdir -p "$out"
"$python" "$(dirname "$0")/archive.py" runs/methods-mnist "$out/mnist.records.parquet"
