#!/usr/bin/env bash
# First look at the recipe on one GPU, on the published Spirals data only: which steps, ranges and forms of the masks.
# Its runs chose the settings that plan.md fixes; they are no evidence. Writes into $OUT. Usage: explore.sh SECONDS
set -u
limit=$1
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
sweep() {  # name, seconds, options
  local name=$1 seconds=$2; shift 2
  echo "== $name $(date +%T)"
  timeout --signal=INT --kill-after=20 "$seconds" python -m sandmask sweep run "runs/$name" --datasets Spirals --space recipe \
    --precision tf32 --device cuda --no-calibrate --checkpoint-seconds 600 "$@" 2>&1 | tail -4
}
six="--test-envs 0,3,5,9,12,14 --n-trials 1 --checkpoint-every 25"
sweep a 110 $six --algorithms ANDMask-rescaled,SANDMask-rescaled,ERM,ANDMask,SANDMask,SANDMask-released --n-hparams 16 --steps 1001 --max-stack 96
sweep b 60 $six --algorithms ANDMask-rescaled,SANDMask-rescaled,ANDMask,SANDMask --n-hparams 16 --steps 1001 --max-stack 96 --hparam batch_size=256
sweep c 120 $six --algorithms ANDMask-rescaled,SANDMask-rescaled,ANDMask,SANDMask --n-hparams 12 --steps 3001 --max-stack 72
sweep d 30 $six --algorithms ANDMask-rescaled,SANDMask-rescaled --n-hparams 8 --steps 1001 --max-stack 96 --average sma,ema,swad
sweep e 30 $six --algorithms GeometricMean,IRM --n-hparams 8 --steps 1001 --max-stack 48
for name in a b c d e; do tar czf "$OUT/$name.tgz" -C runs "$name" --exclude='*.checkpoint.safetensors'; done
ls -la "$OUT"
