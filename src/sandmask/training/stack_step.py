"""One step of K runs.

An algorithm's step is written for one run, and `vmap` makes it a step of K runs. Most steps consist of a gradient and
an update. Their gradient is computed outside of `vmap`, by plain autograd on tensors of K runs: this costs less on the
host, and layers can use their own kernels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from sandmask._physical import has_kernels
from sandmask.algorithms import Algorithm, Composed, Hparams, MaskedAlgorithm, Metrics, ObjectiveAlgorithm, State
from sandmask.functional import AcrossRuns, Autograd, Differentiator, Direct, EnvBatch, Functional
from sandmask.functional.across_processes import AcrossProcesses
from sandmask.functional.differentiate import check_depends, detached
from sandmask.functional.split import split_products
from sandmask.functional.tape import MomentTape
from sandmask.gradients import UnsupportedError
from sandmask.masks import TensorMoments
from sandmask.networks import Network
from sandmask.training.one_pass import Masked, Moments, compiled_moments, one_pass_moments

Step = Callable[[State, EnvBatch, Hparams, Tensor], tuple[State, Metrics]]

# With more parameters, a single run uses the whole machine, and the gradients of E environments do not fit in memory.
LARGE_MODEL = 4_000_000


def choose_differentiator(network: Network, n_runs: int, *, stacks: bool, kernels: bool) -> Differentiator:
    """Choose how gradients are computed: together for small models, one after the other for large ones."""
    if network.numel > LARGE_MODEL or not stacks:
        return Autograd()
    if n_runs == 1:
        return Direct()
    return AcrossRuns() if kernels else Functional()


def masked(algorithm: Algorithm) -> Masked | None:
    """The algorithm, if its step is a mask computed from the moments of gradients; otherwise None."""
    if isinstance(algorithm, Composed):
        return algorithm if algorithm.sharpness is None and _is_masked(algorithm.rule) else None
    return algorithm if isinstance(algorithm, MaskedAlgorithm) and _is_masked(algorithm) else None


def _is_masked(rule: Algorithm | None) -> bool:
    return isinstance(rule, MaskedAlgorithm) and type(rule).step is MaskedAlgorithm.step


def stacked_step(algorithm: Algorithm) -> Step | None:
    """The step of K runs, on tensors with a leading dimension K; None if `step` has no separate gradient."""
    if (by_mask := masked(algorithm)) is not None:
        return partial(_masked_step, by_mask, looped_step(by_mask))
    if isinstance(algorithm, ObjectiveAlgorithm) and type(algorithm).step is ObjectiveAlgorithm.step:
        return lambda *args: _objective_step(algorithm, *args)
    return None


def looped_step(algorithm: Algorithm) -> Step:
    """The step of K runs, one run after the other."""
    step = algorithm.step
    if (by_mask := masked(algorithm)) is not None:
        found = compiled_moments(by_mask) if algorithm.network.compiled else one_pass_moments
        step = partial(_one_pass_step, by_mask, found)
    return run_by_run(step, (0, 0, 0, 0))


def run_by_run(function: Callable[..., Any], in_dims: tuple[int | None, ...]) -> Callable[..., Any]:
    """Turn a function of one run into a function of K runs that loops over the runs: `vmap` as a loop.

    Arguments with dimension None are shared. The first argument has dimension 0.
    """

    def one(k: int, args: tuple[Any, ...]) -> Any:
        pairs = zip(args, in_dims, strict=True)
        return function(*(pytree.tree_map(lambda t: t[k], arg) if dim == 0 else arg for arg, dim in pairs))

    def of_runs(*args: Any) -> Any:
        each = [one(k, args) for k in range(len(pytree.tree_leaves(args[0])[0]))]
        # The tensors of a single run are not copied: parameters and Adam's means may be most of what a step writes.
        return pytree.tree_map(lambda *of: torch.stack(of) if len(of) > 1 else of[0].unsqueeze(0), *each)

    return of_runs


def divided_step(algorithm: Algorithm, differentiate: AcrossProcesses, *, stacks: bool) -> Step:
    """The step of one run in several processes. The gradients of a mask are computed in the fastest way."""
    by_mask = masked(algorithm)
    if not isinstance(by_mask, MaskedAlgorithm):
        return algorithm.step
    found: Moments = _taped_moments if stacks else one_pass_moments

    def step(state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        def of_own(part: EnvBatch) -> tuple[TensorMoments, Tensor]:
            return found(by_mask, state, part, hparams, key)[:2]

        def risks(vector: Tensor, batch: EnvBatch) -> Tensor:
            return by_mask.risks(by_mask.network.unflatten(vector), batch, hparams)

        try:
            moments, values = differentiate.environment_moments(risks, state["params"], batch, of_own=of_own)
        except UnsupportedError:  # raised in all processes, before anything is exchanged
            return algorithm.step(state, batch, hparams, key)
        return by_mask.update(state, moments, values, hparams)

    return step


def _taped_moments(
    algorithm: Masked, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
) -> tuple[TensorMoments, Tensor, State]:
    """`moments_of_runs` for a single run."""
    one: Any = pytree.tree_map(lambda t: t.unsqueeze(0), (state, batch, hparams, key))
    moments, values, changes = moments_of_runs(algorithm, *one)
    sums = (moments.sign_sum[0], moments.mean[0], moments.m2[0])
    return TensorMoments(moments.count, *sums), values[0].detach(), detached(changes)


def _one_pass_step(
    algorithm: Masked, found: Moments, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
) -> tuple[State, Metrics]:
    """The step of one run. If the gradients of all environments fit in memory, they are computed in one pass."""
    try:
        moments, values, changes = found(algorithm, state, batch, hparams, key)
    except UnsupportedError:
        return algorithm.step(state, batch, hparams, key)
    with torch.no_grad():
        return algorithm.finish(state, moments, values, changes, hparams)


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
    algorithm: Masked, alone: Step, state: State, batch: EnvBatch, hparams: Hparams, keys: Tensor
) -> tuple[State, Metrics]:
    try:
        moments, values, changes = moments_of_runs(algorithm, state, batch, hparams, keys)
    except UnsupportedError:
        if len(keys) == 1:  # one run uses plain autograd, which does not work inside of vmap
            return alone(state, batch, hparams, keys)
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


def _scales(algorithm: Masked, vectors: Tensor) -> bool:
    """Whether the dtype has a small range and gradients can be scaled, because all gradients pass the logits."""
    if algorithm.network.dtype == torch.float16:
        return True
    return algorithm.through_logits and split_products() and has_kernels(vectors)


def moments_of_runs(
    algorithm: Masked, state: State, batch: EnvBatch, hparams: Hparams, keys: Tensor
) -> tuple[TensorMoments, Tensor, State]:
    """Moments [K, P] of the environments' gradients, and the results of `algorithm.terms` for K runs."""
    n_runs, n_envs = batch.y.shape[:2]
    vectors = state["params"]
    tape = MomentTape(algorithm.network.slots, n_runs, n_envs, vectors, scales=_scales(algorithm, vectors))

    def terms(vector: Tensor, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[Tensor, State]:
        params = algorithm.network.unflatten(vector)
        with tape.watch(params):
            return algorithm.terms(params, state, batch, hparams, key)

    leaf = vectors.detach().requires_grad_()
    values, changes = vmap(terms)(leaf, state, batch, hparams, keys)
    tape.run(values.sum(), [leaf])  # a sum, because with a vector of gradients autograd would import a compiler
    return tape.moments(), values, changes
