"""Adds the finished runs below a folder to an archive: `python results/methods/archive.py FOLDER FILE.records.parquet`.

Runs that the archive has already are kept, or replaced by the same runs of the folder.
"""

import sys
from pathlib import Path

from sandmask.records import read_runs, write_archive

if __name__ == "__main__":
    folder, file = map(Path, sys.argv[1:])
    runs = {run.spec.id: run for path in (file, folder) if path.exists() for run in read_runs(path)}
    done = [run for run in runs.values() if run.status != "running"]
    if not done:
        sys.exit(f"No run in {folder} is finished.")
    write_archive(done, file)
    print(f"{len(done)} runs in {file}")
