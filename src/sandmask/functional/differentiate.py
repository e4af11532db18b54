"""Ways to take the gradients that an algorithm asks for; all give the same numbers.

`Functional` uses `torch.func` and works under `vmap`: stacks of runs. `AcrossRuns` does the same by plain autograd, so
that layers reach their GPU kernels. `Direct` is for one run of a small model. `Autograd` folds one environment after
the other into running moments: large models, whose E gradients should not all be kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vjp, vmap
from torch.utils import _pytree as pytree

from sandmask._physical import in_vmap, on_all_runs
from sandmask.errors import SandmaskError
from sandmask.functional.batch import EnvBatch
from sandmask.functional.flat import Params
from sandmask.masks import GradientMoments, TensorMoments

Objective = Callable[[Tensor], tuple[Tensor, Any]]
Pull = Callable[[Tensor], Tensor]
AT_ONCE_BYTES = 2**31  # of all environments' gradients together, that are kept at once on a GPU
EnvironmentLosses = Callable[[Tensor, EnvBatch], Tensor]
Risks = Callable[[Params, EnvBatch], Tensor]


class Differentiator(ABC):
    """The interface through which algorithms compute gradients."""

    @abstractmethod
    def gradient(self, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Gradient, value and auxiliary output of `objective(vector) -> (value, aux)`."""

    @abstractmethod
    def pullback(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> tuple[Tensor, Pull]:
        """The value of `function(vector)`, and what makes the gradient of the vector out of that of the value.

        For steps that need the value before they know its gradient. The latter may be called once.
        """

    def environment_gradients(
        self, losses: EnvironmentLosses, vectors: Tensor, batch: EnvBatch
    ) -> tuple[Tensor, Tensor]:
        """Each environment's gradient at its own vector, [E, P] -> [E, P], and the losses [E]. Keeps all."""

        def loss_of(e: int) -> Objective:
            return lambda vector: (losses(vector, batch.environment(e))[0], ())

        found = [self.gradient(loss_of(e), vectors[e])[:2] for e in range(batch.n_envs)]
        gradients, values = zip(*found, strict=True)
        return torch.stack(gradients), torch.stack(values)

    def environment_moments(
        self, losses: EnvironmentLosses, vector: Tensor, batch: EnvBatch, *, log_magnitude: bool = False
    ) -> tuple[TensorMoments, Tensor]:
        """Moments over environments of each one's gradient, and the losses [E].

        `losses(vector, batch)` gives one loss per environment of the batch, each of its own examples alone.
        """
        gradients, values = self.environment_gradients(losses, vector.expand(batch.n_envs, -1), batch)
        return moments_of(gradients, log_magnitude=log_magnitude), values

    def inner_gradients(self, risks: Risks, params: Params, batch: EnvBatch) -> tuple[Params, Tensor]:
        """Each environment's gradient [E, ...] by every parameter, and the risks [E], for use inside of an objective.

        `risks(params, batch)` gives one risk per environment of the batch, each of its own examples alone.
        """

        def risk(params: Params, fields: EnvBatch) -> Tensor:
            return risks(params, EnvBatch(*(field.unsqueeze(0) for field in fields)))[0]

        # The objective is itself differentiated: `torch.func` nests, in itself as in plain autograd.
        gradients, values = vmap(grad_and_value(risk), in_dims=(None, 0))(params, batch)
        return gradients, values


class _ByGraph(Differentiator):
    """Takes gradients inside of an objective by plain autograd too.

    One environment's after the other, each of all runs: layers see no gradient transform, and can compute in kernels.
    """

    def inner_gradients(self, risks: Risks, params: Params, batch: EnvBatch) -> tuple[Params, Tensor]:
        """See `Differentiator.inner_gradients`. In float32 at least."""
        names, kept = list(params), list[Tensor]()

        def handles_of(*tensors: Tensor) -> tuple[Tensor, ...]:
            kept.extend(tensor.view_as(tensor) for tensor in tensors)
            return tuple(kept)

        def gradients(values: Tensor) -> tuple[Tensor, ...]:
            check_depends(values)
            return torch.autograd.grad(values.sum(), kept, create_graph=True, materialize_grads=True)

        reached = on_all_runs if in_vmap() else _here
        handles = dict(zip(names, reached(handles_of, *params.values()), strict=True))
        values = [risks(handles, batch.environment(e))[0] for e in range(batch.n_envs)]
        found = [[_exact(piece) for piece in reached(gradients, value)] for value in values]
        stacked = (torch.stack(pieces) for pieces in zip(*found, strict=True))
        return dict(zip(names, stacked, strict=True)), torch.stack(values)


class Functional(Differentiator):
    """Through `torch.func`; the environments' gradients are taken together."""

    def gradient(self, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
        """See `Differentiator.gradient`."""
        gradient, (value, aux) = grad_and_value(objective, has_aux=True)(vector)
        return gradient, value, aux

    def pullback(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> tuple[Tensor, Pull]:
        """See `Differentiator.pullback`."""
        value, pull, *_ = vjp(function, vector)
        return value, lambda gradient: pull(gradient)[0]

    def environment_gradients(
        self, losses: EnvironmentLosses, vectors: Tensor, batch: EnvBatch
    ) -> tuple[Tensor, Tensor]:
        """See `Differentiator.environment_gradients`."""
        gradients, values = vmap(grad_and_value(_of_one(losses)))(vectors, batch)
        return gradients, values

    def environment_moments(
        self, losses: EnvironmentLosses, vector: Tensor, batch: EnvBatch, *, log_magnitude: bool = False
    ) -> tuple[TensorMoments, Tensor]:
        """See `Differentiator.environment_moments`."""
        gradients, values = vmap(grad_and_value(_of_one(losses)), in_dims=(None, 0))(vector, batch)
        return moments_of(gradients, log_magnitude=log_magnitude), values


class AcrossRuns(_ByGraph):
    """Inside of one level of `vmap`, by plain autograd on the tensors of all K runs underneath.

    Layers see no gradient transform, and can compute in kernels for K runs. The environments' gradients are taken one
    environment after the other, each of all runs.
    """

    def gradient(self, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
        """See `Differentiator.gradient`."""
        kept: list[Tensor] = []

        def leaf_of(vectors: Tensor) -> tuple[Tensor]:
            kept.append(vectors.detach().requires_grad_())
            return (kept[0],)

        def gradients(values: Tensor) -> tuple[Tensor, Tensor]:
            check_depends(values)
            (found,) = torch.autograd.grad(values.sum(), kept[0])  # no run's value depends on another's parameters
            return found, values.detach()

        (leaf,) = on_all_runs(leaf_of, vector)
        value, aux = objective(leaf)
        gradient, value = on_all_runs(gradients, value)
        return gradient, value, detached(aux)

    def pullback(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> tuple[Tensor, Pull]:
        """See `Differentiator.pullback`."""
        kept: list[Tensor] = []  # the vectors of all runs, and their values

        def leaf_of(vectors: Tensor) -> tuple[Tensor]:
            kept.append(vectors.detach().requires_grad_())
            return (kept[0],)

        def value_of(values: Tensor) -> tuple[Tensor]:
            kept.append(values)
            return (values.detach(),)

        def pull(slopes: Tensor) -> tuple[Tensor]:
            return (_pulled(slopes, *kept),)

        (leaf,) = on_all_runs(leaf_of, vector)
        (value,) = on_all_runs(value_of, function(leaf))
        return value, lambda gradient: on_all_runs(pull, gradient)[0]


class _Plain(Differentiator):
    """Gradients through plain autograd."""

    def gradient(self, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
        """See `Differentiator.gradient`."""
        leaf = vector.detach().requires_grad_()
        value, aux = objective(leaf)
        check_depends(value)
        (gradient,) = torch.autograd.grad(value, leaf)
        return gradient, value.detach(), detached(aux)

    def pullback(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> tuple[Tensor, Pull]:
        """See `Differentiator.pullback`."""
        leaf = vector.detach().requires_grad_()
        value = function(leaf)
        return value.detach(), lambda gradient: _pulled(gradient, leaf, value)


class Autograd(_Plain):
    """Through plain autograd; one environment's graph and gradient at a time."""

    def environment_moments(
        self, losses: EnvironmentLosses, vector: Tensor, batch: EnvBatch, *, log_magnitude: bool = False
    ) -> tuple[TensorMoments, Tensor]:
        """See `Differentiator.environment_moments`."""
        leaf = vector.detach().requires_grad_()
        values = vector.new_empty(batch.n_envs)

        def gradients() -> Iterator[Tensor]:
            for e in range(batch.n_envs):
                loss = losses(leaf, batch.environment(e))[0]
                values[e] = loss.detach()
                yield torch.autograd.grad(loss, leaf)[0]

        if vector.device.type == "cuda" and batch.n_envs * vector.numel() * vector.element_size() <= AT_ONCE_BYTES:
            kept = vector.new_empty(batch.n_envs, vector.numel())
            for e, gradient in enumerate(gradients()):
                kept[e] = gradient
            return moments_of(kept, log_magnitude=log_magnitude), values
        moments = GradientMoments(log_magnitude=log_magnitude, check_finite=False)
        for gradient in gradients():
            moments.update(gradient)
        return _of_vector(moments), values


class Direct(_ByGraph, _Plain):
    """Plain autograd, with the environments' gradients taken together: one run of a small model.

    It spares the seconds that the first call of `torch.func.grad` takes to import the compiler.
    Not for use under `vmap`.
    """

    def environment_gradients(
        self, losses: EnvironmentLosses, vectors: Tensor, batch: EnvBatch
    ) -> tuple[Tensor, Tensor]:
        """See `Differentiator.environment_gradients`."""
        leaf = vectors.detach().clone().requires_grad_()
        values = vmap(_of_one(losses))(leaf, batch)
        (gradients,) = torch.autograd.grad(values.sum(), leaf)
        return gradients, values.detach()


def check_depends(value: Tensor) -> None:
    """Raise an error if a value that is to be minimized does not depend on the parameters."""
    if not value.requires_grad:
        raise SandmaskError(
            "The objective does not depend on the parameters. Compute it from `params`, such as by self.risks, "
            "self.logits or self.features, and without detach() or torch.no_grad()."
        )


def moments_of(gradients: Tensor, *, log_magnitude: bool = False) -> TensorMoments:
    """The moments over environments of gradients [E, P]; works under `vmap`."""
    return _of_vector(GradientMoments.of_gradients(gradients, log_magnitude=log_magnitude, check_finite=False))


def _pulled(slope: Tensor, leaf: Tensor, value: Tensor) -> Tensor:
    """The gradient of the leaf, from that of the value."""
    (gradient,) = torch.autograd.grad((value * slope).sum(), leaf)  # given gradients, autograd imports a compiler
    return gradient


def _here(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """In place of `on_all_runs`, where there is one run."""
    return function(*tensors)


def _exact(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _of_one(losses: EnvironmentLosses) -> Callable[[Tensor, EnvBatch], Tensor]:
    """The loss of a single environment, for `vmap` over environments."""
    return lambda vector, fields: losses(vector, EnvBatch(*(field.unsqueeze(0) for field in fields)))[0]


def _of_vector(moments: GradientMoments) -> TensorMoments:
    """The moments of the one tensor that there is: the flat vector."""
    of_vector = moments.of(0)
    assert of_vector is not None  # the vector always has a gradient
    return of_vector


def detached(tree: Any) -> Any:
    """A tree with its tensors detached."""
    return pytree.tree_map_only(Tensor, Tensor.detach, tree)
