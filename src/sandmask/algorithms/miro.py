"""Mutual information regularization with the pretrained network (Cha et al., ECCV 2022)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry, Problem
from sandmask.algorithms._functions import Hparams, Metrics, State, environment_risks
from sandmask.errors import SandmaskError
from sandmask.functional import EnvBatch, adam_init
from sandmask.hparams import NON_NEGATIVE, Choice, Constant, Hparam

_FIRST, _SMALLEST = 0.1, 1e-5  # initial and smallest variance


class MIRO(Algorithm):
    """Minimize mean_e R_e + miro_lambda sum_l mean [ (f_l - f0_l)^2 / v_l + log v_l ] / 2, over the network and v.

    f_l are the features of stage l. The stages of a timm network are its stem and its blocks; other networks have one
    stage, the features. f0_l are the features of the initial network, which should be pretrained. The variances v_l =
    softplus(b_l) + 1e-5 are learned, one for each channel. They start at 0.1, and their learning rate is `miro_lr_mult`
    times that of the network. A step costs two forward passes and one backward pass. The range of miro_lambda is ours.
    """

    training_only = ("start", "variances")

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        if self.network.norms:
            raise SandmaskError(
                "MIRO compares with the pretrained network, whose batch-norm is frozen. Leave out freeze_bn=0."
            )
        self.channels = stage_channels(problem)

    def extra_state(self, seed: int) -> State:
        """Return the initial parameters, and b with its optimizer."""
        variances = torch.full((sum(self.channels),), math.log(math.expm1(_FIRST - _SMALLEST)))
        return {"start": self.network.init(seed), "variances": variances, "variances_adam": adam_init(variances)}

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update of the network and of the variances."""
        _, before = self.network.stages(self.network.unflatten(state["start"]), batch.inputs)

        def objective(vector: Tensor, variances: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            params = self.network.unflatten(vector)
            features, stages = self.network.stages(params, batch.inputs, self.dropout(batch, hparams))
            logits = batch.split(self.network.classify(params, features))
            scales = torch.split(F.softplus(variances) + _SMALLEST, self.channels)
            each = [distance(*stage) for stage in zip(stages, before, scales, strict=True)]
            penalty = batch.mean(batch.split(torch.stack(each).sum(0))).mean()
            risk = environment_risks(logits, batch).mean()
            return risk + hparams["miro_lambda"] * penalty, (risk, penalty)

        faster = {**hparams, "lr": hparams["lr"] * hparams["miro_lr_mult"]}
        both = {"params": hparams, "variances": faster}
        state, _, (risk, penalty) = self.descend_together(state, objective, both)
        return state, {"loss": risk, "penalty": penalty}


def distance(stage: Tensor, before: Tensor, variance: Tensor) -> Tensor:
    """Return the mean of [(f - f0)^2 / v + log v] / 2 for each example: [N, channels, ...] and v [channels] -> [N]."""
    squares = (stage - before).square().flatten(2).mean(-1) if stage.ndim > 2 else (stage - before).square()
    return 0.5 * (squares / variance + variance.log()).mean(-1)


def stage_channels(problem: Problem) -> list[int]:
    """Return the number of channels of each stage, from a forward pass on the meta device."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        featurizer = problem.featurizer().to("meta")
        _, stages = featurizer.stages(torch.empty(2, *problem.input_shape, device="meta"))
    return [stage.shape[1] for stage in stages]


WEIGHT = Choice(0.01, 0.1, 1.0)

ALGORITHMS.register(
    AlgorithmEntry(
        name="MIRO",
        summary="Keep the features near those of the pretrained network",
        paper="Cha et al., Domain generalization by mutual-information regularization with pre-trained models, "
        "ECCV 2022",
        build=MIRO,
        compares_environments=False,
        hparams=(
            Hparam("miro_lambda", 0.1, WEIGHT, NON_NEGATIVE),
            Hparam("miro_lambda", 0.01, WEIGHT, NON_NEGATIVE, dataset="PACS"),
            Hparam("miro_lambda", 0.01, WEIGHT, NON_NEGATIVE, dataset="VLCS"),
            Hparam("miro_lr_mult", 10.0, Constant(10.0), NON_NEGATIVE),
        ),
    )
)
