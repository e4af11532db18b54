"""Figure 1's two environments in the plane, their masked gradients, and where gradient descent ends."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sandmask.masks import and_weights, sand_weights

REACH = 2.0  # the plane is [-REACH, REACH] squared
NEAR = 0.25  # an end that is this close to a minimum counts as at the minimum
SLOW = 0.01  # an update below this share of the average gradient is slow


@dataclass(frozen=True)
class Bump:
    """height * exp(-|p - centre|^2 / (2 width^2)): a hill, or a well if the height is negative."""

    height: float
    centre: tuple[float, float]
    width: float

    def _weight(self, points: Tensor) -> tuple[Tensor, Tensor]:
        away = points - torch.tensor(self.centre, dtype=points.dtype, device=points.device)
        return away, self.height * torch.exp(-away.square().sum(-1, keepdim=True) / (2 * self.width**2))

    def value(self, points: Tensor) -> Tensor:
        """The loss at points: [..., 2] -> [...]."""
        return self._weight(points)[1].squeeze(-1)

    def gradient(self, points: Tensor) -> Tensor:
        """The gradient at points: [..., 2] -> [..., 2]."""
        away, weight = self._weight(points)
        return -away / self.width**2 * weight


# The paper describes its landscape in words and gives no formula: A and B share a shallow minimum at the upper right.
# At the lower left A has a deep minimum and B a shallow maximum, so their average has a minimum there, too.
SHARED = Bump(-1.0, (1.0, 1.0), 0.7)
A = (SHARED, Bump(-3.0, (-1.0, -1.0), 0.8))
B = (SHARED, Bump(1.0, (-1.0, -1.0), 0.8))


def losses(points: Tensor) -> Tensor:
    """The losses of A and B: [..., 2] -> [2, ...]."""
    return torch.stack([one.value(points) + other.value(points) for one, other in (A, B)])


def gradients(points: Tensor) -> Tensor:
    """The gradients of A and B: [..., 2] -> [2, ..., 2]."""
    return torch.stack([one.gradient(points) + other.gradient(points) for one, other in (A, B)])


@dataclass(frozen=True)
class Masking:
    """A mask with a name: a function from gradients [E, ...] to weights [...]."""

    name: str
    label: str
    weights: Callable[[Tensor], Tensor]
    as_printed: bool = True

    def update(self, grads: Tensor) -> Tensor:
        """The update of gradient descent: m * mean_e(g_e)."""
        return self.weights(grads) * grads.mean(0)


def and_masking(tau: float) -> Masking:
    """The AND-mask; tau = 0 is plain averaging (ERM)."""

    def weights(grads: Tensor) -> Tensor:
        return and_weights(grads.sign().sum(0), len(grads), tau)

    if tau == 0:
        return Masking("erm", "Average (ERM)", weights)
    return Masking(f"and-{tau:g}", f"AND-mask, τ = {tau:g}", weights)


def sand_masking(tau: float, sharpness: float | None = None) -> Masking:
    """The SAND-mask of equations 2 and 3; `sharpness` replaces sign(g) by tanh(sharpness * g)."""

    def weights(grads: Tensor) -> Tensor:
        signs = grads.sign() if sharpness is None else torch.tanh(sharpness * grads)
        mean = grads.mean(0)
        return sand_weights(signs.sum(0), mean, (grads - mean).square().sum(0), len(grads), tau)

    name, label = f"sand-{tau:g}", f"SAND-mask, τ = {tau:g}"
    if sharpness is None:
        return Masking(name, label, weights, as_printed=tau >= 0)
    return Masking(f"{name}-smooth-{sharpness:g}", f"{label}, sign → tanh({sharpness:g} g)", weights, as_printed=False)


def grid(points: int) -> Tensor:
    """A square grid over the plane: [points, points, 2], x along the second dimension."""
    axis = torch.linspace(-REACH, REACH, points, dtype=torch.float64)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x, y], -1)


def dead_zones(masking: Masking, resolution: int) -> dict[str, float]:
    """Measure shares of the plane under a mask, on a grid of resolution^2 points.

    "dead": the update is zero; "partly_dead": at least one of its two elements is zero; "slow": it is shorter than a
    hundredth of the average gradient, or zero.
    """
    grads = gradients(grid(resolution))
    update = masking.update(grads)
    dead, partly = (update == 0).all(-1), (update == 0).any(-1)
    slow = dead | (update.norm(dim=-1) < SLOW * grads.mean(0).norm(dim=-1))
    zones = {"dead": dead, "partly_dead": partly, "slow": slow}
    return {name: float(zone.double().mean()) for name, zone in zones.items()}


def descend(masking: Masking, starts: Tensor, momentum: float, steps: int, lr: float) -> Tensor:
    """Return the ends [N, 2] of gradient descent from starts [N, 2], with the momentum of `torch.optim.SGD`."""
    points, velocity = starts.clone(), torch.zeros_like(starts)
    for _ in range(steps):
        velocity = momentum * velocity + masking.update(gradients(points))
        points = points - lr * velocity
    return points


def minima() -> dict[str, Tensor]:
    """Find the two minima of the average: the shared one, and the one that only A has."""
    starts = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    ends = descend(and_masking(0.0), starts, momentum=0.0, steps=4000, lr=0.05)
    return {"shared": ends[0], "spurious": ends[1]}


ENDS = ("shared", "spurious", "stopped", "elsewhere")


def classify(ends: Tensor, masking: Masking, places: dict[str, Tensor]) -> Tensor:
    """Classify the end of each descent, as an index into `ENDS`.

    A descent has stopped if it gets no update although the average has a gradient. An end near the shared minimum is
    "shared" in any case: the minima of the two environments lie a little apart there, with a small dead zone between.
    """
    grads = gradients(ends)
    stopped = (masking.update(grads) == 0).all(-1) & (grads.mean(0).norm(dim=-1) > 1e-9)
    near = {name: (ends - place).norm(dim=-1) < NEAR for name, place in places.items()}
    kinds = torch.full(stopped.shape, ENDS.index("elsewhere"))
    for name, those in (("spurious", near["spurious"]), ("stopped", stopped), ("shared", near["shared"])):
        kinds = torch.where(those, ENDS.index(name), kinds)
    return kinds
