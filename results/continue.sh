#!/usr/bin/env bash
# Trains missing runs of a sweep for a limited time, and keeps the records of all finished runs in one file.
#   results/continue.sh SWEEP.toml SECONDS ARCHIVE [OPTIONS of sandmask sweep run]
#   results/continue.sh results/paper/spirals.toml 480 results/paper/spirals_variants.records.parquet \
#     --algorithms ANDMask-rescaled,SANDMask-rescaled,SANDMask-released --device cuda --workers 8
# SWEEP.toml describes the sweep. ARCHIVE is read at the start, if it exists, and written again every half minute, so that
# little is lost if the machine goes away. COPY is a folder that receives it as well. FOLDER is the sweep's folder, and
# PYTHON the interpreter. Allow half a minute more than SECONDS, to save checkpoints and records.
set -euo pipefail
config=$1 seconds=$2 archive=$3
shift 3
python=${PYTHON:-python3} folder=${FOLDER:-runs/$(basename "$config" .toml)} every=${EVERY:-30}
export PYTHONPATH="${PYTHONPATH:-$(dirname "$0")/../src}"

keep() {
  "$python" -m sandmask paper compact "$folder/stacks" --archive "$archive" || return 0 # no run is finished yet
  if [ -n "${COPY:-}" ]; then cp "$archive" "$COPY/.new" && mv "$COPY/.new" "$COPY/$(basename "$archive")"; fi
}

mkdir -p "$folder/stacks" "$(dirname "$archive")"
if [ -e "$archive" ]; then cp "$archive" "$folder/stacks/"; fi
"$python" -m sandmask sweep run "$folder" --config "$config" --time-limit "$seconds" "$@" &
training=$!
trap 'kill -TERM $training 2>/dev/null || true' INT TERM
next=$((SECONDS + every))
while kill -0 $training 2>/dev/null; do
  sleep 1 || true
  if ((SECONDS >= next)); then
    keep
    next=$((SECONDS + every))
  fi
done
status=0
wait $training || status=$?
keep
exit $status
