"""The moments of a large network's gradients from one pass over all environments of one run.

Large networks train one run at a time, by plain autograd. Their layers keep the gradients of the weights apart by
environment (`sandmask.gradients.OnePass`). The rest of both passes is computed for all environments together.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sandmask.algorithms import Composed, Hparams, MaskedAlgorithm, State
from sandmask.functional import EnvBatch, Params
from sandmask.functional.compiling import Traced
from sandmask.functional.differentiate import AT_ONCE_BYTES, detached, moments_of
from sandmask.gradients import ApartPass, OnePass, UnsupportedError
from sandmask.masks import TensorMoments, moments_of_parts

Masked = MaskedAlgorithm | Composed  # with `terms` and `finish`
Moments = Callable[[Masked, State, EnvBatch, Hparams, Tensor], tuple[TensorMoments, Tensor, State]]
Pieces = dict[str, Tensor | list[Tensor]]  # name -> gradients of E environments: [E, *shape], or E tensors


def one_pass_moments(
    algorithm: Masked, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
) -> tuple[TensorMoments, Tensor, State]:
    """Return moments [P] of the environments' gradients, and the results of `algorithm.terms`.

    Raises `UnsupportedError` if the environments cannot share a pass.
    """
    network = algorithm.network
    if network.compiled:
        raise UnsupportedError("the network is compiled, which hides its layers")
    params = network.unflatten(state["params"].detach())
    if key.device.type == "cpu":
        tape = OnePass(leaves := _leaves(params), _sizes(algorithm, batch))
        values, changes = _differentiated(tape, leaves, algorithm, state, batch, hparams, key)
        with torch.no_grad():
            return moments_of(network.flatten_each(tape.gradients())), values, changes
    pieces, values, changes = one_pass_gradients(algorithm, params, state, batch, hparams, key)
    with torch.no_grad():
        return moments_of_parts(network.join_each(pieces)), values, changes


def compiled_moments(algorithm: Masked) -> Moments:
    """`one_pass_moments` for a compiled network on a GPU. Both passes are one compiled program."""
    compiled = Traced(partial(one_pass_gradients, algorithm))
    refused: list[UnsupportedError] = []

    def found(
        _: Masked, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[TensorMoments, Tensor, State]:
        if refused or not compiles_passes(key.device):
            raise UnsupportedError("the environments of this network need separate passes")
        network = algorithm.network
        params = network.unflatten(state["params"].detach())
        try:
            pieces, values, changes = compiled(params, state, batch, hparams, key)
        except UnsupportedError as error:
            refused.append(error)
            raise
        return moments_of_parts(network.join_each(pieces)), values, changes

    return found


def compiles_passes(device: torch.device) -> bool:
    """Whether `compiled_moments` compiles the pass over all environments on this device."""
    return device.type == "cuda"


def one_pass_gradients(
    algorithm: Masked, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
) -> tuple[Pieces, Tensor, State]:
    """The gradients of the environments by parameter, and the results of `algorithm.terms`."""
    tape = ApartPass(leaves := _leaves(params), _sizes(algorithm, batch))
    values, changes = _differentiated(tape, leaves, algorithm, state, batch, hparams, key)
    return tape.pieces(), values, changes


def _sizes(algorithm: Masked, batch: EnvBatch) -> list[int]:
    """The number of examples of each environment. Raise `UnsupportedError` if environments cannot share a pass."""
    network, n_envs = algorithm.network, batch.n_envs
    if network.norms or n_envs * network.numel * 4 > AT_ONCE_BYTES:
        raise UnsupportedError("the gradients of all environments do not fit, or the environments need separate passes")
    return [batch.y.shape[1]] * n_envs


def _leaves(params: Params) -> Params:
    return {name: param.detach().requires_grad_() for name, param in params.items()}


def _differentiated(
    tape: OnePass, params: Params, algorithm: Masked, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
) -> tuple[Tensor, State]:
    """Run both passes, after which the tape has the gradients. Return the results of `algorithm.terms`."""
    with tape:
        values, changes = algorithm.terms(params, state, batch, hparams, key)
    tape.run(values.sum(), list(params.values()))
    return values.detach(), detached(changes)
