#!/usr/bin/env bash
# The runs of images-plan.md on one GPU; resumable.
#   images.sh mnist SECONDS DATA_DIR            ColoredMNIST and RotatedMNIST (DATA_DIR/mnist/*.gz)
#   images.sh pacs SECONDS DATA_DIR WEIGHTS     PACS (DATA_DIR/PACS) with tf_efficientnet_lite0's weights
# ALGORITHMS, TEST_ENVS and WORKERS restrict and spread the runs; NAME is appended to the sweep's folder; PYTHON is the interpreter.
set -u
what=$1 seconds=$2 data=$3 weights=${4:-}
common="--algorithms ${ALGORITHMS:-ERM,SANDMask,ANDMask} --n-hparams 1 --space recipe --hparam weight_decay=1e-4 --hparam dropout=0 --precision bf16
  --data-dir $data --device cuda --checkpoint-seconds 3600"
sweep() { timeout --signal=INT --kill-after=30 "$1" "${PYTHON:-python}" -m sandmask sweep run "${@:2}" $common 2>&1 | tail -15; }
case $what in
  mnist)
    options="--hparam batch_size=256 --hparam lr_final=0 --steps 1001 --checkpoint-every 100 --no-calibrate"
    sweep "$seconds" runs/images-ColoredMNIST --datasets ColoredMNIST --n-trials 3 $options &
    sweep "$seconds" runs/images-RotatedMNIST --datasets RotatedMNIST --n-trials 2 --max-stack 18 $options &
    wait ;;
  pacs)
    sweep "$seconds" runs/images-PACS${NAME:-} --datasets PACS --n-trials 1 --steps 2001 --checkpoint-every 200 --average sma,swad \
      --network tf_efficientnet_lite0 --weights "$weights" --compile --no-calibrate --workers "${WORKERS:-4}" --test-envs "${TEST_ENVS:-all}" ;;
  *) echo "unknown: $what; say mnist or pacs" >&2; exit 2 ;;
esac
