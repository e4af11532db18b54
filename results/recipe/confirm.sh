#!/usr/bin/env bash
# The confirming runs of plan.md on one GPU. Usage: confirm.sh SECONDS TRIALS METHODS DATASETS...
# PREFIX names the folders in runs/ (default: recipe); OPTIONS are more options of `sweep run`, such as --hparam rescale=0. Goes on from runs/ and leaves finished records as $OUT/<dataset>.tgz, also when its time is up.
set -u
seconds=$1 trials=$2 methods=$3; shift 3
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
end=$(( $(date +%s) + seconds ))
for data in "$@"; do
  left=$(( end - $(date +%s) ))
  [ "$left" -gt 20 ] || break
  name=${PREFIX:-recipe}-${data//[:=]/-}
  echo "== $data $(date +%T), $left s left"
  timeout --signal=INT --kill-after=30 "$left" python -m sandmask sweep run "runs/$name" --datasets "$data" --space recipe \
    --precision tf32 --algorithms "$methods" --n-hparams 20 --n-trials "$trials" --device cuda --workers "${WORKERS:-3}" \
    --selection training-domain,worst-training-domain,oracle --no-calibrate --max-stack 120 --checkpoint-seconds 3600 ${OPTIONS:-} 2>&1 | tail -12
  tar --exclude='*.checkpoint.safetensors' -czf "$OUT/$name.tgz" -C runs "$name"
  ls -la "$OUT"
done
