"""Reports on masks: density, dead elements and agreement. They are computed when they are read."""

from dataclasses import dataclass
from functools import cached_property

import torch

from sandmask.masks import GradientMoments, Mask, MaskError, agreement
from sandmask.masks._base import evaluate


@dataclass(frozen=True)
class MaskSummary:
    """A summary of the mask of one tensor, or of all tensors together."""

    numel: int
    density: float
    """Mean of the mask over the elements."""
    dead_fraction: float
    """Share of the elements whose mask is exactly 0, and which therefore get no gradient."""
    agreement: float
    """Mean over the elements of A = |mean_e sign(g_e)|."""

    def __str__(self) -> str:
        return (
            f"density {self.density:.3f}, dead {self.dead_fraction:.1%}, agreement {self.agreement:.3f} "
            f"({self.numel:,} elements)"
        )


class MaskReport:
    """How much of the gradient a mask let through: `total`, and `per_tensor` by name.

    Nothing is computed before the first access, which waits for the device. Until then, the report holds the
    moments, which are three buffers of the model's size. Afterwards, it holds only the numbers. Parameters without
    a gradient are left out.
    """

    def __init__(self, mask: Mask, moments: GradientMoments) -> None:
        self._pending: tuple[Mask, GradientMoments] | None = (mask, moments)
        self._levels: dict[str, list[int]] = {}  # by tensor: the numbers of elements with |sum of signs| 0, 1, ..., E
        self.environments = moments.count

    @cached_property
    def per_tensor(self) -> dict[str, MaskSummary]:
        """A summary for every tensor that had a gradient."""
        assert self._pending is not None  # the figures are cached before the moments are dropped
        summaries, self._levels = _summarize(*self._pending)
        self._pending = None
        return summaries

    @cached_property
    def total(self) -> MaskSummary:
        """A summary of all tensors together, in which every element has the same weight."""
        parts = self.per_tensor.values()
        numel = sum(part.numel for part in parts)
        names = ("density", "dead_fraction", "agreement")
        means = (sum(getattr(part, name) * part.numel for part in parts) / max(numel, 1) for name in names)
        return MaskSummary(numel, *means)

    @property
    def density(self) -> float:
        """Mean of the mask over all elements."""
        return self.total.density

    @property
    def dead_fraction(self) -> float:
        """Share of all elements whose mask is exactly 0."""
        return self.total.dead_fraction

    @property
    def agreement(self) -> float:
        """Mean agreement of signs over all elements."""
        return self.total.agreement

    def agreement_histogram(self, bins: int = 10, tensor: str | None = None) -> list[float]:
        """Return the share of elements whose agreement A = |mean_e sign(g_e)| is in each of several equal bins of 0..1.

        Bin b holds b / bins <= A < (b + 1) / bins; the last bin also holds A = 1.

        :param bins: number of bins.
        :param tensor: a name, as in `per_tensor`; all elements together if not given.
        :return: the shares, one per bin.
        """
        if bins < 1:
            raise MaskError(f"Parameter `bins` should be at least 1. Found `bins` = {bins}.")
        names = list(self.per_tensor) if tensor is None else [tensor]
        if tensor is not None and tensor not in self.per_tensor:
            known = ", ".join(self.per_tensor) or "none"
            raise MaskError(f"Parameter `tensor` should be one of {known}. Found `tensor` = {tensor!r}.")
        counts = [0] * bins
        for name in names:
            for level, count in enumerate(self._levels[name]):
                counts[min(level * bins // self.environments, bins - 1)] += count
        return [count / max(sum(counts), 1) for count in counts]

    def __repr__(self) -> str:
        return f"MaskReport({self.environments} environments: {self.total})"

    def __str__(self) -> str:
        width = max((len(name) for name in self.per_tensor), default=0)
        summaries = {**self.per_tensor, "total": self.total}
        return "\n".join(f"{name:<{width}}  {summary}" for name, summary in summaries.items())


@torch.no_grad()
def _summarize(mask: Mask, moments: GradientMoments) -> tuple[dict[str, MaskSummary], dict[str, list[int]]]:
    """A summary of each tensor, and the numbers of its elements with |sum of signs| = 0, 1, ..., E.

    Sums of signs are integers, so these counts give histograms with any number of bins, without the moments.
    """
    weights, _ = evaluate(mask, moments)
    names = [moments.names[i] for i in moments.position]
    summaries: dict[str, MaskSummary] = {}
    levels: dict[str, list[int]] = {}
    for name, weight, signs in zip(names, weights, moments.sums.sign_sum, strict=True):
        if weight.numel() > 0:
            dead = (weight == 0).to(weight.dtype).mean()
            figures = torch.stack([weight.mean(), dead, agreement(signs, moments.count).mean()])
            summaries[name] = MaskSummary(weight.numel(), *figures.float().tolist())
            levels[name] = torch.bincount(signs.abs().long().flatten(), minlength=moments.count + 1).tolist()
    return summaries, levels
