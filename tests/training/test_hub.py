"""Models in the layout of the Hugging Face Hub."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner

import sandmask
from sandmask.cli._app import app
from sandmask.datasets import load_dataset
from sandmask.errors import SandmaskError
from sandmask.training import load_run
from sandmask.training.hub import push_to_hub

SMALL = {"batch_size": 8}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three evaluations that also keeps an average."""
    how = {"steps": 5, "checkpoint_every": 2, "hparams": {**SMALL, "sma_start": 1}, "averages": ["sma"]}
    sandmask.train("DebugVector", "ERM", "b", out=tmp_path / "run", progress=False, **how)  # type: ignore[arg-type]
    return tmp_path / "run"


def front_matter(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return found


def test_what_is_saved_predicts_the_same_to_the_bit(run: Path, tmp_path: Path) -> None:
    trained = load_run(run)
    folder = trained.save_pretrained(tmp_path / "hub")
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "records.jsonl",
    ]  # fmt: skip
    shutil.rmtree(run)
    again = load_run(folder)
    x = load_dataset("DebugVector").inputs(torch.arange(40))
    assert torch.equal(again.logits(x), trained.logits(x))
    assert again.spec == trained.spec
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {str(number): name for number, name in enumerate(trained.classes)}
    assert config["spec"] == trained.spec.to_json()
    assert again.save_pretrained(folder) == folder  # a new version of itself
    assert torch.equal(load_run(folder).logits(x), trained.logits(x))


def test_the_card_has_the_numbers_of_the_records(run: Path, tmp_path: Path) -> None:
    trained = load_run(run)
    record = trained.record()
    card = (trained.save_pretrained(tmp_path / "hub") / "README.md").read_text()
    assert f"| b | held out | {record.accuracy_in[-1, 1]:.1%} | {record.accuracy_out[-1, 1]:.1%} |" in card
    assert "step 4 of 4" in card
    assert "The error over repetitions is not known" in card
    command = re.search(r"\$ (sandmask train DebugVector ERM --test-env b .*)", card)
    assert command is not None
    assert "--hparam batch_size=8" in command[1]
    about = front_matter(card)
    assert about["library_name"] == "sandmask"
    assert about["model-index"][0]["results"][0]["metrics"][0]["value"] == record.accuracy_in[-1, 1]


def test_an_average_has_its_own_numbers_and_name(run: Path, tmp_path: Path) -> None:
    trained = load_run(run, average="sma")
    folder = trained.save_pretrained(tmp_path / "hub")
    rows = sandmask.records.split_averages([trained.record()])
    (average,) = [row for row in rows if row.spec.options.get("average") == "sma"]
    card = (folder / "README.md").read_text()
    assert "# ERM + SMA on DebugVector" in card
    assert f"| a | trained on the training part | {average.accuracy_in[-1, 0]:.1%} |" in card
    again = load_run(folder)
    x = load_dataset("DebugVector").inputs(torch.arange(8))
    assert torch.equal(again.logits(x), trained.logits(x))
    assert again.info.average == "sma"
    again.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "README.md").read_text().replace("copy", "hub") == card


def test_a_run_of_a_sweep_has_the_error_over_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"n_hparams": 2, "n_trials": 2, "test_envs": "b", "steps": 5, "checkpoint_every": 2, "hparams": SMALL}
    how = {"keep_models": "best", "workers": 1, "progress": False, "search": "optuna", "pruner": "none"}
    swept = sandmask.sweep("swept", "DebugVector", "ERM", **how, **asked)  # type: ignore[arg-type]
    chosen = swept.report().rules[0].datasets["DebugVector"].cells["ERM (searched, 2 proposals)", "b"]
    assert chosen.trials[0].selected is not None
    identity = chosen.trials[0].selected.run.spec.id
    result = CliRunner().invoke(app, ["export", "swept", "--run", identity, "--hub", "hub"])
    assert result.exit_code == 0, result.output
    card = Path("hub/README.md").read_text()
    assert f"**{chosen.mean:.1f} ± {chosen.error:.1f}%** on b" in card
    assert "over 2 trials, with training-domain selection among 4 runs" in card
    assert "which has the best mean accuracy on the validation parts of the training environments" in card
    x = load_dataset("DebugVector").inputs(torch.arange(8))
    assert torch.equal(load_run("hub").logits(x), load_run("swept", run=identity).logits(x))


def test_a_kept_model_and_its_average_have_their_records(tmp_path: Path) -> None:
    asked = {"n_hparams": 1, "n_trials": 1, "test_envs": "b", "steps": 5, "checkpoint_every": 2, "hparams": SMALL}
    more = {"averages": "swad", "metrics": "all", "keep_models": "best", "workers": 1, "progress": False}
    swept = sandmask.sweep(tmp_path / "swept", "DebugVector", "ERM", **asked, **more)  # type: ignore[arg-type]
    identity = swept.runs[0].id
    for average in (None, "swad"):
        kept = load_run(swept, run=identity, average=average)
        again = load_run(kept.save_pretrained(tmp_path / f"hub-{average}"))
        assert again.info == kept.info
        card = (tmp_path / f"hub-{average}" / "README.md").read_text()
        assert (again.save_pretrained(tmp_path / f"hub-{average}") / "README.md").read_text() == card
        found, expected = again.record(), kept.record()
        assert found.spec == expected.spec
        assert (found.status, found.sizes, found.classes) == (expected.status, expected.sizes, expected.classes)
        for name in ("steps", "accuracy_in", "accuracy_out"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        for these, those in ((found.metrics, expected.metrics), (found.tables, expected.tables)):
            assert these.keys() == those.keys()
            for name, curve in those.items():
                np.testing.assert_array_equal(these[name], curve)


def test_names_cannot_change_the_card(run: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    trained = load_run(run)
    trained.info = replace(trained.info, classes=("a|b", "</p>\n---"), environments=("[x](y)", "b", "c: `d`"))
    card = (trained.save_pretrained(tmp_path / "hub") / "README.md").read_text()
    assert front_matter(card)["library_name"] == "sandmask"
    assert "\\[x\\](y)" in card
    assert "a\\|b, \\</p\\>\\\\n---" in card


def test_folders_with_other_files_are_refused(run: Path, tmp_path: Path) -> None:
    trained = load_run(run)
    with pytest.raises(SandmaskError, match=r"run holds other files, such as model-sma\.safetensors"):
        trained.save_pretrained(run)
    (run / "model-sma.safetensors").unlink()
    with pytest.raises(SandmaskError, match="is the folder of a run"):
        trained.save_pretrained(run)
    (tmp_path / "file").touch()
    with pytest.raises(SandmaskError, match="file is a file"):
        trained.save_pretrained(tmp_path / "file")


def test_without_a_network_one_line_says_what_to_do(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for command, message in (
        (["export", "run", "--push", "me/model"], "Cannot push hf:me/model: huggingface.co cannot be reached"),
        (["export", "run", "--push", "model"], "named OWNER/NAME. Found 'model'"),
        (["predict", "hf:me/model", "points.csv"], "Cannot load hf:me/model"),
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_push_uploads_the_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is a folder here: the two calls that go over the network are replaced."""

    class LocalHub:
        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
            assert exist_ok
            return f"https://hub/{name}{' (private)' * private}"

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
            assert commit_message.startswith("sandmask ")
            shutil.copytree(folder_path, tmp_path / "hub" / repo_id)

    monkeypatch.setattr("sandmask._online.answers", lambda _: True)
    monkeypatch.setattr("huggingface_hub.HfApi", LocalHub)
    assert push_to_hub(load_run(run), "hf:me/model", private=True) == "https://hub/me/model (private)"
    assert 'load_run("hf:me/model")' in (tmp_path / "hub" / "me" / "model" / "README.md").read_text()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path / "hub" / name))
    x = load_dataset("DebugVector").inputs(torch.arange(8))
    assert torch.equal(load_run("hf:me/model").logits(x), load_run(run).logits(x))
