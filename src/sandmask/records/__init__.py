"""Records of runs: specs and evaluations, in files.

A training program writes records, and reports read them:

    with RecordWriter("runs/records.jsonl") as writer:
        run = writer.start(spec, env_names, classes, sizes)
        writer.evaluation(run, step, accuracy_in, accuracy_out, {"loss": loss})
        writer.end(run, "done", step)

    runs = read_runs("runs")          # a list of RunRecord
    frame = load_records("runs")      # the same as a pandas frame
    write_archive(runs, "sweep.records.parquet")
"""

from sandmask.records._archive import write_archive
from sandmask.records._averages import (
    AVERAGES,
    average_metrics,
    averaged_spec,
    averages_of,
    judged_by_first_stage,
    split_averages,
    trained,
)
from sandmask.records._domainbed import Imported, read_domainbed
from sandmask.records._frame import frame, load_records
from sandmask.records._measures import (
    MEASURES,
    Measure,
    class_counts,
    confusion_counts,
    measured,
    parse_measures,
    recorded_measures,
)
from sandmask.records._reader import read_runs
from sandmask.records._types import SCHEMA_VERSION, RunRecord, RunSpec, Sizes, Status
from sandmask.records._writer import RecordWriter, write_record

__all__ = [
    "AVERAGES",
    "MEASURES",
    "SCHEMA_VERSION",
    "Imported",
    "Measure",
    "RecordWriter",
    "RunRecord",
    "RunSpec",
    "Sizes",
    "Status",
    "average_metrics",
    "averaged_spec",
    "averages_of",
    "class_counts",
    "confusion_counts",
    "frame",
    "judged_by_first_stage",
    "load_records",
    "measured",
    "parse_measures",
    "read_domainbed",
    "read_runs",
    "recorded_measures",
    "split_averages",
    "trained",
    "write_archive",
    "write_record",
]
