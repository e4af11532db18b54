"""Risk distribution matching (Nguyen et al., WACV 2024)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State, change_step, cross_entropy
from sandmask.algorithms.mmd import attached
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import COUNT, NON_NEGATIVE, Constant, Hparam, IntUniform, Uniform

SCALES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)


class RDM(ObjectiveAlgorithm):
    """Minimize mean_e R_e + lambda MMD2(r_k, r) + mu [var(r) + var(r_k)], where k = argmax_e R_e.

    r are the losses of all examples, and r_k those of the worst environment. MMD2 is the biased estimate of the squared
    maximum mean discrepancy, with the kernel sum_s exp(-s (a - b)^2) and s in SCALES. The variances are unbiased.
    lambda and mu are 0 before step `rdm_penalty_anneal_iters`, and `rdm_lambda` and `variance_weight` from then on. At
    that step, Adam is reset, and `rdm_lr` replaces `lr`.
    """

    changes_at = ("rdm_penalty_anneal_iters",)
    later_lr = "rdm_lr"

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus the weighted discrepancy and variances."""
        losses = cross_entropy(self.logits(params, batch, hparams), batch.y)
        risks = batch.mean(losses)
        worst = (torch.arange(batch.n_envs, device=losses.device) == risks.detach().argmax()).to(losses.dtype)
        weight = batch.weight.to(losses.dtype)
        of_worst = weight * worst.unsqueeze(-1)
        variances = variance(losses, weight) + variance(losses, of_worst)
        penalty = hparams["rdm_lambda"] * discrepancy(losses, of_worst, weight)
        penalty = penalty + hparams["variance_weight"] * variances
        annealed = state["step"] >= hparams["rdm_penalty_anneal_iters"]
        return risks.mean() + torch.where(annealed, penalty, 0.0), {}


def variance(values: Tensor, weight: Tensor) -> Tensor:
    """Return the unbiased variance of the values with weight 1."""
    count = weight.sum()
    mean = (values * weight).sum() / count
    return ((values - mean).square() * weight).sum() / (count - 1.0).clamp_min(1.0)


def discrepancy(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return MMD2 between the values with weight 1 in `first` and those with weight 1 in `second`; all are [E, B].

    It is sum_ij c_i c_j k(v_i, v_j), where c_i is the difference between the shares of i in `first` and `second`. The
    gradient is computed explicitly, as in MMD, because autograd would keep eight kernels between all examples.
    """
    known = values.detach()
    signed = first / first.sum() - second / second.sum()
    total, gradients = [], []
    for own, shares in zip(known, signed, strict=True):
        gaps = own.unsqueeze(-1) - known.flatten()
        kernel, slope = torch.zeros_like(gaps), torch.zeros_like(gaps)
        for scale in SCALES:
            term = torch.exp(-scale * gaps.square())
            kernel, slope = kernel + term, slope - 2.0 * scale * gaps * term
        total.append(shares @ kernel @ signed.flatten())
        gradients.append(2.0 * shares * (slope @ signed.flatten()))
    return attached(values, torch.stack(total).sum(), torch.stack(gradients))


ALGORITHMS.register(
    AlgorithmEntry(
        name="RDM",
        summary="Match the losses of the worst environment with those of all",
        paper="Nguyen et al., Domain generalisation via risk distribution matching, WACV 2024",
        build=RDM,
        hparams=(
            Hparam("rdm_lambda", 5.0, Uniform(0.1, 10), NON_NEGATIVE),
            Hparam("rdm_lambda", 5.0, Uniform(1, 10), NON_NEGATIVE, dataset="PACS"),
            Hparam("rdm_lambda", 5.0, Uniform(1, 10), NON_NEGATIVE, dataset="TerraIncognita"),
            Hparam("rdm_lambda", 0.5, Uniform(0.1, 1), NON_NEGATIVE, dataset="DomainNet"),
            *change_step("rdm_penalty_anneal_iters", 1500, IntUniform(800, 2700), recipe=(300, IntUniform(160, 540))),
            Hparam(
                "rdm_penalty_anneal_iters", 2400, IntUniform(1500, 3000), NON_NEGATIVE, dataset="DomainNet", step=True
            ),
            Hparam("variance_weight", 0.004, Uniform(0.001, 0.007), NON_NEGATIVE),
            *(
                Hparam("variance_weight", 0.0, Constant(0.0), NON_NEGATIVE, dataset=dataset)
                for dataset in ("TerraIncognita", "OfficeHome", "DomainNet")
            ),
            Hparam("rdm_lr", 1.5e-5, Uniform(8e-6, 2e-5), NON_NEGATIVE),
            Hparam("rdm_lr", 1.5e-3, Uniform(8e-4, 2e-3), NON_NEGATIVE, scope="tabular", space="recipe"),
            Hparam("batch_size", 88, IntUniform(70, 100), COUNT, scope="image"),
            Hparam("batch_size", 40, IntUniform(30, 60), COUNT, dataset="DomainNet"),
            Hparam("batch_size", 40, IntUniform(30, 60), COUNT, dataset="TerraIncognita"),
        ),
    )
)
