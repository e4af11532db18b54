#!/usr/bin/env bash
# The checks on real data: default hyperparameters, every run a `sandmask train` command, several at a time on one GPU.
# Resumable: run it again, and what is done is not done again.
#
#   results/real_data.sh mnist DATA_DIR OUT [JOBS]            ColoredMNIST and RotatedMNIST (DATA_DIR/mnist/*.gz)
#   results/real_data.sh pacs DATA_DIR OUT [JOBS] WEIGHTS     PACS (DATA_DIR/PACS) with tf_efficientnet_lite0's weights
set -euo pipefail
what=$1 data=$2 out=$3 jobs=${4:-4} weights=${5:-}
sandmask=${SANDMASK:-sandmask}
steps=${STEPS:-5001}

commands() {
  case $what in
    mnist)
      for seed in 0 1 2; do
        for env in 0 1 2; do
          echo "train ColoredMNIST ERM --test-env $env --seed $seed --trial-seed $seed --out $out/cmnist-erm-$env-$seed"
        done
      done
      for env in 0 1 2 3 4 5; do
        echo "train RotatedMNIST ERM --test-env $env --out $out/rmnist-erm-$env-0"
      done ;;
    pacs)
      for method in "ERM" "ANDMask --hparam tau=0.5" "SANDMask --hparam tau=0.5"; do
        for env in A C P S; do
          name=$(echo "pacs-${method%% *}-$env" | tr 'A-Z' 'a-z')
          echo "train PACS $method --test-env $env --network tf_efficientnet_lite0 --weights $weights" \
            "--precision bf16 --compile --out $out/$name"
        done
      done ;;
    *) echo "unknown: $what; say mnist or pacs" >&2; exit 2 ;;
  esac
}

commands | sed "s|\$| --space paper --steps $steps --data-dir $data --json|" |
  xargs -P "$jobs" -I{} sh -c "$sandmask {} > /dev/null && echo done: {}"
