"""Archives have checksums of their columns: damage to the footer, which Parquet does not check, is noticed."""

import re
from pathlib import Path

import numpy as np
import pytest

from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, _archive, read_runs, write_archive
from sandmask.records.testing import made_up_run, made_up_sweep

WORDS = ("spec", "env_names", "classes", "status", "diverged_at", "sizes")
NUMBERS = ("steps", "accuracy_in", "accuracy_out")


def assert_same(found: list[RunRecord], known: list[RunRecord]) -> None:
    for one, other in zip(found, known, strict=True):
        assert [getattr(one, name) for name in WORDS] == [getattr(other, name) for name in WORDS]
        assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in NUMBERS)
        assert one.metrics.keys() == other.metrics.keys()
        assert all(np.array_equal(one.metrics[name], other.metrics[name]) for name in one.metrics)


def footer_of(content: bytes) -> int:
    """Where the footer of a Parquet file begins."""
    return len(content) - 8 - int.from_bytes(content[-8:-4], "little")


def test_a_curve_that_was_renamed_in_the_footer_of_an_archive_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "all.records.parquet"
    write_archive([made_up_run([[0.5, 0.5]])], path)
    content = path.read_bytes()
    assert content.count(b"metric.loss") > 1
    path.write_bytes(content.replace(b"metric.loss", b"metric.less"))
    with pytest.raises(SandmaskError, match=r"all\.records\.parquet cannot be read: .*checksum.*'metric.*Restore it"):
        read_runs(path)
    path.write_bytes(content.replace(b'"metric.loss"', b'"metric.less"'))  # only where the checksums are
    with pytest.raises(SandmaskError, match=r"checksum of its column 'metric\.less' and 1 more"):
        read_runs(path)


def test_changed_statuses_in_an_archive_are_noticed_without_reading_its_curves(tmp_path: Path) -> None:
    path = tmp_path / "all.records.parquet"
    write_archive([made_up_run([[0.5, 0.5]], seed=seed) for seed in range(3)], path)
    assert set(_archive.read_statuses(path).values()) == {"done"}
    checksums = re.search(rb'"status":(\d+)', path.read_bytes().replace(b": ", b":"))
    assert checksums is not None
    last = b"1" if checksums[1].endswith(b"0") else b"0"
    path.write_bytes(path.read_bytes().replace(checksums[1], checksums[1][:-1] + last))
    with pytest.raises(SandmaskError, match="checksum of its column 'status' does not match"):
        _archive.read_statuses(path)


def test_no_bit_of_an_archives_footer_gives_another_content(tmp_path: Path) -> None:
    """Nor a traceback: of a column that became another kind of column, for instance."""
    run = made_up_run([[0.5, 0.5], [0.6, 0.7]])
    path = tmp_path / "all.records.parquet"
    write_archive([run], path)
    content = path.read_bytes()
    begin = footer_of(content)
    for place in [*range(begin, begin + 600), *range(begin + 600, len(content), 13)]:  # the schema comes first
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x20]) + content[place + 1 :])
        try:
            found = read_runs(path)
        except SandmaskError as error:
            assert str(error).startswith(f"{path} cannot be read: ")  # noqa: PT017
        else:
            assert_same(found, [run])


def test_archives_without_checksums_are_read(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    runs = made_up_sweep(["ERM"], environments=2, draws=2, trials=1, checkpoints=4)
    path, old = tmp_path / "all.records.parquet", tmp_path / "old.records.parquet"
    write_archive(runs, path)
    table = pq.read_table(path)
    kept = {name: value for name, value in table.schema.metadata.items() if b"checksum" not in name}
    pq.write_table(table.replace_schema_metadata(kept), old)
    assert b"checksum" in path.read_bytes()
    assert b"checksum" not in old.read_bytes()
    assert_same(read_runs(old), runs)
    assert _archive.read_statuses(old) == _archive.read_statuses(path)


def test_checksums_do_not_depend_on_how_rows_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    runs = [*made_up_sweep(["ERM"], environments=2, draws=3, trials=2), made_up_run([[0.3, 0.3]], status="diverged")]
    stored = []
    for rows in (512, 2):
        monkeypatch.setattr(_archive, "_RUNS_PER_GROUP", rows)
        path = tmp_path / f"{rows}.records.parquet"
        write_archive(runs, path)
        stored.append(pq.ParquetFile(path).metadata.metadata[b"sandmask.checksums"])
        assert_same(read_runs(path), runs)
    assert stored[0] == stored[1]
