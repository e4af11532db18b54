"""Adaptive risk minimization (Zhang et al., NeurIPS 2021): the model adapts to a learned summary of the batch."""

from functools import partial

import torch
from torch import Tensor, nn

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry
from sandmask.algorithms._functions import Hparams, Metrics, State, environment_risks, trained
from sandmask.functional import EnvBatch, FlatModule
from sandmask.functional.context_conv import convolution, has_context_kernels, normed_block
from sandmask.hparams import COUNT, Constant, Hparam
from sandmask.networks import MLP, Network

_HIDDEN, _GROUPS = 64, 8


class ARM(Algorithm):
    """Minimize mean_e R_e(c(f([x, u_e]))), where u_e is the mean of h(x') over the batch of environment e (ARM-CML).

    The context network h, the featurizer f and the classifier c are trained together. (In DomainBed's code, the
    optimizer leaves out h, and h has batch-norm, which would mix the environments. Here, it has group-norm.) At test
    time, u is the mean over the batch to be classified.
    """

    uses_context = True
    averaged = ("params", "context")

    def build_network(self) -> Network:
        """Build the context network, and a network whose inputs have the context as further channels."""
        shape = self.problem.input_shape
        self.context = FlatModule(partial(context_network, shape), self.problem.dtype)
        extra_channels = 1 if len(shape) == 3 else shape[0]
        featurizer = partial(self.problem.featurizer, extra_channels=extra_channels)
        problem = self.problem
        return Network(featurizer, problem.n_classes, dtype=problem.dtype, nonlinear=problem.nonlinear)

    def extra_state(self, seed: int) -> State:
        """Return the context network and its optimizer."""
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
        """Return the logits of a batch of one environment, which is its own context."""
        weight = torch.ones(1, x.shape[0], device=x.device)
        inputs = self.with_context(state["context"], x.unsqueeze(0), weight).squeeze(0)
        return self.network.logits(self.network.unflatten(state["params"]), inputs)

    def with_context(self, context: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return inputs [E, B, C, ...] with the mean context of their environment as further channels."""
        inputs = x.flatten(0, 1)
        if self.problem.dtype != torch.float32:
            inputs = inputs.to(self.problem.dtype)
        params, share = self.context.unflatten(context), weight / weight.sum(1, keepdim=True)
        on_images = isinstance(self.context.skeleton, ContextConvNet)
        if on_images and has_context_kernels(inputs, params["0.weight"], _GROUPS):
            mean = self.context(params, inputs, share).unsqueeze(1)
        else:
            flat = self.context(params, inputs).to(context.dtype)
            maps = flat.view(*x.shape[:2], *flat.shape[1:])
            mean = (share.view(*weight.shape, *[1] * (maps.dim() - 2)) * maps).sum(1, keepdim=True)
        return torch.cat([x, mean.to(x.dtype).expand(-1, x.shape[1], *mean.shape[2:])], dim=2)


class ContextConvNet(nn.Sequential):
    """Three 5 x 5 convolutions to one channel, with group normalization and ReLU between them."""

    def __init__(self, n_channels: int) -> None:
        layers: list[nn.Module] = []
        for n_in in (n_channels, _HIDDEN):
            layers += [nn.Conv2d(n_in, _HIDDEN, 5, padding=2), nn.GroupNorm(_GROUPS, _HIDDEN), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(_HIDDEN, 1, 5, padding=2))

    def forward(self, x: Tensor, share: Tensor | None = None) -> Tensor:
        """Return a map for every image [N, ...], or with `share` [E, N / E] its mean over each environment."""
        if share is None:
            maps: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
            return maps
        first, first_norm, _, second, second_norm, _, last = self
        x = normed_block(x, *_own(first), *_own(first_norm), _GROUPS)
        mean = normed_block(x, *_own(second), *_own(second_norm), _GROUPS, share)
        return convolution(mean, *_own(last))  # of the mean, because convolutions are linear


def _own(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return a layer's weight and bias."""
    assert isinstance(layer, nn.Conv2d | nn.GroupNorm)
    assert layer.bias is not None
    return layer.weight, layer.bias


def context_network(shape: tuple[int, ...]) -> nn.Module:
    """Return the context network: a `ContextConvNet` for images, an MLP to vectors of the same length for vectors."""
    return ContextConvNet(shape[0]) if len(shape) == 3 else MLP(shape[0], _HIDDEN, 3, shape[0])


ALGORITHMS.register(
    AlgorithmEntry(
        name="ARM",
        summary="Adapt to the environment by a learned summary of the batch, appended to every input",
        paper="Zhang et al., Adaptive risk minimization: learning to adapt to domain shift, NeurIPS 2021",
        build=ARM,
        hparams=(Hparam("batch_size", 8, Constant(8), COUNT, scope="image"),),
    )
)
