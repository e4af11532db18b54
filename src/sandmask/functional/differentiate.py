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
from torch.func import grad_and_value, vmap
from torch.utils import _pytree as pytree

from sandmask._physical import on_all_runs
from sandmask.errors import SandmaskError
from sandmask.functional.batch import EnvBatch
from sandmask.masks import GradientMoments, TensorMoments

Objective = Callable[[Tensor], tuple[Tensor, Any]]
AT_ONCE_BYTES = 2**31  # of all environments' gradients together, that are kept at once on a GPU
EnvironmentLosses = Callable[[Tensor, EnvBatch], Tensor]


class Differentiator(ABC):
    """The interface through which algorithms compute gradients."""

    @abstractmethod
    def gradient(self, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Gradient, value and auxiliary output of `objective(vector) -> (value, aux)`."""

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


class Functional(Differentiator):
    """Through `torch.func`; the environments' gradients are taken together."""

    def gradient(self, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
        """See `Differentiator.gradient`."""
        gradient, (value, aux) = grad_and_value(objective, has_aux=True)(vector)
        return gradient, value, aux

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


class AcrossRuns(Differentiator):
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


class _Plain(Differentiator):
    """Gradients through plain autograd."""

    def gradient(self, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
        """See `Differentiator.gradient`."""
        leaf = vector.detach().requires_grad_()
        value, aux = objective(leaf)
        check_depends(value)
        (gradient,) = torch.autograd.grad(value, leaf)
        return gradient, value.detach(), detached(aux)


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


class Direct(_Plain):
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
