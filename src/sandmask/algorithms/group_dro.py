"""Group distributionally robust optimization (Sagawa et al., ICLR 2020)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform


class GroupDRO(ObjectiveAlgorithm):
    """Minimize sum_e q_e R_e, where the weights q_e grow with the risks (algorithm 1).

    At every step, q_e is multiplied by exp(eta R_e), and then q is divided by its sum.
    """

    def extra_state(self, seed: int) -> State:
        """Return the weights of the environments, which are equal at first."""
        return {"q": torch.full((self.problem.n_envs,), 1.0 / self.problem.n_envs)}

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The risks, weighted by q."""
        risks = self.risks(params, batch, hparams)
        known = risks.detach()
        # Subtracting the largest risk does not change q, and keeps exp finite if the run diverges.
        q = state["q"] * torch.exp(hparams["groupdro_eta"] * (known - known.amax()))
        q = q / q.sum()
        return (q * risks).sum(), {"q": q}


ALGORITHMS.register(
    AlgorithmEntry(
        name="GroupDRO",
        summary="Give more weight to the environments with the larger risks",
        paper="Sagawa et al., Distributionally robust neural networks for group shifts, ICLR 2020",
        build=GroupDRO,
        hparams=(Hparam("groupdro_eta", 1e-2, LogUniform(10, -3, -1), NON_NEGATIVE),),
    )
)
