"""Per-environment gradients of a model: one environment after the other, or many at once. The numbers are the same."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.conv import _ConvNd

from sandmask.gradients._attempts import REFUSED, Attempts
from sandmask.gradients._backward import fill_gradients
from sandmask.gradients._checks import (
    Method,
    check_batches,
    check_request,
    checked_parameters,
    choose_method,
    trainable,
)
from sandmask.gradients._independence import check_outputs, random_state
from sandmask.gradients._losses import gradients_by_environment, joined_targets, scalar_loss
from sandmask.gradients._one_pass import OnePass
from sandmask.gradients._processes import Processes, merge, message_of, resolve_processes
from sandmask.gradients._report import MaskReport
from sandmask.gradients._scaling import Scaling
from sandmask.gradients._tape import NoParameters, UnsupportedError
from sandmask.masks import GradientMoments, Mask, MaskError, TensorMoments
from sandmask.masks._two_pass import accumulation_dtype

LossFunction = Callable[[Tensor, Tensor], Tensor]
NamedGradients = dict[str, Tensor]
Piece = tuple[list[int], NamedGradients]  # some environments, and their gradients

_FOLDED, _STACKED = "in one pass, folded", "in one pass"


@torch.enable_grad()
def environment_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[tuple[Tensor, Tensor]],
    method: Method = "auto",
    *,
    per_sample: bool = False,
) -> NamedGradients:
    """Compute the gradient of `loss_fn(model(x), y)` for each environment's batch `(x, y)`.

    Frozen parameters are left out. The result holds all E gradients; for a large model or many examples, use
    `environment_moments`.

    :param model: model that treats the first dimension of its input as examples.
    :param loss_fn: function of the model's output and the targets that returns a scalar.
    :param batches: one pair (x, y) per environment; batches may differ in size.
    :param method: "loop" takes one environment after the other, which needs the least memory; "batched" takes all
        in one pass over their concatenated batches (with `torch.func.vmap` for models that use parameters outside
        of the usual layers); "auto" chooses.
    :param per_sample: treat every example as an environment, as in ILC.
    :return: the gradients by parameter name, `[E, *shape]`, in the order of `batches`.
    """
    pieces = list(_Passes(model, loss_fn, batches, method, per_sample=per_sample).pieces())
    order = torch.tensor([e for envs, _ in pieces for e in envs]).argsort()
    together = {name: torch.cat([grads[name] for _, grads in pieces]) for name in pieces[0][1]}
    return {name: grads[order.to(grads.device)] for name, grads in together.items()}


@torch.enable_grad()
def environment_moments(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[tuple[Tensor, Tensor]],
    method: Method = "auto",
    *,
    per_sample: bool = False,
    chunk_size: int | None = None,
    log_magnitude: bool = False,
    check_finite: bool = True,
) -> GradientMoments:
    """Compute the moments over environments of the gradients of `loss_fn(model(x), y)`.

    Pass the result to `mask.from_moments`, or to `sandmask.set_gradients` to fill `.grad`. With `method="loop"`,
    memory does not grow with the number of environments; "auto" uses it if all gradients together would have more than
    128 million elements.

    :param model: model that treats the first dimension of its input as examples.
    :param loss_fn: function of the model's output and the targets that returns a scalar.
    :param batches: one pair (x, y) per environment; batches may differ in size.
    :param method: "loop", "batched" or "auto", as in `environment_gradients`.
    :param per_sample: treat every example as an environment, as in ILC.
    :param chunk_size: number of environments that "batched" processes at once with `vmap`; all if not given.
    :param log_magnitude: also sum log(|g| + 1e-10), which `GeometricMean` needs.
    :param check_finite: raise a `MaskError` that names the parameter and the environment of a gradient that is inf
        or NaN.
    """
    passes = _Passes(model, loss_fn, batches, method, per_sample=per_sample, chunk_size=chunk_size)
    folded = None if log_magnitude else passes.folded(check_finite=check_finite)
    if folded is not None:
        return folded
    moments = GradientMoments(log_magnitude=log_magnitude, check_finite=check_finite)
    for envs, grads in passes.pieces():
        if envs == [moments.count]:  # one after the other, as in a loop
            moments.update({name: of_one[0] for name, of_one in grads.items()})
        else:
            moments.update_many(grads, environments=envs)
    moments.check_finite()
    return moments


def set_gradients(
    named_params: Iterable[tuple[str, Tensor]],
    mask: Mask,
    moments: GradientMoments,
    *,
    processes: Processes | None = None,
    group: dist.ProcessGroup | None = None,
) -> MaskReport:
    """Apply a mask to moments from `environment_moments`, and write or add the result to `.grad`.

    :param named_params: `model.named_parameters()` of the model that the moments belong to.
    :param mask: for example `SANDMask(tau=0.8)`.
    :param moments: moments of the environments' gradients.
    :param processes: "merge" or "alone", as in `sandmask.backward`: required if `torch.distributed` is initialized
        with several processes, unless the moments went through `sandmask.distributed.merge_moments`.
    :param group: process group; the default one if not given.
    :return: a report of what the mask did; until it is read, it costs no time and keeps the moments.

    >>> import torch, sandmask
    >>> model = torch.nn.Linear(2, 1)
    >>> batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(3)]
    >>> moments = sandmask.environment_moments(model, torch.nn.functional.mse_loss, batches)
    >>> report = sandmask.set_gradients(model.named_parameters(), sandmask.ANDMask(tau=1.0), moments)
    >>> model.weight.grad.shape
    torch.Size([1, 2])
    """
    named = checked_parameters(named_params, mask)
    if missing := [name for name in moments.names if name not in named]:
        raise MaskError(
            f"Parameter `named_params` should name the tensors of the moments. {missing[0]!r} is not among them: "
            "give `model.named_parameters()` of the same model."
        )
    how = "alone" if moments.merged else resolve_processes(processes, group)
    if how == "average":
        raise MaskError(
            'Moments can be merged over processes, but not averaged. Pass processes="merge" or processes="alone" to '
            '`set_gradients`, or use `sandmask.backward(..., processes="average")`.'
        )
    if how == "merge":
        merge(moments, group, message_of(how, mask, named), named)
    return fill_gradients(named, mask, moments, Scaling(None))


class _Passes:
    """The ways to take the gradients of a model, with a batch of every environment."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batches: Iterable[tuple[Tensor, Tensor]],
        method: Method,
        *,
        per_sample: bool,
        chunk_size: int | None = None,
    ) -> None:
        check_request(model, method, chunk_size)
        self.model, self.loss_fn = model, loss_fn
        self.batches, self.params = check_batches(batches, per_sample=per_sample), trainable(model)
        self.chunk_size = min(chunk_size or len(self.batches), len(self.batches))
        self.method = choose_method(method, model, self.params, self.chunk_size)
        self.in_one_pass = self.method != "loop" and not per_sample and chunk_size is None
        examples = {(x.shape[1:], x.dtype, x.device, y.shape[1:], y.dtype) for x, y in self.batches}
        loss = getattr(loss_fn, "__code__", type(loss_fn))  # the same for a lambda that is made in every step
        self.attempts = Attempts(model, (model.training, per_sample, tuple(self.params), frozenset(examples), loss))

    def pieces(self) -> Iterator[Piece]:
        """Pieces of the result: some environments, and their gradients."""
        if self.in_one_pass:
            try:
                found = self.attempts.attempt(_STACKED, lambda: self._one_pass().gradients())
                return iter([(list(range(len(self.batches))), found)])
            except REFUSED:
                # `vmap` is slower than a loop: a convolution's weight gradient is a grouped convolution, and
                # recurrent layers are computed step by step.
                slow = any(isinstance(module, _ConvNd | nn.RNNBase) for module in self.model.modules())
                if self.method == "auto" and slow:
                    return self._loop()
        if self.method == "loop":
            return self._loop()
        pieces = self._vmapped()
        try:
            first = self.attempts.attempt("by vmap", lambda: next(pieces))
        except REFUSED as error:
            if self.method == "batched":
                raise MaskError(f'The environments cannot be batched: {error}. Use method="loop".') from error
            return self._loop()
        return chain([first], pieces)

    def folded(self, *, check_finite: bool) -> GradientMoments | None:
        """Moments that were folded layer by layer in one pass, on a CPU; None where that cannot be, or where a gradient
        is not finite: then the other ways have an error to name.
        """
        if not self.in_one_pass or any(param.device.type != "cpu" for param in self.params.values()):
            return None
        try:
            folding = self.attempts.attempt(_FOLDED, lambda: self._one_pass(fold=True).folding)
        except REFUSED:
            return None
        if not folding.moments or (check_finite and not folding.all_finite()):
            return None
        unused = {
            name: TensorMoments(len(self.batches), *torch.zeros(3, *p.shape, dtype=accumulation_dtype(p.dtype)))
            for name, p in self.params.items()
            if name not in folding.moments
        }
        return GradientMoments.of_named({**folding.moments, **unused}, self.params, check_finite=check_finite)

    def _one_pass(self, *, fold: bool = False) -> OnePass:
        sizes = [y.shape[0] for _, y in self.batches]
        alike = {(x.shape[1:], x.dtype, x.device) for x, _ in self.batches}
        if len(alike) > 1:
            raise UnsupportedError("the environments' examples differ in shape or type")
        case = (*sizes, *alike, self.model.training)
        tape = OnePass(self.params, sizes, fold=fold, check=(self.model, case))
        x = tape.trace(torch.cat([x for x, _ in self.batches]))
        # Batches may have other sizes in every step, for which gradients are checked, but not outputs.
        new = tape.checks and not self.attempts.worked(_FOLDED if fold else _STACKED)
        state = random_state(x.device) if new else None
        with tape:
            output = self.model(x)
        if not isinstance(output, Tensor) or output.ndim == 0 or output.shape[0] != sum(sizes):
            raise UnsupportedError("the model's output is not one tensor with a row per example")
        if state is not None and torch.equal(state, random_state(x.device)):  # else outputs are random
            check_outputs(self.model, [x for x, _ in self.batches], torch.split(output, sizes))
        tape.run(self._losses(tape, output), list(self.params.values()))
        return tape

    def _losses(self, tape: OnePass, output: Tensor) -> list[Tensor]:
        """The loss of each environment, or one number with the gradient of their sum."""
        targets = [y for _, y in self.batches]
        y = None if tape.checks else joined_targets(self.loss_fn, output, targets)
        if y is not None:
            return [scalar_loss(self.loss_fn(output, y), 0) * len(targets)]
        parts = list(zip(torch.split(output, tape.sizes), targets, strict=True))
        with tape:
            losses = [self.loss_fn(rows, of_rows) for rows, of_rows in parts]
        return [scalar_loss(loss, e) for e, loss in enumerate(losses)]

    def _loop(self) -> Iterator[Piece]:
        params = self.params
        losses = (self.loss_fn(self.model(x), y) for x, y in self.batches)
        for e, grads in enumerate(gradients_by_environment(losses, list(params.values()))):
            self.attempts.settle()
            of_one = dict(zip(params, grads, strict=True))
            if sparse := [name for name, g in of_one.items() if g is not None and g.layout is not torch.strided]:
                raise MaskError(f"The gradient of `{sparse[0]}` should be dense. Build its module with sparse=False.")
            yield [e], {n: torch.zeros_like(params[n])[None] if g is None else g[None] for n, g in of_one.items()}

    def _vmapped(self) -> Iterator[Piece]:
        places = _places(self.model, self.params)

        def loss(values: NamedGradients, x: Tensor, y: Tensor) -> Tensor:
            replaced = {place: values[name] for place, name in places.items()}
            # What finds the model's own parameters (in a list, or from the loss) does not see those in their places.
            with NoParameters(self.params):
                return scalar_loss(self.loss_fn(functional_call(self.model, replaced, (x,), tie_weights=False), y), 0)

        gradients = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
        values = {name: param.detach() for name, param in self.params.items()}
        same_shape: dict[tuple[torch.Size, torch.Size], list[int]] = {}
        for e, (x, y) in enumerate(self.batches):
            same_shape.setdefault((x.shape, y.shape), []).append(e)
        for alike in same_shape.values():
            for start in range(0, len(alike), self.chunk_size):
                envs = alike[start : start + self.chunk_size]
                x, y = (torch.stack([self.batches[e][part] for e in envs]) for part in (0, 1))
                yield envs, gradients(values, x, y)


def _places(model: nn.Module, params: Mapping[str, Tensor]) -> dict[str, str]:
    """Every place in a model that holds one of the parameters -> the parameter's name.

    `functional_call` finds the places of tied weights itself, but that of a module with two names twice, and then the
    module keeps the tensors that it was called with (pytorch/pytorch#164759).
    """
    names = {id(param): name for name, param in params.items()}
    return {
        f"{path}.{own}" if path else own: names[id(param)]
        for path, module in model.named_modules()
        for own, param in module._parameters.items()  # noqa: SLF001 - `named_parameters` leaves out tied weights
        if id(param) in names
    }
