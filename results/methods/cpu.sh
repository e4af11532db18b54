#!/usr/bin/env bash
# The runs of cpu-plan.md on one CPU core: an hour and 40 minutes on a busy machine, and 20 minutes for the draws; rerun to resume.
#   cpu.sh all|draws DATA_DIR            DATA_DIR/mnist/*.gz; the records are results/methods/cpu.records.parquet, cpu-draws.records.parquet
# STEPS is another length of training, for a try; PYTHON is the interpreter.
set -eu
what=$1 data=$2 python=${PYTHON:-python3}
here=$(dirname "$0")
export OMP_NUM_THREADS=1

sweep() { # FOLDER METHODS OPTIONS...
  "$python" -m sandmask sweep run "runs/methods-cpu-$1" --plugin "$here/colored_digits.py" --data-dir "$data" --datasets ColoredDigits \
    --algorithms "$2" --space recipe --steps "${STEPS:-501}" --device cpu --workers 1 --no-calibrate \
    --hparam lr=0.001 --hparam lr_final=1 --hparam weight_decay=0.001 --hparam batch_size=256 --hparam mlp_width=128 "${@:3}"
}
# What the plan changes of the defaults: starts are a tenth, and learning rates are multiples of lr.
fishr="--hparam penalty_anneal_iters=150"
penalties="--hparam irm_penalty_anneal_iters=50 --hparam vrex_penalty_anneal_iters=50"
others_own="$penalties --hparam ib_penalty_anneal_iters=50 --hparam rdm_penalty_anneal_iters=150 --hparam rdm_lr=0.0003
  --hparam eqrm_burnin_iters=250 --hparam eqrm_lr=0.001 --hparam iters=20"

case $what in
  all)
    shown=ERM,ANDMask,SANDMask,CORAL,Fishr,SAGM
    others=$("$python" -c "
from sandmask.algorithms import ALGORITHMS
apart = '$shown,ERMPlusPlus,ARM'.split(',')
print(','.join(entry.name for entry in ALGORITHMS.values() if entry.name not in apart))")
    sweep all/shown "$shown" --n-hparams 1 --n-trials 3 --average sma,swad --hparam sma_start=10 $fishr
    sweep all/erm-plus-plus ERMPlusPlus --n-hparams 1 --n-trials 3 --average sma --hparam sma_start=60 \
      --hparam linear_steps=50 --hparam linear_lr=0.001
    sweep all/others "$others" --n-hparams 1 --n-trials 3 $others_own
    sweep all/arm ARM --n-hparams 1 --n-trials 1 --checkpoint-every 250
    file=cpu ;;
  draws)
    sweep draws ERM,IRM,VREx,Fishr,GroupDRO,CORAL,ANDMask,SANDMask --test-envs 2 --n-hparams 8 --n-trials 3 \
      $fishr $penalties
    file=cpu-draws ;;
  *) echo "unknown: $what; say all or draws" >&2; exit 2 ;;
esac
"$python" "$here/archive.py" "runs/methods-cpu-$what" "${OUT:-$here}/$file.records.parquet"
