"""One step of K runs.

Every algorithm's step is written for one run, and `vmap` makes it one of K runs. Most of them are a gradient and then
an update: for these the gradient is taken outside of `vmap`, by plain autograd on tensors of K runs, which costs less
on the host and lets layers compute in kernels of their own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from sandmask.algorithms import Algorithm, Composed, Hparams, MaskedAlgorithm, Metrics, ObjectiveAlgorithm, State
from sandmask.functional import AcrossRuns, Autograd, Differentiator, Direct, EnvBatch, Functional
from sandmask.functional.across_processes import AcrossProcesses
from sandmask.functional.differentiate import AT_ONCE_BYTES, check_depends, detached, moments_of
from sandmask.functional.tape import MomentTape
from sandmask.gradients import OnePass, UnsupportedError
from sandmask.masks import TensorMoments
from sandmask.networks import Network

Step = Callable[[State, EnvBatch, Hparams, Tensor], tuple[State, Metrics]]

Masked = MaskedAlgorithm | Composed  # with `terms` and `finish`
Moments = Callable[[Masked, State, EnvBatch, Hparams, Tensor], tuple[TensorMoments, Tensor, State]]

# Above this many parameters a run fills the machine by itself, and E gradients at once are too many to keep.
LARGE_MODEL = 4_000_000


def choose_differentiator(network: Network, n_runs: int, *, stacks: bool, kernels: bool) -> Differentiator:
    """Choose how gradients are computed: together for small models, one after the other for large ones."""
    if network.numel > LARGE_MODEL or not stacks:
        return Autograd()
    if n_runs == 1:
        return Direct()
    return AcrossRuns() if kernels else Functional()


def masked(algorithm: Algorithm) -> Masked | None:
    """The algorithm, if its step is to mask gradients that moments are enough of."""
    if isinstance(algorithm, Composed):
        return algorithm if algorithm.sharpness is None and _is_masked(algorithm.rule) else None
    return algorithm if isinstance(algorithm, MaskedAlgorithm) and _is_masked(algorithm) else None


def _is_masked(rule: Algorithm | None) -> bool:
    return isinstance(rule, MaskedAlgorithm) and type(rule).step is MaskedAlgorithm.step


def stacked_step(algorithm: Algorithm) -> Step | None:
    """The step of K runs, every argument and result with a leading dimension K; None where `step` is of one piece."""
    if (by_mask := masked(algorithm)) is not None:
        return lambda *args: _masked_step(by_mask, *args)
    if isinstance(algorithm, ObjectiveAlgorithm) and type(algorithm).step is ObjectiveAlgorithm.step:
        return lambda *args: _objective_step(algorithm, *args)
    return None


def looped_step(algorithm: Algorithm) -> Step:
    """The same for networks that are best computed one run after the other."""
    step = algorithm.step
    if (by_mask := masked(algorithm)) is not None:
        step = partial(_one_pass_step, by_mask)
    return run_by_run(step, (0, 0, 0, 0))


def run_by_run(function: Callable[..., Any], in_dims: tuple[int | None, ...]) -> Callable[..., Any]:
    """A function of one run as a function of K runs, one after the other: what `vmap` does without stacking.

    Arguments with dimension None are shared; the first one has dimension 0.
    """

    def one(k: int, args: tuple[Any, ...]) -> Any:
        pairs = zip(args, in_dims, strict=True)
        return function(*(pytree.tree_map(lambda t: t[k], arg) if dim == 0 else arg for arg, dim in pairs))

    def of_runs(*args: Any) -> Any:
        each = [one(k, args) for k in range(len(pytree.tree_leaves(args[0])[0]))]
        return pytree.tree_map(lambda *leaves: torch.stack(leaves), *each)

    return of_runs


def divided_step(algorithm: Algorithm, differentiate: AcrossProcesses, *, stacks: bool) -> Step:
    """The step of one run that several processes take together; a mask's own environments take the fastest way."""
    by_mask = masked(algorithm)
    if not isinstance(by_mask, MaskedAlgorithm):
        return algorithm.step
    found: Moments = _taped_moments if stacks else _one_pass_moments

    def step(state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        def of_own(part: EnvBatch) -> tuple[TensorMoments, Tensor]:
            return found(by_mask, state, part, hparams, key)[:2]

        def risks(vector: Tensor, batch: EnvBatch) -> Tensor:
            return by_mask.risks(by_mask.network.unflatten(vector), batch, hparams)

        try:
            moments, values = differentiate.environment_moments(risks, state["params"], batch, of_own=of_own)
        except UnsupportedError:  # in all processes, before anything is exchanged
            return algorithm.step(state, batch, hparams, key)
        return by_mask.update(state, moments, values, hparams)

    return step


def _taped_moments(
    algorithm: Masked, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
) -> tuple[TensorMoments, Tensor, State]:
    """`moments_of_runs`, of one run."""
    one: Any = pytree.tree_map(lambda t: t.unsqueeze(0), (state, batch, hparams, key))
    moments, values, changes = moments_of_runs(algorithm, *one)
    sums = (moments.sign_sum[0], moments.mean[0], moments.m2[0])
    return TensorMoments(moments.count, *sums), values[0].detach(), detached(changes)


def _one_pass_step(
    algorithm: Masked, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
) -> tuple[State, Metrics]:
    """A step of one run whose environments' gradients come from one pass over all of them, where they fit."""
    try:
        moments, values, changes = _one_pass_moments(algorithm, state, batch, hparams, key)
    except UnsupportedError:
        return algorithm.step(state, batch, hparams, key)
    with torch.no_grad():
        return algorithm.finish(state, moments, values, changes, hparams)


def _one_pass_moments(
    algorithm: Masked, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
) -> tuple[TensorMoments, Tensor, State]:
    network, n_envs = algorithm.network, batch.n_envs
    if network.compiled or network.norms or n_envs * network.numel * 4 > AT_ONCE_BYTES:
        raise UnsupportedError("environments that do not fit, or should not share a pass")
    leaf = state["params"].detach().requires_grad_()
    params = network.unflatten(leaf)
    tape = OnePass(params, [batch.y.shape[1]] * n_envs)
    with tape:
        values, changes = algorithm.terms(params, state, batch, hparams, key)
    tape.run(values.sum(), [leaf])
    with torch.no_grad():
        moments = moments_of(network.flatten_each(tape.gradients()))
    return moments, values.detach(), detached(changes)


def _objective_step(
    algorithm: ObjectiveAlgorithm, state: State, batch: EnvBatch, hparams: Hparams, keys: Tensor
) -> tuple[State, Metrics]:
    leaf = state["params"].detach().requires_grad_()
    values, changes = vmap(algorithm.value)(leaf, state, batch, hparams, keys)
    check_depends(values)
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    with torch.no_grad():
        stepped: tuple[State, Metrics] = vmap(algorithm.update)(
            state, gradient, values.detach(), detached(changes), hparams
        )
    return stepped


def _masked_step(
    algorithm: Masked, state: State, batch: EnvBatch, hparams: Hparams, keys: Tensor
) -> tuple[State, Metrics]:
    try:
        moments, values, changes = moments_of_runs(algorithm, state, batch, hparams, keys)
    except UnsupportedError:
        if len(keys) == 1:  # its gradients are plain autograd's, which cannot be taken inside of vmap
            return looped_step(algorithm)(state, batch, hparams, keys)
        return vmap(algorithm.step)(state, batch, hparams, keys)

    def finish(
        state: State, sign_sum: Tensor, mean: Tensor, m2: Tensor, values: Tensor, changes: State, hparams: Hparams
    ) -> tuple[State, Metrics]:
        return algorithm.finish(state, TensorMoments(moments.count, sign_sum, mean, m2), values, changes, hparams)

    with torch.no_grad():
        stepped: tuple[State, Metrics] = vmap(finish)(
            state, moments.sign_sum, moments.mean, moments.m2, values.detach(), detached(changes), hparams
        )
    return stepped


def moments_of_runs(
    algorithm: Masked, state: State, batch: EnvBatch, hparams: Hparams, keys: Tensor
) -> tuple[TensorMoments, Tensor, State]:
    """Moments [K, P] of the environments' gradients, and what `terms` gives of K runs."""
    n_runs, n_envs = batch.y.shape[:2]
    vectors, scales = state["params"], algorithm.network.dtype == torch.float16
    tape = MomentTape(algorithm.network.slots, n_runs, n_envs, vectors, scales=scales)

    def terms(vector: Tensor, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[Tensor, State]:
        params = algorithm.network.unflatten(vector)
        with tape.watch(params):
            return algorithm.terms(params, state, batch, hparams, key)

    leaf = vectors.detach().requires_grad_()
    values, changes = vmap(terms)(leaf, state, batch, hparams, keys)
    tape.run(values.sum(), [leaf])  # of a sum: autograd imports a compiler to look at gradients that it is given
    return tape.moments(), values, changes
