"""Ways to compute the gradients that an algorithm needs. All give the same results up to rounding.

| class | for | gradients |
|---|---|---|
| `Functional` | stacks of runs | by `torch.func`, under `vmap` |
| `AcrossRuns` | stacks of runs on a GPU | by autograd on the tensors of all runs, so that layers use their kernels |
| `Direct` | one run of a small model | by autograd, for all environments together |
| `Autograd` | one run of a large model | by autograd, for one environment at a time, folded into moments |
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

Objective = Callable[[Tensor], tuple[Tensor, Any]]  # parameters as one vector -> value to minimize, further results
Pull = Callable[[Tensor], Tensor]  # the gradient of a value -> the gradient of the parameters
EnvironmentLosses = Callable[[Tensor, EnvBatch], Tensor]  # vector of parameters, batch -> one loss per environment [E]
Risks = Callable[[Params, EnvBatch], Tensor]  # parameters by name, batch -> one risk per environment [E]
AT_ONCE_BYTES = 2**31  # largest size of the gradients of all environments that `Autograd` keeps at once on a GPU


class Differentiator(ABC):
    """The interface through which algorithms compute gradients."""

    @abstractmethod
    def gradient(self, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return the gradient of an objective at `vector`, its value, and its other results."""

    @abstractmethod
    def pullback(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> tuple[Tensor, Pull]:
        """Return `function(vector)`, and a function that maps the gradient of this value to the gradient of the vector.

        It is for steps that need the value before they can compute its gradient. The function can be called only once.
        """

    def environment_gradients(
        self, losses: EnvironmentLosses, vectors: Tensor, batch: EnvBatch
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of each environment's loss at its own vector, [E, P] -> [E, P], and the losses [E].

        All gradients are in memory at the same time.
        """

        def loss_of(e: int) -> Objective:
            return lambda vector: (losses(vector, batch.environment(e))[0], ())

        found = [self.gradient(loss_of(e), vectors[e])[:2] for e in range(batch.n_envs)]
        gradients, values = zip(*found, strict=True)
        return torch.stack(gradients), torch.stack(values)

    def environment_moments(
        self, losses: EnvironmentLosses, vector: Tensor, batch: EnvBatch, *, log_magnitude: bool = False
    ) -> tuple[TensorMoments, Tensor]:
        """Return the moments over environments of the gradients of their losses, and the losses [E].

        The loss of an environment must depend only on its own examples.
        """
        gradients, values = self.environment_gradients(losses, vector.expand(batch.n_envs, -1), batch)
        return moments_of(gradients, log_magnitude=log_magnitude), values

    def inner_gradients(self, risks: Risks, params: Params, batch: EnvBatch) -> tuple[Params, Tensor]:
        """Return the gradients [E, ...] of the environments' risks, by parameter, and the risks [E].

        It is for use inside an objective, which is then differentiated itself. The risk of an environment must depend
        only on its own examples.
        """

        # Transforms of `torch.func` can be differentiated, by `torch.func` and by autograd.
        gradients, values = vmap(grad_and_value(_of_one_environment(risks)), in_dims=(None, 0))(params, batch)
        return gradients, values


class _InnerByAutograd(Differentiator):
    """Computes `inner_gradients` by autograd, one environment after the other.

    Layers can use their kernels, because no transform of `torch.func` surrounds them.
    """

    def inner_gradients(self, risks: Risks, params: Params, batch: EnvBatch) -> tuple[Params, Tensor]:
        """See `Differentiator.inner_gradients`. Gradients are returned in float32 or float64."""
        names, kept = list(params), list[Tensor]()

        def handles_of(*tensors: Tensor) -> tuple[Tensor, ...]:
            kept.extend(tensor.view_as(tensor) for tensor in tensors)
            return tuple(kept)

        def gradients(values: Tensor) -> tuple[Tensor, ...]:
            check_depends(values)
            return torch.autograd.grad(values.sum(), kept, create_graph=True, materialize_grads=True)

        apply = on_all_runs if in_vmap() else lambda function, *tensors: function(*tensors)
        handles = dict(zip(names, apply(handles_of, *params.values()), strict=True))
        values = [risks(handles, batch.environment(e))[0] for e in range(batch.n_envs)]
        by_environment = [[_at_least_float32(piece) for piece in apply(gradients, value)] for value in values]
        stacked = (torch.stack(pieces) for pieces in zip(*by_environment, strict=True))
        return dict(zip(names, stacked, strict=True)), torch.stack(values)


class Functional(Differentiator):
    """Computes gradients by `torch.func`, for all environments together."""

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
        gradients, values = vmap(grad_and_value(_of_one_environment(losses)))(vectors, batch)
        return gradients, values

    def environment_moments(
        self, losses: EnvironmentLosses, vector: Tensor, batch: EnvBatch, *, log_magnitude: bool = False
    ) -> tuple[TensorMoments, Tensor]:
        """See `Differentiator.environment_moments`."""
        gradients, values = vmap(grad_and_value(_of_one_environment(losses)), in_dims=(None, 0))(vector, batch)
        return moments_of(gradients, log_magnitude=log_magnitude), values


class AcrossRuns(_InnerByAutograd):
    """Computes gradients inside one level of `vmap`, by autograd on the tensors of all K runs.

    Layers can use their kernels for K runs, because no gradient transform surrounds them. Gradients of environments are
    computed one environment after the other, each for all runs.
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
    """Computes gradients by autograd."""

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
    """Computes moments by autograd, with the graph of one environment at a time."""

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


class Direct(_InnerByAutograd, _Plain):
    """Computes gradients of one run by autograd, for all environments together. It does not work under `vmap`.

    It avoids the first call of `torch.func.grad`, which imports the compiler and takes seconds.
    """

    def environment_gradients(
        self, losses: EnvironmentLosses, vectors: Tensor, batch: EnvBatch
    ) -> tuple[Tensor, Tensor]:
        """See `Differentiator.environment_gradients`."""
        leaf = vectors.detach().clone().requires_grad_()
        values = vmap(_of_one_environment(losses))(leaf, batch)
        (gradients,) = torch.autograd.grad(values.sum(), leaf)
        return gradients, values.detach()


def check_depends(value: Tensor) -> None:
    """Raise an error if a value that is to be minimized does not depend on the parameters."""
    if not value.requires_grad:
        raise SandmaskError(
            "The objective does not depend on the parameters. Compute it from `params`, for example with self.risks, "
            "self.logits or self.features, and without detach() or torch.no_grad()."
        )


def moments_of(gradients: Tensor, *, log_magnitude: bool = False) -> TensorMoments:
    """The moments over environments of gradients [E, P]; works under `vmap`."""
    return _of_vector(GradientMoments.of_gradients(gradients, log_magnitude=log_magnitude, check_finite=False))


def _pulled(slope: Tensor, leaf: Tensor, value: Tensor) -> Tensor:
    """The gradient of the leaf, from the gradient `slope` of the value."""
    # A sum, because autograd imports the compiler if it is given a vector of gradients.
    (gradient,) = torch.autograd.grad((value * slope).sum(), leaf)
    return gradient


def _at_least_float32(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _of_one_environment(losses: EnvironmentLosses | Risks) -> Callable[[Any, EnvBatch], Tensor]:
    """The loss of a single environment, for `vmap` over environments."""
    return lambda params, fields: losses(params, EnvBatch(*(field.unsqueeze(0) for field in fields)))[0]


def _of_vector(moments: GradientMoments) -> TensorMoments:
    """The moments of the flat vector, which is the only tensor of these moments."""
    of_vector = moments.of(0)
    assert of_vector is not None  # the vector always has a gradient
    return of_vector


def detached(tree: Any) -> Any:
    """The tree with all tensors detached."""
    return pytree.tree_map_only(Tensor, Tensor.detach, tree)
