#!/usr/bin/env bash
# The runs of plan.md on one GPU; resumable. Leaves the finished records in $OUT (default: results/methods).
#   run.sh mnist SECONDS DATA_DIR      ColoredMNIST (DATA_DIR/mnist/*.gz): 450 runs of 501 steps
#   run.sh spirals SECONDS             Spirals: 800 runs of 1,001 steps
# OPTIONS are more options of `sweep run`, such as --workers 2; PYTHON is the interpreter.
set -u
what=$1 seconds=$2 data=${3:-}
end=$(( $(date +%s) + seconds ))
python=${PYTHON:-python3} out=${OUT:-results/methods}
shown=ERM,ANDMask,SANDMask,CORAL,Fishr,SAGM
others=$("$python" -c "
from sandmask.algorithms import ALGORITHMS
print(','.join(entry.name for entry in ALGORITHMS.values() if entry.name not in '$shown'.split(',')))") || exit 1

scaled() { # DIVISOR LR RDM_LR: penalties set in at the same share of the training as in 5,001 steps
  local each
  for each in irm_penalty_anneal_iters=500 vrex_penalty_anneal_iters=500 ib_penalty_anneal_iters=500 \
    rdm_penalty_anneal_iters=1500 eqrm_burnin_iters=2500 iters=200 linear_steps=500; do
    echo "--hparam ${each%=*}=$(( ${each#*=} / $1 ))"
  done
  echo "--hparam eqrm_lr=$2 --hparam linear_lr=$2 --hparam rdm_lr=$3"
}

sweep() { # FOLDER METHODS OPTIONS...
  local left=$(( end - $(date +%s) ))
  [ "$left" -gt 10 ] || return 0
  timeout --signal=INT --kill-after=30 "$left" "$python" -m sandmask sweep run "runs/$1" --algorithms "$2" --n-hparams 1 \
    --space recipe --checkpoint-every 100 --device cuda --workers 3 --no-calibrate --checkpoint-seconds 3600 "${@:3}" \
    ${OPTIONS:-} 2>&1 | tail -8
}

case $what in
  mnist)
    common=(--datasets ColoredMNIST --data-dir "$data" --n-trials 3 --precision bf16 --steps "${STEPS:-501}")
    sweep methods-mnist/shown "$shown" "${common[@]}" --average sma,swad --hparam penalty_anneal_iters=150 --hparam sma_start=10
    sweep methods-mnist/others "$others" "${common[@]}" $(scaled 10 0.001 0.0003) ;;
  spirals)
    sweep methods-spirals "$shown,$others" --datasets Spirals --n-trials 1 --precision tf32 --steps "${STEPS:-1001}" \
      --hparam penalty_anneal_iters=300 $(scaled 5 0.005 0.0015) ;;
  *) echo "unknown: $what; say mnist or spirals" >&2; exit 2 ;;
esac
mkdir -p "$out"
"$python" "$(dirname "$0")/archive.py" "runs/methods-$what" "$out/$what.records.parquet"
