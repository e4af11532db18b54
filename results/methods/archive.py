"""The finished runs below a folder as one archive: `python results/methods/archive.py FOLDER FILE.records.parquet`."""

import sys

from sandmask.records import read_runs, write_archive

if __name__ == "__main__":
    folder, file = sys.argv[1:]
    done = [run for run in read_runs(folder) if run.status != "running"]
    write_archive(done, file)
    print(f"{len(done)} runs in {file}")
