"""Figure 1: the gradients are those of the losses, and the counts are of what they say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmask.masks import ANDMask, SANDMask, and_weights, sand_weights
from sandmask.paper import _landscape as land
from sandmask.paper.figure_1 import figure_1, maskings


def test_gradients_are_those_of_the_losses() -> None:
    points = torch.rand(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4 - 2
    points.requires_grad_()
    for env in range(2):
        (slow,) = torch.autograd.grad(land.losses(points)[env].sum(), points)
        torch.testing.assert_close(land.gradients(points)[env], slow)


def test_the_landscape_is_as_the_paper_describes_it() -> None:
    """A shared shallow minimum at the upper right; A deep and B a hill at the lower left; a minimum of the average."""
    places = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    a, b = land.losses(places)
    assert a[1] < a[0] < 0
    assert b[0] < 0 < b[1] < a[1].abs()
    minima = land.minima()
    assert (minima["shared"] - places[0]).norm() < 0.1
    assert (minima["spurious"] - places[1]).norm() < 0.1
    assert land.losses(minima["spurious"]).mean() < -0.9


def test_maskings_are_the_packages_own_masks() -> None:
    grads = land.gradients(land.grid(21))
    torch.testing.assert_close(land.and_masking(1.0).update(grads), ANDMask(tau=1.0)(grads))
    torch.testing.assert_close(land.sand_masking(0.5).update(grads), SANDMask(tau=0.5)(grads))
    torch.testing.assert_close(land.sand_masking(-0.5).update(grads), SANDMask(tau=-0.5)(grads))
    torch.testing.assert_close(land.and_masking(0.0).update(grads), grads.mean(0))
    sharp = land.sand_masking(0.5, 1e9).weights(grads)
    torch.testing.assert_close(sharp, land.sand_masking(0.5).weights(grads), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tau", [0.0, 0.3, 0.5, 0.9])
def test_with_two_environments_every_tau_of_the_printed_mask_keeps_the_dead_zones(tau: float) -> None:
    grads = land.gradients(land.grid(401))
    and_zero, zero, zero_below_0 = (
        masking.weights(grads) == 0
        for masking in (land.and_masking(1.0), land.sand_masking(tau), land.sand_masking(-0.1))
    )
    assert (zero | ~and_zero).all()
    assert not (zero_below_0 | ~and_zero).all()
    sand, and_mask = (land.dead_zones(m, 101) for m in (land.sand_masking(tau), land.and_masking(1.0)))
    assert sand["dead"] >= and_mask["dead"] > 0.3
    assert sand["partly_dead"] >= sand["dead"]
    assert sand["slow"] >= sand["dead"]


@settings(max_examples=60, deadline=None)
@given(
    grads=st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=2, max_size=2),
    tau_and=st.floats(0.01, 1),
    tau_sand=st.floats(0, 1),
)
def test_the_statement_that_the_page_proves(grads: list[float], tau_and: float, tau_sand: float) -> None:
    """E = 2, non-zero gradients: what any AND-mask with tau > 0 zeroes, any SAND-mask with tau >= 0 zeroes."""
    pair = torch.tensor(grads, dtype=torch.float64)
    if (pair == 0).any():
        return
    signs, mean = pair.sign().sum(), pair.mean()
    if and_weights(signs, 2, tau_and) == 0:
        assert sand_weights(signs, mean, (pair - mean).square().sum(), 2, tau_sand) == 0


@settings(max_examples=60, deadline=None)
@given(grads=st.lists(st.floats(-10, 10), min_size=2, max_size=9), tau=st.floats(0, 1))
def test_for_any_number_of_environments_and_the_same_tau(grads: list[float], tau: float) -> None:
    values = torch.tensor(grads, dtype=torch.float64)
    signs, mean = values.sign().sum(), values.mean()
    if and_weights(signs, len(grads), tau) == 0:
        assert sand_weights(signs, mean, (values - mean).square().sum(), len(grads), tau) == 0


@pytest.mark.parametrize("masking", [m for m in maskings() if not m.name.startswith("and-1")], ids=lambda m: m.name)
def test_the_average_loss_never_rises_along_a_mask(masking: land.Masking) -> None:
    """The second statement of the page: m >= 0 makes the average loss a Lyapunov function of the flow."""
    points = land.grid(15).reshape(-1, 2)
    grads = land.gradients(points)
    slope = -(masking.update(grads) * grads.mean(0)).sum(-1)
    assert (slope <= 0).all()
    alive = ~(masking.update(grads) == 0).all(-1)
    assert (slope[alive] < 0).all()


def test_ends_are_classified() -> None:
    places = land.minima()
    ends = torch.stack([places["shared"], places["spurious"], torch.tensor([-0.6, -0.6]), torch.tensor([1.9, 1.9])])
    kinds = [land.ENDS[int(kind)] for kind in land.classify(ends, land.and_masking(1.0), places)]
    assert kinds == ["shared", "spurious", "stopped", "elsewhere"]


def test_momentum_is_that_of_sgd() -> None:
    start = torch.tensor([[0.2, 0.1]], dtype=torch.float64)
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.05, momentum=0.9)
    for _ in range(7):
        optimizer.zero_grad()
        land.losses(weight).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    ours = land.descend(land.and_masking(0.0), start, 0.9, 7, 0.05)
    torch.testing.assert_close(ours, weight.detach())


def test_the_figure_has_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from sandmask.paper import figure_1 as module

    monkeypatch.setattr(module, "maskings", lambda: tuple(m for m in maskings() if m.name in module.DRAWN))
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "descend", lambda masking, starts, *rest: starts)
    product = figure_1(quick=True, on_progress=lambda what, done, total: told.append((done, total)))
    assert set(product.figures) == {"figure-1", "figure-1-changes"}
    table = product.data["figure-1"]
    assert (table[list(land.ENDS)].sum(axis=1) == 400).all()
    assert len(product.data["figure-1-ends"]) == len(table) * 400
    assert told[-1] == (12, 12)
