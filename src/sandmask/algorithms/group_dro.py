"""Group distributionally robust optimization (Sagawa et al., ICLR 2020)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform


class GroupDRO(ObjectiveAlgorithm):
    """min sum_e q_e R_e, where q_e <- q_e exp(eta R_e) / sum of these, at every step (algorithm 1)."""

    def extra_state(self, seed: int) -> State:
        """The weights of the environments, equal at first."""
        return {"q": torch.full((self.problem.n_envs,), 1.0 / self.problem.n_envs)}

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The risks, weighted by how bad they are and have been."""
        risks = self.risks(params, batch, hparams)
        known = risks.detach()
        # Taking the largest risk off all of them leaves q as it is and keeps a diverging run's exp finite.
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
