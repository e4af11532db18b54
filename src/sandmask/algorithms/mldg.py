"""Meta-learning for domain generalization (Li et al., AAAI 2018)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry
from sandmask.algorithms._functions import Hparams, Metrics, State, adam_update, descend
from sandmask.functional import EnvBatch, adam_init, random
from sandmask.hparams import COUNT, NON_NEGATIVE, Choice, Hparam, LogUniform


class MLDG(Algorithm):
    """Update by mean_(i, j) [grad R_i(w) + beta grad R_j(w_i)], where w_i is w after an Adam step along grad R_i(w).

    In each step, `n_meta_test` environments are held out. Each of the other environments i is paired with one of the
    held-out environments j, which take turns. The Adam of w_i starts anew in each step. The method is of first order:
    w_i counts as a constant.

    (DomainBed's code divides the sum over pairs by the number of environments instead of the number of pairs. With
    Adam, this only changes the share of the weight decay. It trains nothing if all environments are held out; here, at
    least one is trained on.)
    """

    least_envs = 2

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        losses, differentiate = self.risks_by(hparams), self.problem.differentiate
        w, beta = state["params"], hparams["mldg_beta"]
        train, test, used = split(batch.n_envs, hparams["n_meta_test"], key)
        inner, inner_losses = differentiate.environment_gradients(losses, w.expand(len(train), -1), batch.take(train))
        tuned, _ = adam_update(w, inner, adam_init(w), hparams)
        outer, outer_losses = differentiate.environment_gradients(losses, tuned, batch.take(test))
        share = used / used.sum()
        gradient = (share.unsqueeze(-1) * (inner + beta * outer)).sum(0)
        loss = (share * (inner_losses + beta * outer_losses)).sum()
        return {**state, **descend(state, gradient, state["adam"], hparams)}, {"loss": loss}


def split(n_envs: int, n_meta_test: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return random pairs of environments: meta-train [E - 1], meta-test [E - 1], and 1 if the pair counts, else 0.

    E - n_meta_test pairs count. There are always E - 1 pairs, so that shapes do not depend on a hyperparameter.
    """
    order = random.permutation(key, n_envs)
    held_out = n_meta_test.to(torch.int64).clamp(1, n_envs - 1)
    place = torch.arange(n_envs - 1, device=key.device)
    n_train = n_envs - held_out
    test = order[n_train + place % held_out]
    return order[:-1], test, (place < n_train).to(torch.float32)


ALGORITHMS.register(
    AlgorithmEntry(
        name="MLDG",
        summary="Take steps that also lower the loss of environments that the step did not use",
        paper="Li et al., Learning to generalize: meta-learning for domain generalization, AAAI 2018",
        build=MLDG,
        hparams=(
            Hparam("mldg_beta", 1.0, LogUniform(10, -1, 1), NON_NEGATIVE),
            Hparam("n_meta_test", 2, Choice(1, 2), COUNT),
        ),
    )
)
