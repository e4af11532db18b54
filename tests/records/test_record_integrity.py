"""Damage to records is noticed: by checksums, by ids, and by values that cannot be."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sandmask.errors import SandmaskError
from sandmask.records import RecordWriter, RunRecord, RunSpec, Sizes, _archive, read_runs, write_archive
from sandmask.records._checks import LONGEST_NAME
from sandmask.records.testing import made_up_run, made_up_sweep

DAMAGED_COPIES = 150


def save(path: Path, runs: list[RunRecord]) -> None:
    with RecordWriter(path) as writer:
        for run in runs:
            writer.start(run.spec, run.env_names, run.classes, run.sizes)
        for run in reversed(runs):  # the lines of runs alternate with those of others
            for index, step in enumerate(run.steps):
                metrics = {name: values[index] for name, values in run.metrics.items()}
                writer.evaluation(run.spec.id, int(step), run.accuracy_in[index], run.accuracy_out[index], metrics)
            writer.end(run.spec.id, "done", int(run.steps[-1]))


def without_checksums(path: Path) -> list[dict[str, object]]:
    """The lines as they were written before there were checksums."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "crc"} for line in lines]


def put(path: Path, lines: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def change_digit(data: bytearray, rng: random.Random) -> None:
    place = rng.choice([place for place, letter in enumerate(data) if chr(letter).isdigit()])
    data[place] = ord(rng.choice([digit for digit in "0123456789" if ord(digit) != data[place]]))


def remove_bytes(data: bytearray, rng: random.Random) -> None:
    begin = rng.randrange(len(data))
    del data[begin : begin + rng.randrange(1, 30)]


def insert_bytes(data: bytearray, rng: random.Random) -> None:
    place = rng.randrange(len(data))
    data[place:place] = bytes(rng.choices(b'0123456789.,"}]\n', k=rng.randrange(1, 4)))


def zero_block(data: bytearray, rng: random.Random) -> None:
    begin = rng.randrange(len(data))
    data[begin : begin + 64] = bytes(min(64, len(data) - begin))


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _on_lines(change: Callable[[list[bytes], random.Random], None]) -> Callable[[bytearray, random.Random], None]:
    def damage(data: bytearray, rng: random.Random) -> None:
        lines = bytes(data).splitlines(keepends=True)
        change(lines, rng)
        data[:] = b"".join(lines)

    return damage


def remove_line(lines: list[bytes], rng: random.Random) -> None:
    del lines[rng.randrange(len(lines))]


def repeat_line(lines: list[bytes], rng: random.Random) -> None:
    lines.insert(rng.randrange(len(lines)), rng.choice(lines))


def swap_lines(lines: list[bytes], rng: random.Random) -> None:
    first, second = rng.sample(range(len(lines)), 2)
    lines[first], lines[second] = lines[second], lines[first]


DAMAGES = [
    flip,
    change_digit,
    remove_bytes,
    insert_bytes,
    zero_block,
    truncate,
    _on_lines(remove_line),
    _on_lines(repeat_line),
    _on_lines(swap_lines),
]


def is_prefix(found: RunRecord, whole: RunRecord) -> bool:
    """Whether a run is unchanged, or lost its last lines and is not finished any more."""
    count = len(found.steps)
    same = (
        found.spec == whole.spec
        and (found.env_names, found.sizes) == (whole.env_names, whole.sizes)
        and np.array_equal(found.steps, whole.steps[:count])
        and np.array_equal(found.accuracy_in, whole.accuracy_in[:count])
        and np.array_equal(found.accuracy_out, whole.accuracy_out[:count])
        and all(np.array_equal(values, whole.metrics[name][:count]) for name, values in found.metrics.items())
    )
    return same and (found.status == "running" or (count == len(whole.steps) and found.status == whole.status))


def runs_or_none(path: Path, named: str) -> list[RunRecord] | None:
    """The runs of a file; None where it is refused, by a message that says where the damage is."""
    try:
        return read_runs(path)
    except SandmaskError as error:
        if not re.search(named, str(error)):
            raise
        return None


def test_no_damage_gives_other_numbers(tmp_path: Path) -> None:
    runs = made_up_sweep(["ERM"], environments=2, draws=2, trials=1, checkpoints=4)
    path = tmp_path / "records.jsonl"
    save(path, runs)
    whole, known = path.read_bytes(), {run.spec.id: run for run in runs}
    outcomes = {"refused": 0, "same": 0, "shorter": 0}
    for number in range(DAMAGED_COPIES):
        rng = random.Random(number)
        data = bytearray(whole)
        DAMAGES[number % len(DAMAGES)](data, rng)
        path.write_bytes(data)
        found = runs_or_none(path, r"records\.jsonl:\d+")
        if found is None:
            outcomes["refused"] += 1
            continue
        assert all(is_prefix(run, known[run.spec.id]) for run in found), f"copy {number}"
        ended = len(found) == len(runs) and all(run.status == "done" for run in found)
        outcomes["same" if ended else "shorter"] += 1
    assert outcomes["refused"] > 100, outcomes


def test_no_damage_to_an_archive_gives_other_numbers(tmp_path: Path) -> None:
    runs = made_up_sweep(["ERM"], environments=2, draws=2, trials=1, checkpoints=4)
    path = tmp_path / "all.records.parquet"
    write_archive(runs, path)
    whole = path.read_bytes()
    for number in range(DAMAGED_COPIES):
        rng = random.Random(number)
        data = bytearray(whole)
        (flip, remove_bytes, zero_block, truncate)[number % 4](data, rng)
        path.write_bytes(data)
        found = runs_or_none(path, r"all\.records\.parquet")
        if found is None:
            continue
        assert len(found) == len(runs), f"copy {number}"
        for run, known in zip(found, runs, strict=True):
            assert is_prefix(run, known), f"copy {number}"
            assert run.status == known.status
            assert run.metrics.keys() == known.metrics.keys()


def test_files_without_checksums_are_read_and_continued(tmp_path: Path) -> None:
    run = made_up_run([[0.5, 0.5], [0.6, 0.6], [0.7, 0.7]])
    path = tmp_path / "records.jsonl"
    save(path, [run])
    put(path, without_checksums(path)[:2])
    assert len(read_runs(path)[0].steps) == 1
    with RecordWriter(path) as writer:
        for index in (1, 2):
            writer.evaluation(run.spec.id, int(run.steps[index]), run.accuracy_in[index], run.accuracy_out[index])
    assert np.array_equal(read_runs(path)[0].accuracy_in, run.accuracy_in)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0].replace(b'"yes"', b'"yea"') + b"".join(lines[1:]))  # two lines before the checksum
    with pytest.raises(SandmaskError, match=r":3 .*checksum does not match"):
        read_runs(path)
    path.write_bytes(b"".join([*lines[:2], lines[3]]))  # a line with a checksum that followed one without
    with pytest.raises(SandmaskError, match=r":3 .*checksum does not match"):
        read_runs(path)
    with pytest.raises(SandmaskError, match=r":3 .*checksum does not match"):
        RecordWriter(path)


def test_a_checksum_that_is_gone_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    save(path, [made_up_run([[0.5, 0.5], [0.6, 0.6]])])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], re.sub(rb',"crc":"\w+"', b"", lines[1]), *lines[2:]]))
    with pytest.raises(SandmaskError, match=r":2 .*checksum is missing"):
        read_runs(path)
    path.write_bytes(lines[0].replace(b'"crc"', b'"crb"'))
    with pytest.raises(SandmaskError, match=r":1 .*unknown entries: 'crb'"):
        read_runs(path)


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (1, {"run": "0" * 16}, "the id '0000000000000000' does not belong to the spec"),
        (1, {"env_names": ["a", "a"]}, "two environments have the same name"),
        (1, {"env_names": [1, 2]}, "the environment name 1 is not a string"),
        (1, {"env_names": ["a"]}, "the id|held out"),
        (1, {"env_names": ["x" * (LONGEST_NAME + 1), "b"]}, "has 1,001 characters, and at most 1,000 are read"),
        (1, {"env_names": ["\ud800", "b"]}, "not valid Unicode"),
        (1, {"sizes": [[10, 10]]}, "sizes should be two lists, of the in and out splits of 2 environments"),
        (1, {"sizes": 10}, "not iterable"),
        (1, {"sizes": [[10, 10], [10]]}, "sizes should be two lists"),
        (1, {"sizes": [[10, 10], [10, 0]]}, "from 1 to 1,073,741,823, not 0"),
        (1, {"sizes": [[10, 10], [10, 10.0]]}, "should be an integer"),
        (1, {"sizes": [[10, 10], [10, 2**30]]}, "should be an integer"),
        (1, {"sizes": [[10, 10], [10, "10"]]}, "should be an integer"),
        (2, {"in": [0.5, 0.55]}, r"counts over splits of \[10, 10\], not 0\.55"),
        (2, {"in": [5.0, 0.5]}, "numbers from 0 to 1, not 5.0"),
        (2, {"out": [0.5, -0.1]}, "numbers from 0 to 1, not -0.1"),
        (2, {"in": ["0.5", 0.5]}, "numbers from 0 to 1, not '0.5'"),
        (2, {"in": [float("nan"), 0.5]}, "NaN is not a JSON number"),
        (2, {"step": -1}, "step should be an integer of at least 0, not -1"),
        (2, {"step": 0.5}, "step should be an integer"),
        (2, {"step": 10**30}, "step should be an integer"),
        (2, {"metrics": {"loss": True}}, "True is not a number"),
        (2, {"metrics": {"x" * 2000: 1.0}}, "has 2,000 characters"),
        (2, {"more": 1}, "unknown entries: 'more'"),
        (4, {"step": "last"}, "step should be an integer"),
    ],
)
def test_values_that_cannot_be_are_refused(
    tmp_path: Path, number: int, changes: dict[str, object], message: str
) -> None:
    path = tmp_path / "records.jsonl"
    save(path, [made_up_run([[0.5, 0.5], [0.6, 0.6]], test_envs=[1], size=10)])
    lines = without_checksums(path)
    lines[number - 1].update(changes)
    put(path, lines)
    with pytest.raises(SandmaskError, match=rf"records\.jsonl:{number} .*{message}.*restore it from a copy"):
        read_runs(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"dataset": 3},
        {"test_envs": [0, 0]},
        {"test_envs": [7]},
        {"test_envs": [-1]},
        {"hparams": [1]},
        {"hparams": {"lr": float("inf")}},
        {"options": {"deep": {"er": "x" * 2000}}},
        {"trial_seed": "0"},
    ],
)
def test_specs_that_cannot_be_are_refused_by_reader_and_writer(tmp_path: Path, changes: dict[str, object]) -> None:
    path = tmp_path / "records.jsonl"
    run = made_up_run([[0.5, 0.5]])
    save(path, [run])
    lines = without_checksums(path)
    written = {**run.spec.to_json(), **changes}
    spec = RunSpec.from_json(written)
    lines[0].update(run=spec.id, spec=written)
    put(path, lines[:1])
    with pytest.raises(SandmaskError, match=r"records\.jsonl:1 "):
        read_runs(path)
    with RecordWriter(tmp_path / "new.jsonl") as writer, pytest.raises(SandmaskError, match="cannot be written to"):
        writer.start(spec, run.env_names)


@pytest.mark.parametrize("values", [[[1.5, 0.5]], [[float("nan"), 0.5]], [[-1.0, 0.5]]])
def test_archives_refuse_accuracies_that_cannot_be(
    tmp_path: Path, values: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "all.records.parquet"
    run = replace(made_up_run([[0.5, 0.5]]), accuracy_in=np.array(values))
    with pytest.raises(SandmaskError, match=r"cannot be written: run [0-9a-f]{16}: its accuracies"):
        write_archive([run], path)
    if np.isfinite(values).all():  # written by something that did not check
        monkeypatch.setattr("sandmask.records._archive.check_record", lambda run: None)
        write_archive([run], path)
        monkeypatch.undo()
        with pytest.raises(SandmaskError, match=r"all\.records\.parquet.*run [0-9a-f]{16}.*numbers from 0 to 1"):
            read_runs(path)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (((2, 2), (2, 3)), r"accuracies should be counts over splits of \[2, 3\], not 0\.5"),
        (((2, 2), (2, 0)), "the size of a split should be an integer"),
        (((2, 2), (2, 2, 2)), "sizes should be two lists"),
    ],
)
def test_archives_refuse_sizes_that_cannot_be(tmp_path: Path, sizes: Sizes, message: str) -> None:
    run = replace(made_up_run([[0.5, 0.5]]), sizes=sizes)
    with pytest.raises(SandmaskError, match=rf"cannot be written: run [0-9a-f]{{16}}: {message}"):
        write_archive([run], tmp_path / "all.records.parquet")


def test_archives_refuse_a_step_that_comes_twice(tmp_path: Path) -> None:
    run = replace(made_up_run([[0.5, 0.5], [0.6, 0.6]]), steps=np.array([100, 100]))
    with pytest.raises(SandmaskError, match="its steps do not increase"):
        write_archive([run], tmp_path / "all.records.parquet")


def test_an_archive_whose_ids_do_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "all.records.parquet"
    row = _archive._row
    monkeypatch.setattr(_archive, "_row", lambda *some: {**row(*some), "run": "0" * 16})
    write_archive([made_up_run([[0.5, 0.5]])], path)
    with pytest.raises(SandmaskError, match="the id '0000000000000000' does not belong to its spec"):
        read_runs(path)


def test_deep_json_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(SandmaskError, match=r"records\.jsonl:1 .*nested too deeply"):
        read_runs(path)
    with pytest.raises(SandmaskError, match=r"records\.jsonl:1 .*nested too deeply"):
        RecordWriter(path)
