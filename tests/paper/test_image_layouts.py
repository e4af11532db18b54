"""The image sets that are not at hand: the whole path, on generated images in their published layout.

The commands are those of docs/paper/other-datasets.md, with a tiny network from scratch and two steps.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from sandmask.cli._app import app
from sandmask.datasets import DATASETS
from sandmask.paper._compare import compare
from sandmask.records import read_runs
from sandmask.registry import simplified

FOLDERS = {
    "VLCS": "VLCS",
    "PACS": "PACS",
    "OfficeHome": "office_home",
    "TerraIncognita": "terra_incognita",
    "DomainNet": "domain_net",
}
CLASSES = {
    "VLCS": ("bird", "car", "chair", "dog", "person"),
    "TerraIncognita": (
        *("bird", "bobcat", "cat", "coyote", "dog"),
        *("empty", "opossum", "rabbit", "raccoon", "squirrel"),
    ),
    "PACS": ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
}
CONFIGS = {
    "VLCS": "vlcs",
    "PACS": "pacs_resnet50",
    "OfficeHome": "office_home",
    "TerraIncognita": "terra_incognita",
    "DomainNet": "domain_net",
}
ROOT = Path(__file__).parents[2]


def draw_images(root: Path, dataset: str) -> None:
    """One small picture a class and domain, under the names that the published archives have."""
    entry = DATASETS[dataset]
    count = entry.n_classes or 0
    names = CLASSES.get(dataset) or tuple(f"class_{number:03d}" for number in range(count))
    draws = np.random.RandomState(0)
    for domain in entry.domains:
        for name in names:
            folder = root / FOLDERS[dataset] / domain / name
            folder.mkdir(parents=True)
            for number in range(2 if count < 20 else 1):
                pixels = draws.randint(0, 256, (8, 8, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")


@pytest.mark.parametrize("dataset", ["VLCS", "OfficeHome", "TerraIncognita", "DomainNet"])
def test_a_sweep_of_the_layout_ends_in_a_table(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_images(tmp_path / "data", dataset)
    entry = DATASETS[dataset]
    small = replace(
        entry, load=partial(entry.load, image_size=32, storage_size=32), input_shape=(3, 32, 32)
    )  # 224 would take minutes
    monkeypatch.setattr(DATASETS, "_entries", {**DATASETS._entries, simplified(dataset): small})
    options = {
        "--config": ROOT / "results" / "paper" / f"{CONFIGS[dataset]}.toml",
        "--algorithms": "ERM,SANDMask",
        "--test-envs": "0",
        "--n-hparams": "1",
        "--n-trials": "1",
        "--steps": "1",
        "--network": "test_resnet",
        "--weights": "none",
        "--hparam": "batch_size=2",
        "--data-dir": tmp_path / "data",
        "--device": "cpu",
    }
    words = [str(word) for pair in options.items() for word in pair]
    result = CliRunner().invoke(app, ["sweep", "run", str(tmp_path / "runs"), *words, "--no-calibrate", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["done"] == told["runs"]
    runs = read_runs(tmp_path / "runs")
    assert {(run.spec.dataset, run.spec.network, run.status) for run in runs} == {(dataset, "test_resnet", "done")}
    cells = compare(runs, [dataset], ["training-domain"])
    first = next(cell for cell in cells if cell.environment == DATASETS[dataset].environments[0])
    assert first.ours.mean is not None
    assert first.paper is not None
    assert first.ours.complete
