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

from sandmask.algorithms import Algorithm, Hparams, MaskedAlgorithm, Metrics, ObjectiveAlgorithm, State
from sandmask.functional import EnvBatch
from sandmask.functional.differentiate import AT_ONCE_BYTES
from sandmask.functional.tape.moment_tape import MomentTape
from sandmask.gradients import OnePass, UnsupportedError
from sandmask.masks import GradientMoments, TensorMoments

Step = Callable[[State, EnvBatch, Hparams, Tensor], tuple[State, Metrics]]


def stacked_step(algorithm: Algorithm) -> Step | None:
    """The step of K runs, every argument and result with a leading dimension K; None where `step` is of one piece."""
    if isinstance(algorithm, MaskedAlgorithm) and type(algorithm).step is MaskedAlgorithm.step:
        return lambda *args: _masked_step(algorithm, *args)
    if isinstance(algorithm, ObjectiveAlgorithm) and type(algorithm).step is ObjectiveAlgorithm.step:
        return lambda *args: _objective_step(algorithm, *args)
    return None


def looped_step(algorithm: Algorithm) -> Step:
    """The same for networks that are best computed one run after the other."""
    step = algorithm.step
    if isinstance(algorithm, MaskedAlgorithm) and type(algorithm).step is MaskedAlgorithm.step:
        step = partial(_one_pass_step, algorithm)

    def steps(*args: Any) -> tuple[State, Metrics]:
        each = [step(*pytree.tree_map(lambda t: t[k], args)) for k in range(len(args[-1]))]  # noqa: B023
        stepped: tuple[State, Metrics] = pytree.tree_map(lambda *leaves: torch.stack(leaves), *each)
        return stepped

    return steps


def _one_pass_step(
    algorithm: MaskedAlgorithm, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
) -> tuple[State, Metrics]:
    """A step of one run whose environments' gradients come from one pass over all of them, where they fit."""
    network, n_envs = algorithm.network, batch.n_envs
    if network.compiled or n_envs * network.numel * 4 > AT_ONCE_BYTES:
        return algorithm.step(state, batch, hparams, key)
    leaf = state["params"].detach().requires_grad_()
    params = network.unflatten(leaf)
    tape = OnePass(params, [batch.y.shape[1]] * n_envs)
    try:
        with tape:
            risks = algorithm.risks(params, batch, hparams)
        tape.run(risks.sum(), [leaf])
    except UnsupportedError:
        return algorithm.step(state, batch, hparams, key)
    with torch.no_grad():
        moments = GradientMoments.of_gradients(network.flatten_each(tape.gradients()), check_finite=False).of(0)
        assert moments is not None
        return algorithm.update(state, moments, risks.detach(), hparams)


def _objective_step(
    algorithm: ObjectiveAlgorithm, state: State, batch: EnvBatch, hparams: Hparams, keys: Tensor
) -> tuple[State, Metrics]:
    leaf = state["params"].detach().requires_grad_()
    values, changes = vmap(algorithm.value)(leaf, state, batch, hparams, keys)
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    with torch.no_grad():
        stepped: tuple[State, Metrics] = vmap(algorithm.update)(
            state, gradient, values.detach(), _detached(changes), hparams
        )
    return stepped


def _masked_step(
    algorithm: MaskedAlgorithm, state: State, batch: EnvBatch, hparams: Hparams, keys: Tensor
) -> tuple[State, Metrics]:
    try:
        moments, risks = _moments(algorithm, state["params"], batch, hparams)
    except UnsupportedError:
        if len(keys) == 1:  # its gradients are plain autograd's, which cannot be taken inside of vmap
            return looped_step(algorithm)(state, batch, hparams, keys)
        return vmap(algorithm.step)(state, batch, hparams, keys)

    def update(
        state: State, sign_sum: Tensor, mean: Tensor, m2: Tensor, risks: Tensor, hparams: Hparams
    ) -> tuple[State, Metrics]:
        return algorithm.update(state, TensorMoments(moments.count, sign_sum, mean, m2), risks, hparams)

    with torch.no_grad():
        stepped: tuple[State, Metrics] = vmap(update)(
            state, moments.sign_sum, moments.mean, moments.m2, risks.detach(), hparams
        )
    return stepped


def _moments(
    algorithm: MaskedAlgorithm, vectors: Tensor, batch: EnvBatch, hparams: Hparams
) -> tuple[TensorMoments, Tensor]:
    """Moments [K, P] of the environments' gradients, and risks [K, E]."""
    n_runs, n_envs = batch.y.shape[:2]
    scales = algorithm.network.dtype == torch.float16
    tape = MomentTape(algorithm.network.slots, n_runs, n_envs, vectors, scales=scales)

    def risks(vector: Tensor, batch: EnvBatch, hparams: Hparams) -> Tensor:
        params = algorithm.network.unflatten(vector)
        with tape.watch(params):
            return algorithm.risks(params, batch, hparams)

    leaf = vectors.detach().requires_grad_()
    values = vmap(risks)(leaf, batch, hparams)
    tape.run(values.sum(), [leaf])  # of a sum: autograd imports a compiler to look at gradients that it is given
    return tape.moments(), values


def _detached(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, tree)
