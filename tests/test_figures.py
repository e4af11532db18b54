"""The pictures of the documentation can be drawn again, and show what the masks compute."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from sandmask.masks import GradientMoments, SANDMask

DOCS = Path(__file__).parents[1] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "figures.py"))


def test_every_picture_is_drawn_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["figures.py", "--out", str(tmp_path)])
    SCRIPT["main"]()
    drawn = {path.name for path in tmp_path.iterdir()}
    shown = set(re.findall(r"\(images/(masks-[\w-]+\.svg)\)", (DOCS / "masks.md").read_text(encoding="utf-8")))
    assert drawn == shown == {path.name for path in (DOCS / "images").glob("masks-*")}


def test_chances_of_agreement_are_those_of_coin_tosses() -> None:
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 5).T  # all 32 ways, [5, 32]
    found = GradientMoments.of_gradients(signs).agreement
    for value, chance in SCRIPT["agreements"](5):
        assert (found - value).abs().lt(1e-6).float().mean().item() == pytest.approx(chance)


def test_the_curves_are_the_masks_weights() -> None:
    torch.manual_seed(0)
    stack = torch.randn(5, 200) + 0.5
    dispersion = stack.var(0) / stack.mean(0).square()
    expected = SANDMask(tau=0.3).weights(stack)
    drawn = SCRIPT["formula"](stack.sign().mean(0).abs(), 0.3, dispersion)
    torch.testing.assert_close(drawn, expected, rtol=1e-4, atol=1e-6)
