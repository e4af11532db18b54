#!/usr/bin/env bash
# The runs of plan.md on one GPU; resumable. Leaves the finished records in $OUT (default: results/methods).
#   run.sh mnist SECONDS DATA_DIR      ColoredMNIST (DATA_DIR/mnist/*.gz): 450 runs of 501 steps
#   run.sh spirals SECONDS             Spirals: 800 runs of 1,001 steps; slow methods train beside the others
# OPTIONS are more options of `sweep run`, such as --workers 2; PYTHON is the interpreter.
set -u
what=$1 seconds=$2 data=${3:-}
end=$(( $(date +%s) + seconds ))
python=${PYTHON:-python3} out=${OUT:-results/methods}
shown=ERM,ANDMask,SANDMask,CORAL,Fishr,SAGM
others=$("$python" -c "
from sandmask.algorithms import ALGORITHMS
print(','.join(entry.name for entry in ALGORITHMS.values() if entry.name not in '$shown'.split(',')))") || exit 1

scaled() { # DIVISOR NAME=STEP...: penalties set in at the same share of the training as in 5,001 steps
  local each
  for each in "${@:2}"; do
    echo "--hparam ${each%=*}=$(( ${each#*=} / $1 ))"
  done
}
starts="irm_penalty_anneal_iters=500 vrex_penalty_anneal_iters=500 ib_penalty_anneal_iters=500 eqrm_burnin_iters=2500 linear_steps=500"
slow_starts="rdm_penalty_anneal_iters=1500 iters=200"
rates() { echo "--hparam eqrm_lr=$1 --hparam linear_lr=$1"; }

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
    sweep methods-mnist/others "$others" "${common[@]}" $(scaled 10 $starts $slow_starts) \
      $(rates 0.001) --hparam rdm_lr=0.0003 ;;
  spirals)
    slow=MMD,CausIRL_MMD,CAD,CondCAD,RDM,SelfReg,TRM,ADRMX,MLDG,URM
    fast=$(tr , '\n' <<< "$shown,$others" | grep -vxF "$(tr , '\n' <<< "$slow")" | paste -sd,)
    common=(--datasets Spirals --n-trials 1 --precision tf32 --steps "${STEPS:-1001}")
    sweep methods-spirals/slow "$slow" "${common[@]}" $(scaled 5 $slow_starts) --hparam rdm_lr=0.0015 &
    sweep methods-spirals/fast "$fast" "${common[@]}" $(scaled 5 $starts penalty_anneal_iters=1500) $(rates 0.005)
    wait ;;
  *) echo "unknown: $what; say mnist or spirals" >&2; exit 2 ;;
esac
mkdir -p "$out"
"$python" "$(dirname "$0")/archive.py" "runs/methods-$what" "$out/$what.records.parquet"
