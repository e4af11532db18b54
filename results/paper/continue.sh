#!/usr/bin/env bash
# Trains missing runs of one of the paper's sweeps for a limited time, and keeps the records of all finished runs in one file.
#   results/paper/continue.sh SWEEP SECONDS ARCHIVE [OPTIONS of sandmask sweep run]
#   results/paper/continue.sh spirals 480 results/paper/spirals_variants.records.parquet \
#     --algorithms ANDMask-rescaled,SANDMask-rescaled,SANDMask-released --device cuda --workers 8
# SWEEP.toml beside this file describes the sweep. ARCHIVE is read at the start, if it exists, and written again every half minute, so that
# little is lost if the machine goes away. COPY is a folder that receives it as well. PYTHON is the interpreter.
set -euo pipefail
sweep=$1 seconds=$2 archive=$3
shift 3
python=${PYTHON:-python3} folder=runs/$sweep config=$(dirname "$0")/$sweep.toml
export PYTHONPATH="${PYTHONPATH:-$(dirname "$0")/../../src}"

keep() {
  "$python" -m sandmask paper compact "$folder/stacks" --archive "$archive" || return 0 # no run is finished yet
  if [ -n "${COPY:-}" ]; then cp "$archive" "$COPY/.new" && mv "$COPY/.new" "$COPY/$(basename "$archive")"; fi
}

mkdir -p "$folder/stacks" "$(dirname "$archive")"
if [ -e "$archive" ]; then cp "$archive" "$folder/stacks/"; fi
timeout --signal=INT --kill-after=60 "$seconds" "$python" -m sandmask sweep run "$folder" --config "$config" "$@" &
training=$!
trap 'kill -INT $training 2>/dev/null || true' INT TERM
while sleep "${EVERY:-30}" && kill -0 $training 2>/dev/null; do keep; done
wait $training || true
keep
