"""Damaged and unreadable files in a sweep's folder: checkpoints, the request, progress files."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.records import RunSpec
from sandmask.sweeps import JobOptions, SweepFolder, SweepSpec, expand, run_sweep, sweep_status
from sandmask.sweeps import _job as job_module
from sandmask.sweeps._stacks import unfinished_stacks
from sandmask.sweeps.executors import InlineExecutor
from sandmask.training import Stack, Trainer

Make = Callable[..., SweepSpec]


def half_trained(folder: SweepFolder, sweep: SweepSpec) -> Path:
    """A sweep that was interrupted in its first stack, and that stack's checkpoint."""

    def interrupted(specs: Sequence[RunSpec], dataset: Dataset, device: torch.device, path: Path, **_: Any) -> None:
        trainer = Trainer(Stack(specs, dataset, device), path)
        trainer.save()
        raise KeyboardInterrupt

    folder.accept(sweep)
    options = JobOptions(str(folder.path), device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_module, "train_stack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(folder, expand(sweep), options, InlineExecutor, lambda _: 100)
    (path,) = folder.stacks.glob("*.checkpoint.safetensors")
    return path


def test_a_checkpoint_that_cannot_be_read_now_is_kept(
    folder: SweepFolder, small_sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = small_sweep()
    path = half_trained(folder, sweep)
    content = path.read_bytes()
    original = Path.open

    def too_many(self: Path, *args: Any, **options: Any) -> Any:
        if self == path:
            raise OSError(errno.EMFILE, "Too many open files", str(self))
        return original(self, *args, **options)

    options = JobOptions(str(folder.path), device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", too_many)
        with pytest.raises(SandmaskError, match="Too many open files"):
            run_sweep(folder, expand(sweep), options, InlineExecutor, lambda _: 100)
    assert path.read_bytes() == content
    moved = SweepFolder(
        folder.path.rename(folder.path.with_name("not UTF-8 \udcff"))
    )  # which safetensors does not open
    options = JobOptions(str(moved.path), device="cpu")
    with pytest.raises(SandmaskError, match="its path is not valid UTF-8"):
        run_sweep(moved, expand(sweep), options, InlineExecutor, lambda _: 100)
    assert (moved.stacks / path.name).read_bytes() == content
    with pytest.raises(SandmaskError, match="is not valid UTF-8, and checkpoints there could not be read"):
        moved.accept(sweep)


@pytest.mark.parametrize("place", [20, -20])  # in the description, in the last tensor
def test_a_damaged_checkpoint_costs_its_stack_a_new_start(folder: SweepFolder, small_sweep: Make, place: int) -> None:
    sweep = small_sweep()
    path = half_trained(folder, sweep)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    result = run_sweep(folder, expand(sweep), JobOptions(str(folder.path), device="cpu"), InlineExecutor, lambda _: 100)
    assert (result.done, result.failed) == (12, {})


def test_planning_reads_only_the_descriptions_of_checkpoints(
    folder: SweepFolder, small_sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = small_sweep()
    half_trained(folder, sweep)
    monkeypatch.setattr("sandmask.training.checkpoint.load_checked", lambda _: pytest.fail("reads the whole file"))
    found = unfinished_stacks(folder, expand(sweep).runs, set(), lambda _: 100)
    assert [len(stack.specs) for stack in found] == [6]


def test_every_damaged_byte_of_a_request_is_noticed_and_files_without_a_checksum_are_read(
    folder: SweepFolder, small_sweep: Make
) -> None:
    sweep = small_sweep()
    folder.accept(sweep)
    content = folder.request.read_bytes()
    for damaged in [content[:place] for place in range(1, len(content))] + [
        content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :] for place in range(len(content))
    ]:
        folder.request.write_bytes(damaged)
        try:
            found = folder.read_spec()
        except SandmaskError:
            continue
        assert found == sweep
    folder.request.write_bytes(content.partition(b"\n")[2].replace(b"n_trials = 1", b"n_trials = 2"))
    edited = folder.read_spec()
    assert edited is not None
    assert edited.n_trials == 2


def test_a_request_survives_a_power_cut(
    folder: SweepFolder, small_sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(str(Path(f"/proc/self/fd/{file}").readlink())))
    folder.accept(small_sweep())
    assert any("sweep.toml" in Path(name).name for name in synced)  # the content, and then the name in the folder
    assert synced[-1] == str(folder.path.resolve())


def test_a_damaged_progress_file_says_nothing_and_stops_nothing(folder: SweepFolder, small_sweep: Make) -> None:
    sweep = small_sweep()
    folder.accept(sweep)
    expansion = expand(sweep)
    run_sweep(folder, expansion, JobOptions(str(folder.path), device="cpu"), InlineExecutor, lambda _: 100)
    file, *others = sorted(folder.stacks.glob("*.progress.json"))
    for other in others:
        other.unlink()
    expected = sweep_status(folder, expansion.runs)
    content = file.read_bytes()
    assert len(expected.standings) == 1
    for strange in (b"{", b"[]", b"{}", b"null", b"[" * 100_000, b'{"stack": "damaged"}', b'{"cells": 3}'):
        (folder.stacks / "damaged.progress.json").write_bytes(strange)
        assert sweep_status(folder, expansion.runs) == expected
    for place in range(len(content)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert sweep_status(folder, expansion.runs).standings in ((), expected.standings)
    file.write_bytes(content.replace(b'"cells": [', b'"cells": [7, '))
    assert sweep_status(folder, expansion.runs).standings == ()


def test_a_request_that_lost_its_lines_is_named(folder: SweepFolder, small_sweep: Make) -> None:
    folder.accept(small_sweep())
    folder.request.write_text('datasets = ["DebugVector"]\n', encoding="utf-8")
    with pytest.raises(SandmaskError, match=r"sweep.toml has no algorithms"):
        folder.read_spec()
    folder.request.write_text("", encoding="utf-8")
    with pytest.raises(SandmaskError, match="has no datasets and no algorithms"):
        folder.accept(small_sweep())
    folder.request.write_bytes(bytes(100))  # as a power cut may leave it
    with pytest.raises(SandmaskError, match=r"is not valid TOML.* finished runs are kept"):
        folder.read_spec()
