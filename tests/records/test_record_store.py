"""Reading: files, folders and archives as runs, and what is wrong is named."""

import errno
import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmask.errors import SandmaskError
from sandmask.records import RecordWriter, RunRecord, _archive, read_runs, write_archive
from sandmask.records._archive import pack_counts, unpack_counts
from sandmask.records._checks import LARGEST_SPLIT, check_record
from sandmask.records.testing import made_up_run, made_up_sweep


def save(path: Path, *runs: RunRecord) -> None:
    with RecordWriter(path) as writer:
        for run in runs:
            name = writer.start(run.spec, run.env_names, run.classes, run.sizes)
            for index, step in enumerate(run.steps):
                metrics = {metric: values[index] for metric, values in run.metrics.items()}
                writer.evaluation(name, int(step), run.accuracy_in[index], run.accuracy_out[index], metrics)
            if run.status != "running":
                writer.end(name, run.status, int(run.diverged_at or step))


def shortened(run: RunRecord, count: int) -> RunRecord:
    return replace(run.at(slice(count)), metrics={}, status="running")


def test_a_folder_is_read_recursively_archives_included(tmp_path: Path) -> None:
    runs = made_up_sweep(["ERM"], draws=2)
    save(tmp_path / "a" / "deep" / "x.jsonl", *runs[:2])
    save(tmp_path / "b.jsonl", *runs[2:5])
    write_archive(runs[5:], tmp_path / "c.records.parquet")
    (tmp_path / "notes.txt").write_text("not a record")
    assert [run.spec for run in read_runs(tmp_path)] == [run.spec for run in runs]
    assert [run.spec for run in read_runs(str(tmp_path / "b.jsonl"))] == [run.spec for run in runs[2:5]]


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match="nowhere does not exist"):
        read_runs(tmp_path / "nowhere")
    assert read_runs(tmp_path) == []


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_longer_of_two_records_of_a_run_is_kept(tmp_path: Path, order: str) -> None:
    run = made_up_run([[0.5, 0.5], [0.6, 0.6], [0.7, 0.7]])
    save(tmp_path / f"{order[0]}.jsonl", shortened(run, 2))
    save(tmp_path / f"{order[1]}.jsonl", run)
    write_archive([run], tmp_path / "copy.records.parquet")
    (read,) = read_runs(tmp_path)
    assert (read.status, len(read.steps)) == ("done", 3)


def test_a_path_need_not_be_valid_unicode_and_a_failure_of_the_system_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "sweep\udcff" / "a.records.parquet"
    write_archive([made_up_run([[0.5, 0.5]])], archive)
    assert len(read_runs(archive.parent)) == 1

    def no_more_files(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "open", no_more_files)
    with pytest.raises(SandmaskError, match=r"a\.records\.parquet cannot be read: Too many open files\.$"):
        read_runs(archive)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_metrics_that_one_of_two_records_has_are_kept(tmp_path: Path, order: str) -> None:
    run = made_up_run([[0.5, 0.5], [0.6, 0.6]], status="pruned")
    save(tmp_path / f"{order[0]}.jsonl", run)
    save(tmp_path / f"{order[1]}.jsonl", replace(run, metrics={"f1/in/0": np.array([0.1, 0.2])}))
    (read,) = read_runs(tmp_path)
    assert sorted(read.metrics) == ["f1/in/0", "loss"]
    assert read.status == "pruned"


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_of_two_records_the_one_over_all_training_examples_is_read(tmp_path: Path, order: str) -> None:
    """`train_eval_limit` is not in the spec: the other "in" accuracies of training environments do not contradict."""
    full = replace(made_up_run([[0.5, 0.5], [0.6, 0.6]]), sizes=((20, 20), (10, 10)))
    assert full.spec.test_envs == (0,)
    limited = replace(full, accuracy_in=np.array([[0.5, 1.0], [0.6, 0.0]]), sizes=((20, 2), (10, 10)))
    save(tmp_path / f"{order[0]}.jsonl", full)
    save(tmp_path / f"{order[1]}.jsonl", limited)
    (read,) = read_runs(tmp_path)
    assert read.sizes == full.sizes
    assert np.array_equal(read.accuracy_in, full.accuracy_in)
    held_out = replace(limited, accuracy_in=np.array([[1.0, 0.5], [0.0, 0.6]]), sizes=((2, 20), (10, 10)))
    save(tmp_path / "c.jsonl", held_out)
    with pytest.raises(SandmaskError, match="different results"):
        read_runs(tmp_path)


def test_contradicting_records_of_a_run_name_both_files(tmp_path: Path) -> None:
    run = made_up_run([[0.5, 0.5], [0.6, 0.6]])
    other = replace(run, accuracy_in=run.accuracy_in[::-1].copy())
    save(tmp_path / "one.jsonl", run)
    save(tmp_path / "two.jsonl", other)
    with pytest.raises(SandmaskError, match=r"different results, in .*one\.jsonl and .*two\.jsonl"):
        read_runs(tmp_path)
    (tmp_path / "two.jsonl").unlink()
    save(tmp_path / "three.jsonl", replace(run, status="diverged", diverged_at=101))
    with pytest.raises(SandmaskError, match="different results"):
        read_runs(tmp_path)


def damage(lines: list[dict[str, object]], number: int, **changes: object) -> str:
    """The lines with changes to one of them, and without the checksums that would tell."""
    lines[number - 1].update(changes)
    for line in lines:
        line.pop("crc", None)
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (1, {"schema": 2}, r"written by a newer sandmask \(schema 2, this one reads up to 1\). Upgrade"),
        (1, {"schema": "x"}, "is not a version number"),
        (1, {"spec": {"dataset": "Toy"}}, "not a line of a record file"),
        (2, {"kind": "evil"}, "unknown kind 'evil'"),
        (2, {"run": "other"}, "run 'other' has no first line before it"),
        (3, {"step": 0}, "follows its step 0"),
        (3, {"in": [0.5]}, "there are accuracies of 1 environments, but 2 are named"),
        (3, {"metrics": {"loss": "much"}}, "'much' is not a number"),
        (4, {"status": "fine"}, "not one of 'done', 'diverged' and 'pruned'"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, number: int, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "records.jsonl"
    save(path, made_up_run([[0.5, 0.5], [0.6, 0.6]]))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(damage(lines, number, **changes))
    with pytest.raises(SandmaskError, match=rf"records\.jsonl:{number}\b.*{message}"):
        read_runs(tmp_path)


@pytest.mark.parametrize("text", ["not json\n", "[]\n", "3\n", "\n", '{"kind": "eval"}\n'])
def test_what_is_no_record_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(SandmaskError, match=r"log\.jsonl:1 is not a line"):
        read_runs(tmp_path)


def test_a_run_twice_in_a_file_and_lines_after_its_end_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    save(path, made_up_run([[0.5, 0.5]]))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[0]]))
    with pytest.raises(SandmaskError, match=r":4 .*begins a second time"):
        read_runs(path)
    path.write_text("".join([*lines, lines[1]]))
    with pytest.raises(SandmaskError, match=r":4 .*checksum does not match"):
        read_runs(path)
    path.write_text(damage([json.loads(line) for line in [*lines, lines[1]]], 1))
    with pytest.raises(SandmaskError, match=r":4 .*follows the end"):
        read_runs(path)


def test_a_domainbed_file_says_how_to_import_it(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"args": {}, "env0_in_acc": 0.5}\n')
    with pytest.raises(SandmaskError, match="sandmask import-domainbed"):
        read_runs(tmp_path)


def assert_archive_keeps(runs: list[RunRecord], folder: Path) -> None:
    write_archive(runs, folder / "all.records.parquet")
    assert_same(read_runs(folder), runs)


def assert_same(read: list[RunRecord], runs: list[RunRecord]) -> None:
    assert len(read) == len(runs)
    for run, copy in zip(runs, read, strict=True):
        for name in ("spec", "env_names", "classes", "status", "diverged_at", "sizes"):
            assert getattr(run, name) == getattr(copy, name)
        assert run.spec.id == copy.spec.id
        for name in ("steps", "accuracy_in", "accuracy_out"):
            assert np.array_equal(getattr(run, name), getattr(copy, name))
            assert getattr(run, name).dtype == getattr(copy, name).dtype
            assert getattr(copy, name).flags.c_contiguous
        assert run.metrics.keys() == copy.metrics.keys()
        for name, values in run.metrics.items():
            assert np.array_equal(values, copy.metrics[name], equal_nan=True)


def test_an_archive_is_lossless(tmp_path: Path) -> None:
    runs = made_up_sweep(["ERM", "SANDMask"], environments=4, size=313)
    noise = np.random.default_rng(0).random((3, 2)).tolist()  # no fractions: stored raw
    runs += [
        made_up_run(noise, dataset="Weighted", status="diverged", hparams={"batch_size": 32, "lr": 0.1}),
        made_up_run([[0.5, 1.0]], dataset="Other", status="running", options={"rescale": True, "x": [1, "a"]}),
        replace(made_up_run([[0.5, 1.0]], seed=5), metrics={"penalty": np.array([np.inf])}, classes=()),
        replace(made_up_run([[0.5, 1.0]], seed=6), metrics={"penalty": np.array([np.nan]), "x": np.array([0.1])}),
        shortened(made_up_run([[0.5, 1.0]], seed=7), 0),
    ]
    assert_archive_keeps(runs, tmp_path)


def test_single_precision_metrics_stay_exact(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random(4).astype(np.float32).astype(np.float64)
    run = replace(made_up_run([[0.5, 0.5]] * 4), metrics={"loss": values, "double": values / 3})
    assert_archive_keeps([run], tmp_path)


def test_a_byte_that_changed_in_an_archive_is_noticed(tmp_path: Path) -> None:
    target = tmp_path / "a.records.parquet"
    runs = made_up_sweep(["ERM"], environments=3, draws=2, trials=1, checkpoints=40)
    write_archive(runs, target)
    content = target.read_bytes()
    pages = len(content) - 8 - int.from_bytes(content[-8:-4], "little")  # what follows describes them
    for place in range(4, pages, 31):
        target.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        with suppress(SandmaskError):
            assert_same(read_runs(target), runs)  # where it was of a statistic, nothing is lost


def test_an_archive_is_on_the_disk_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, done = tmp_path / "a.records.parquet", []
    monkeypatch.setattr("os.fsync", lambda _: done.append(target.exists()))
    write_archive([made_up_run([[0.5, 0.5]])], target)
    assert done == [False, True]  # its content before it appears, its name afterwards


def test_an_archive_has_its_suffix_and_appears_whole(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match=r"should end in '\.records\.parquet'. Found 'x\.parquet'"):
        write_archive([], tmp_path / "x.parquet")
    broken = replace(made_up_run([[0.5, 0.5]]), steps=np.array(["a"]))
    with pytest.raises(Exception, match=r"."):
        write_archive([broken], tmp_path / "x.records.parquet")
    assert list(tmp_path.iterdir()) == []
    write_archive([], tmp_path / "empty.records.parquet")
    assert read_runs(tmp_path) == []


def test_a_bad_archive_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "x.records.parquet"
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(SandmaskError, match=r"x\.records\.parquet cannot be read"):
        read_runs(tmp_path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(SandmaskError, match="not an archive of records"):
        read_runs(tmp_path)
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"sandmask.schema": "9"}), path)
    with pytest.raises(SandmaskError, match=r"newer sandmask \(schema 9"):
        read_runs(tmp_path)


@given(st.integers(1, LARGEST_SPLIT), st.data())
def test_counts_are_found_again_from_their_fractions(size: int, data: st.DataObject) -> None:
    counts = np.array(data.draw(st.lists(st.integers(0, size), min_size=1, max_size=20)))
    accuracy = (counts / size)[:, None]
    packed = pack_counts(np.rint(accuracy * (size,)))
    assert np.array_equal(unpack_counts(packed, 1), counts[:, None])
    check_record(made_up_run(accuracy.tolist(), size=size))


def test_records_in_both_formats_have_the_same_accuracies_and_sizes(tmp_path: Path) -> None:
    runs = [made_up_run([[1 / 3, 0.0]], [[2 / 7, 1.0]])]
    runs[0] = replace(runs[0], sizes=((3, 820), (7, LARGEST_SPLIT)))
    runs += made_up_sweep(["ERM"], size=204, trials=1)
    save(tmp_path / "records.jsonl", *runs)
    write_archive(runs, tmp_path / "all.records.parquet")
    for path in tmp_path.iterdir():
        assert_same(read_runs(path), runs)
    assert_same(read_runs(tmp_path), runs)


@pytest.mark.parametrize("suffix", [".jsonl", ".records.parquet"])
def test_files_without_sizes_are_read_and_one_with_sizes_completes_them(tmp_path: Path, suffix: str) -> None:
    runs = made_up_sweep(["ERM"], size=204, trials=1)
    old = [replace(run, sizes=None) for run in runs]
    path = tmp_path / f"old{suffix}"
    if suffix == ".jsonl":
        save(path, *old)
        assert b"sizes" not in path.read_bytes()
    else:
        write_archive(old, path)
    assert_same(read_runs(path), old)
    write_archive(runs, tmp_path / "new.records.parquet")
    assert_same(read_runs(tmp_path), runs)


def test_an_archive_with_sizes_of_one_split_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that inferred sizes from accuracies may have found one and not the other."""
    run, path = made_up_run([[0.5, 0.25]], size=4), tmp_path / "old.records.parquet"
    row = {**_archive._row(run), "out_sizes": None, "out_counts": None, "out_raw": run.accuracy_out.ravel()}
    monkeypatch.setattr(_archive, "_row", lambda _: row)
    write_archive([run], path)
    assert_same(read_runs(path), [replace(run, sizes=None)])


def test_the_folder_of_a_run_on_a_folder_of_images_stays_among_the_runs() -> None:
    spec = replace(made_up_sweep(["ERM"])[0].spec, dataset="/data/photos")
    assert Path("runs") / spec.folder_name == Path("runs") / f"photos-ERM-{spec.id}"


@pytest.mark.skipif(sys.platform == "win32", reason="needs links and pipes")
def test_folders_and_pipes_named_like_records_are_passed_over(tmp_path: Path) -> None:
    save(tmp_path / "a.jsonl", made_up_run([[0.5, 0.5]]))
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert len(read_runs(tmp_path)) == 1
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        read_runs(tmp_path)


def test_changed_line_endings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    save(path, made_up_run([[0.5, 0.5]]))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(SandmaskError, match=r":1 .*became CRLF"):
        read_runs(path)
