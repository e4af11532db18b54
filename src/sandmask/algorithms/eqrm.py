"""Empirical quantile risk minimization (Eastwood et al., NeurIPS 2022)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State, change_step
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import NON_NEGATIVE, Bounds, Hparam, LogUniform, Uniform

_HALVINGS = 32
_NARROWEST = 1e-6  # lower limit of 1.06 std(R), for equal risks


class EQRM(ObjectiveAlgorithm):
    """Minimize Q_alpha(R_1, ..., R_E), the alpha-quantile of a kernel density estimate of the environments' risks.

    Q solves mean_e Phi((Q - R_e) / h) = alpha, where h = 1.06 std(R) E^(-1/5) is the bandwidth and Phi the standard
    normal distribution function. A negative alpha stands for the quantile 1 - exp(alpha), which is so close to 1 that Q
    is computed as mean(R) + h sqrt(-2 alpha). Before step `eqrm_burnin_iters`, the objective is mean_e R_e. At that
    step, Adam is reset, and `eqrm_lr` replaces `lr`.

    The gradient is that of Q, by the implicit function theorem. DomainBed differentiates the last interval of a
    bisection instead, which depends only on the smallest and the largest risk. DomainBed resets Adam at the step that
    equals `eqrm_burnin_iters`. Drawn values are not integers, so there a drawn run keeps its Adam and `lr`. Here, Adam
    is reset at the first step at or after the drawn number.
    """

    changes_at = ("eqrm_burnin_iters",)
    later_lr = "eqrm_lr"
    least_envs = 2

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean of the risks, then their quantile."""
        risks = self.risks(params, batch, hparams)
        burnt_in = state["step"] >= hparams["eqrm_burnin_iters"]
        return torch.where(burnt_in, quantile(risks, hparams["eqrm_quantile"]), risks.mean()), {}


def quantile(risks: Tensor, alpha: Tensor) -> Tensor:
    """Return Q_alpha of risks [E]."""
    n_envs = len(risks)
    # The square root has no derivative at zero.
    deviation = risks.var().clamp_min((_NARROWEST / 1.06) ** 2).sqrt()
    width = 1.06 * deviation * n_envs**-0.2
    inside = torch.where(alpha < 0, 0.5, alpha).clamp(1e-6, 1.0 - 1e-6)
    below = _bisection(risks.detach(), width.detach(), inside)
    scores = (below - risks) / width
    density = torch.exp(-0.5 * scores.square()).mean().detach() * (0.5 / torch.pi) ** 0.5 / width.detach()
    # One step of Newton's method, whose gradient is that of the solution: dQ = -dF / (dF/dQ).
    solution = below - (torch.special.ndtr(scores).mean() - inside) / density
    extreme = risks.mean() + width * (-2.0 * alpha).clamp_min(0.0).sqrt()
    return torch.where(alpha < 0, extreme, solution)


def _bisection(risks: Tensor, width: Tensor, alpha: Tensor) -> Tensor:
    offset = width * torch.special.ndtri(alpha)
    low: Tensor = risks.amin() + offset
    high: Tensor = risks.amax() + offset
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        above = torch.special.ndtr((middle - risks) / width).mean() > alpha
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return 0.5 * (low + high)


ALGORITHMS.register(
    AlgorithmEntry(
        name="EQRM",
        summary="Minimize a high quantile of the environments' risks",
        paper="Eastwood et al., Probable domain generalization via quantile risk minimization, NeurIPS 2022",
        build=EQRM,
        hparams=(
            Hparam("eqrm_quantile", 0.75, Uniform(0.5, 0.99), Bounds(high=1, open_high=True)),
            *change_step(
                "eqrm_burnin_iters", 2500.0, LogUniform(10, 2.5, 3.5), recipe=(500.0, LogUniform(10, 1.8, 2.8))
            ),
            Hparam("eqrm_lr", 1e-6, LogUniform(10, -7, -5), NON_NEGATIVE),
            Hparam("eqrm_lr", 1e-4, LogUniform(10, -5, -3), NON_NEGATIVE, scope="tabular", space="recipe"),
        ),
    )
)
