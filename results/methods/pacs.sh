#!/usr/bin/env bash
# The runs of plan.md on PACS on one GPU; resumable. Leaves the finished records in $OUT (default: results/methods).
#   pacs.sh SECONDS DATA_DIR WEIGHTS      DATA_DIR/PACS, and tf_efficientnet_lite0's weights
# One training gives three rows: the last iterate, SMA and SWAD. ALGORITHMS restricts the methods; OPTIONS are more options of `sweep run`,
# such as --workers 12; COMPILE= leaves out --compile; PYTHON is the interpreter.
set -u
seconds=$1 data=$2 weights=$3 python=${PYTHON:-python3}
timeout --signal=INT --kill-after=60 "$seconds" "$python" -m sandmask sweep run runs/methods-pacs --datasets PACS \
  --algorithms "${ALGORITHMS:-CORAL,Fishr,SAGM}" --average sma,swad --n-hparams 1 --n-trials 1 --space recipe --hparam weight_decay=1e-4 --hparam dropout=0 \
  --hparam penalty_anneal_iters=600 --steps "${STEPS:-2001}" --checkpoint-every 200 --precision bf16 ${COMPILE---compile} \
  --network tf_efficientnet_lite0 --weights "$weights" --data-dir "$data" --device "${DEVICE:-cuda}" --no-calibrate \
  --checkpoint-seconds 120 ${OPTIONS:-} 2>&1 | tail -8
mkdir -p "${OUT:-results/methods}"
"$python" "$(dirname "$0")/archive.py" runs/methods-pacs "${OUT:-results/methods}/pacs.records.parquet"
