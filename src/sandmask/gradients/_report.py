"""Reports of what a mask did to a gradient, computed only when they are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from sandmask.masks import GradientMoments, Mask, MaskError, agreement
from sandmask.masks._base import evaluate


@dataclass(frozen=True)
class MaskSummary:
    """The mask of one tensor, or of all of them together."""

    numel: int
    density: float
    """Mean of the mask over the elements."""
    dead_fraction: float
    """Share of the elements whose mask is exactly 0: they get no gradient."""
    agreement: float
    """Mean over the elements of A = |mean_e sign(g_e)|."""

    def __str__(self) -> str:
        return (
            f"density {self.density:.3f}, dead {self.dead_fraction:.1%}, agreement {self.agreement:.3f} "
            f"({self.numel:,} elements)"
        )


class MaskReport:
    """How much of the gradient a mask let through: `total`, and `per_tensor` by name.

    Nothing is computed before the first access, which waits for the device. Until then the report holds the
    moments, three buffers of the model's size, and afterwards only the numbers. Parameters without a gradient
    are left out.
    """

    _levels: dict[str, list[int]]  # of each tensor: how many elements have a sum of signs of 0, 1, ..., E in size

    def __init__(self, mask: Mask, moments: GradientMoments) -> None:
        self._pending: tuple[Mask, GradientMoments] | None = (mask, moments)
        self.environments = moments.count

    @cached_property
    def per_tensor(self) -> dict[str, MaskSummary]:
        """A summary for every tensor that had a gradient."""
        if self._pending is None:
            raise RuntimeError("The figures are cached before the moments are dropped.")
        summaries = _summarize(*self._pending)
        self._levels = _levels(self._pending[1], summaries)
        self._pending = None
        return summaries

    @cached_property
    def total(self) -> MaskSummary:
        """All tensors together, every element counting the same."""
        parts = self.per_tensor.values()
        numel = sum(part.numel for part in parts)
        return MaskSummary(
            numel,
            sum(part.density * part.numel for part in parts) / max(numel, 1),
            sum(part.dead_fraction * part.numel for part in parts) / max(numel, 1),
            sum(part.agreement * part.numel for part in parts) / max(numel, 1),
        )

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
        """The shares of elements whose agreement A = |mean_e sign(g_e)| is in each of `bins` equal parts of 0..1.

        Bin b holds b / bins <= A < (b + 1) / bins, and the last one A = 1 as well.

        :param bins: number of bins.
        :param tensor: a name, as in `per_tensor`; all elements together if not given.
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
def _summarize(mask: Mask, moments: GradientMoments) -> dict[str, MaskSummary]:
    weights = evaluate(mask, moments)[0]
    names = {position: moments.names[i] for i, position in moments.position.items()}
    figures = {
        position: torch.stack([w.mean(), (w == 0).to(w.dtype).mean(), agreement(signs, moments.count).mean()]).float()
        for position, (w, signs) in enumerate(zip(weights, moments.sums.sign_sum, strict=True))
        if w.numel() > 0
    }
    values: dict[int, list[float]] = {}
    for device in {figure.device for figure in figures.values()}:  # one transfer a device, not one a tensor
        here = [position for position, figure in figures.items() if figure.device == device]
        values.update(zip(here, torch.stack([figures[position] for position in here]).tolist(), strict=True))
    return {names[position]: MaskSummary(weights[position].numel(), *values[position]) for position in figures}


@torch.no_grad()
def _levels(moments: GradientMoments, summaries: Mapping[str, MaskSummary]) -> dict[str, list[int]]:
    """Sums of signs are whole numbers: counted, they make a histogram of any number of bins, without the moments."""
    signs = {moments.names[i]: moments.sums.sign_sum[position] for i, position in moments.position.items()}
    return {
        name: torch.bincount(signs[name].abs().long().flatten(), minlength=moments.count + 1).tolist()
        for name in summaries
    }
