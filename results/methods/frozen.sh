#!/usr/bin/env bash
# The runs of frozen-plan.md on one CPU core; rerun to resume.
#   frozen.sh all|draws FEATURES.npz       the file is written by examples/frozen_features.py; the records are frozen.records.parquet, frozen-draws.records.parquet
# PYTHON is the interpreter.
set -eu
what=$1 features=$2 python=${PYTHON:-python3}
here=$(dirname "$0")
export OMP_NUM_THREADS=1

sweep() { # FOLDER METHODS OPTIONS...
  "$python" -m sandmask sweep run "runs/methods-frozen-$what/$1" --datasets "$features" --algorithms "$2" --n-trials 3 \
    --space recipe --steps 301 --checkpoint-every 50 --device cpu --workers 1 --no-calibrate \
    --hparam batch_size=32 --hparam mlp_width=128 "${@:3}"
}
# Steps at which a method changes: 0.3 of the defaults for 1,001 steps.
irm="--hparam irm_penalty_anneal_iters=30" vrex="--hparam vrex_penalty_anneal_iters=30" fishr="--hparam penalty_anneal_iters=90"

case $what in
  all)
    file=frozen
    slow="ARM URM TRM CAD CondCAD MMD CausIRL_MMD RDM SelfReg ADRMX" # last, a sweep each: a stopped script leaves whole methods
    fast=$("$python" -c "
from sandmask.algorithms import ALGORITHMS
apart = ['Fishr', *'$slow'.split()]
print(','.join(entry.name for entry in ALGORITHMS.values() if entry.name not in apart))")
    sweep Fishr Fishr --n-hparams 1 $fishr
    sweep fast "$fast" --n-hparams 1 $irm $vrex --hparam ib_penalty_anneal_iters=30 --hparam eqrm_burnin_iters=150 --hparam linear_steps=30
    for method in $slow; do
      case $method in
        RDM) own="--hparam rdm_penalty_anneal_iters=90" ;;
        TRM) own="--hparam iters=12" ;;
        *) own="" ;;
      esac
      sweep "$method" "$method" --n-hparams 1 $own
    done
    ;;
  draws)
    file=frozen-draws
    for method in ERM ANDMask SANDMask CORAL GroupDRO Mixup SAGM; do sweep "$method" "$method" --n-hparams 8; done
    sweep IRM IRM --n-hparams 8 $irm
    sweep VREx VREx --n-hparams 8 $vrex
    sweep Fishr Fishr --n-hparams 8 $fishr
    ;;
  *) echo "unknown: $what; say all or draws" >&2; exit 2 ;;
esac
"$python" "$here/archive.py" "runs/methods-frozen-$what" "${OUT:-$here}/$file.records.parquet"
