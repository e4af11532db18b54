"""Adaptive risk minimization: a context network summarizes the batch, and the model adapts to the summary."""

from functools import partial

import torch
from torch import Tensor, nn

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry
from sandmask.algorithms._functions import Hparams, Metrics, State, environment_risks, trained
from sandmask.functional import EnvBatch, FlatModule
from sandmask.hparams import COUNT, Constant, Hparam
from sandmask.networks import MLP, Network

_HIDDEN = 64


class ARM(Algorithm):
    """min mean_e R_e(c(f([x, u_e]))), u_e = mean_x' h(x') over environment e's batch (the paper's ARM-CML).

    Network and context network h are trained together. (DomainBed's code leaves h out of the optimizer; and
    its h has batch-norm, which would mix the environments: here it is group-norm.) At test time u is the mean
    over the batch to be classified.
    """

    uses_context = True
    stacks_by_kernels = False  # the context network's convolutions have none
    averaged = ("params", "context")

    def build_network(self) -> Network:
        """A network whose inputs have the context as further channels, and beside it the context network."""
        shape = self.problem.input_shape
        self.context = FlatModule(lambda: context_network(shape), self.problem.dtype)
        extra_channels = 1 if len(shape) == 3 else shape[0]
        featurizer = partial(self.problem.featurizer, extra_channels=extra_channels)
        problem = self.problem
        return Network(featurizer, problem.n_classes, dtype=problem.dtype, nonlinear=problem.nonlinear)

    def extra_state(self, seed: int) -> State:
        """The context network and its optimizer."""
        return trained("context", self.context, seed)

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update of both networks."""

        def objective(vector: Tensor, context: Tensor) -> tuple[Tensor, tuple[()]]:
            x = self.with_context(context, batch.x, batch.weight).flatten(0, 1)
            logits = self.network.logits(self.network.unflatten(vector), x, self.dropout(batch, hparams))
            return environment_risks(batch.split(logits), batch).mean(), ()

        state, loss, _ = self.descend_together(state, objective, {"params": hparams, "context": hparams})
        return state, {"loss": loss}

    def predict(self, state: State, x: Tensor) -> Tensor:
        """Logits of a batch of one environment, which is its own context."""
        weight = torch.ones(1, x.shape[0], device=x.device)
        inputs = self.with_context(state["context"], x.unsqueeze(0), weight).squeeze(0)
        return self.network.logits(self.network.unflatten(state["params"]), inputs)

    def with_context(self, context: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Inputs [E, B, C, ...] with their environment's mean context as further channels."""
        inputs = x.flatten(0, 1)
        if self.problem.dtype != torch.float32:
            inputs = inputs.to(self.problem.dtype)
        flat = self.context(self.context.unflatten(context), inputs).to(context.dtype)
        maps = flat.view(*x.shape[:2], *flat.shape[1:])
        share = (weight / weight.sum(1, keepdim=True)).view(*weight.shape, *[1] * (maps.dim() - 2))
        mean = (share * maps).sum(1, keepdim=True).expand_as(maps)
        return torch.cat([x, mean.to(x.dtype)], dim=2)


def context_network(shape: tuple[int, ...]) -> nn.Module:
    """For images, three 5 x 5 convolutions to one channel; for vectors, an MLP to as many numbers."""
    if len(shape) != 3:
        return MLP(shape[0], _HIDDEN, 3, shape[0])
    return nn.Sequential(
        nn.Conv2d(shape[0], _HIDDEN, 5, padding=2),
        nn.GroupNorm(8, _HIDDEN),
        nn.ReLU(),
        nn.Conv2d(_HIDDEN, _HIDDEN, 5, padding=2),
        nn.GroupNorm(8, _HIDDEN),
        nn.ReLU(),
        nn.Conv2d(_HIDDEN, 1, 5, padding=2),
    )


ALGORITHMS.register(
    AlgorithmEntry(
        name="ARM",
        summary="Adapt to the environment by a learned summary of the batch, appended to every input",
        paper="Zhang et al., Adaptive risk minimization: learning to adapt to domain shift, NeurIPS 2021",
        build=ARM,
        hparams=(Hparam("batch_size", 8, Constant(8), COUNT, scope="image"),),
    )
)
