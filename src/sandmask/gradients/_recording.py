"""`sandmask.record`: one forward pass over all environments, and one backward pass for all of their losses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from sandmask.gradients._backward import masked_backward
from sandmask.gradients._checks import trainable, why_apart
from sandmask.gradients._losses import EnvironmentGradients, explained, scalar_loss
from sandmask.gradients._one_pass import OnePass
from sandmask.gradients._processes import Processes
from sandmask.gradients._report import MaskReport
from sandmask.gradients._scaling import Scaling
from sandmask.gradients._tape import UnsupportedError
from sandmask.masks import GradientMoments, Mask, MaskError

_INSTEAD = "Compute the losses in separate forward passes, and pass them to `sandmask.backward`."


def record(model: nn.Module, sizes: Sequence[int]) -> "Recording":
    """Record one forward pass of `model` over the examples of all environments.

    In `sandmask.backward`, losses that share a forward pass need one backward pass each. A recorded forward pass needs
    one for all of them: linear, convolution, embedding, normalization and attention layers compute the gradients
    of their weights by environment. The results are equal up to rounding.

    Call the model once inside the `with` block, on the concatenated examples of the environments. Examples must not
    depend on each other. A model that uses parameters in other layers, or has batch-norm in training mode, raises a
    `MaskError`.

    :param model: the model whose `.grad` is to be filled.
    :param sizes: the number of examples of each environment, in the order of the input's rows.

    >>> import torch, sandmask
    >>> model = torch.nn.Linear(2, 1)
    >>> x, y, sizes = torch.randn(7, 2), torch.randn(7, 1), [4, 3]  # two environments
    >>> with sandmask.record(model, sizes) as recording:
    ...     errors = (model(x) - y).square()
    >>> losses = [part.mean() for part in errors.split(sizes)]
    >>> report = recording.backward(losses, sandmask.ANDMask(tau=1.0))
    >>> model.weight.grad.shape
    torch.Size([1, 2])
    """
    return Recording(model, sizes)


class Recording:
    """A recorded forward pass; made by `sandmask.record`."""

    def __init__(self, model: nn.Module, sizes: Sequence[int]) -> None:
        if not isinstance(model, nn.Module):
            raise MaskError(f"Parameter `model` should be a `torch.nn.Module`. Found {type(model).__name__}.")
        self._sizes = [int(size) for size in sizes]
        if len(self._sizes) < 2 or min(self._sizes) < 1:
            raise MaskError(
                "Parameter `sizes` should hold the number of examples of each of at least two environments, each at "
                f"least 1. Found `sizes` = {self._sizes}."
            )
        self._params = trainable(model)
        if (reason := why_apart(model, self._params)) is not None:
            raise MaskError(f"The forward pass cannot be recorded: {reason}. {_INSTEAD}")
        # Sizes may change from step to step, and a check of each would cost a second backward pass.
        case = ("recorded", sum(self._sizes), model.training)
        self._tape: OnePass | None = OnePass(self._params, self._sizes, check=(model, case))
        self._active = ExitStack()

    def __enter__(self) -> Self:
        if self._tape is None:
            raise MaskError("A recording is used once. Call `sandmask.record` again for the next step.")
        self._active.enter_context(self._tape)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._active.close()
        if isinstance(error, UnsupportedError):
            raise MaskError(f"The forward pass cannot be recorded: {error}. {_INSTEAD}") from error

    def backward(
        self,
        losses: Sequence[Tensor] | Tensor,
        mask: Mask,
        *,
        processes: Processes | None = None,
        group: dist.ProcessGroup | None = None,
        scaler: GradScaler | None = None,
        check_finite: bool = True,
        on_report: Callable[[MaskReport], object] | None = None,
    ) -> MaskReport:
        """Fill `.grad` of the model's parameters with the masked mean gradient, as `sandmask.backward` does.

        :param losses: one scalar loss for each environment, computed from the recorded forward pass, each from its
            own examples.
        :param mask: for example `SANDMask(tau=0.8)`.

        The other parameters are those of `sandmask.backward`.
        """
        scaling = Scaling(scaler)
        collect = partial(self._collect, scaling=scaling, check_finite=check_finite)
        named = self._params.items()
        return masked_backward(losses, named, mask, collect, scaling, processes, group, on_report)

    @torch.enable_grad()
    def _collect(
        self,
        losses: Sequence[Tensor] | Tensor,
        named: Mapping[str, Tensor],
        mask: Mask,
        *,
        scaling: Scaling,
        check_finite: bool,
        transform: Callable[[Iterator[EnvironmentGradients]], Iterator[EnvironmentGradients]] | None = None,
    ) -> GradientMoments:
        check_finite = check_finite and not scaling.active
        if transform is not None:
            moments = mask.new_moments(check_finite=check_finite)
            for gradients in transform(self._by_environment(losses, named, scaling)):
                moments.update(dict(zip(named, gradients, strict=True)))
            return moments
        tape = self._run(losses, scaling, fold=not (scaling.active or mask.needs_log_magnitude))
        if tape.folds:
            return _folded(tape, named, losses, check_finite=check_finite)
        return GradientMoments.of_gradients(
            _unscaled(tape, named, scaling), log_magnitude=mask.needs_log_magnitude, check_finite=check_finite
        )

    def _by_environment(
        self, losses: Sequence[Tensor] | Tensor, named: Mapping[str, Tensor], scaling: Scaling
    ) -> Iterator[EnvironmentGradients]:
        """Yield every environment's gradients. Errors are raised on the way, where other processes are told of them."""
        found = _unscaled(self._run(losses, scaling, fold=False), named, scaling)
        for e in range(len(self._sizes)):
            yield [None if grads is None else grads[e] for grads in found.values()]

    def _run(self, losses: Sequence[Tensor] | Tensor, scaling: Scaling, *, fold: bool) -> OnePass:
        """Check the losses and make the backward pass; the tape then has the gradients."""
        checked = [scalar_loss(loss, e) for e, loss in enumerate(losses)]
        if len(checked) != len(self._sizes):
            raise MaskError(
                f"Parameter `losses` should hold a loss for each of the {len(self._sizes)} environments in `sizes`. "
                f"Found {len(checked)}."
            )
        scaling.check_unscaled(checked[0])
        tape, self._tape = self._tape, None
        if tape is None:
            raise MaskError("The graph of a recorded forward pass is freed by `backward`. Record another one.")
        on_cpu = all(param.device.type == "cpu" for param in self._params.values())
        tape.folds = on_cpu and fold and not tape.shares
        try:
            tape.run([scaling.scale_loss(loss) for loss in checked], list(self._params.values()))
        except UnsupportedError as error:
            raise MaskError(f"The forward pass cannot be recorded: {error}. {_INSTEAD}") from error
        except RuntimeError as error:
            if (explanation := explained(error)) is None:
                raise
            raise explanation from error
        return tape


def _unscaled(tape: OnePass, named: Mapping[str, Tensor], scaling: Scaling) -> dict[str, Tensor | None]:
    used = tape.used()
    tape.forget()
    return dict(zip(named, scaling.unscale([used.get(name) for name in named]), strict=True))


def _folded(
    tape: OnePass, named: Mapping[str, Tensor], losses: Sequence[Tensor] | Tensor, *, check_finite: bool
) -> GradientMoments:
    folding = tape.folding
    found = folding.moments
    tape.forget()
    if not found:
        raise MaskError("No loss depends on a recorded layer. Was the model called inside of the `with` block?")
    if check_finite and not folding.all_finite():
        for name, moments in found.items():
            if not bool(moments.mean.isfinite().all()):
                bad = [e for e, loss in enumerate(losses) if not bool(loss.isfinite())]
                where = f"The loss of environment {bad[0]} is not finite either." if bad else "All losses are finite."
                raise MaskError(f"The gradient of `{name}` should be finite. Found inf or NaN. {where}")
    return GradientMoments.of_named(found, named, check_finite=check_finite)
