"""Mixup between environments (Yan et al., 2020, with Zhang et al.'s convex combinations)."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State, cross_entropy
from sandmask.functional import EnvBatch, Params, random
from sandmask.functional.ranks import Reads
from sandmask.hparams import POSITIVE, Hparam, LogUniform


class Mixup(ObjectiveAlgorithm):
    """Minimize mean_(i, j) [lam CE(f(x), y_i) + (1 - lam) CE(f(x), y_j)], where x = lam x_i + (1 - lam) x_j.

    f(x) are the logits. The examples i and j are from environments that are neighbours in a random cycle through all
    environments. lam ~ Beta(alpha, alpha) is drawn once for each pair of environments.
    """

    reads: Reads = "all"

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mixed loss of mixed inputs."""
        order = random.permutation(random.fold(key, 0), batch.n_envs)
        share = random.symmetric_beta(random.fold(key, 1), hparams["mixup_alpha"], batch.n_envs)
        mixed, other_y = mix(batch, order, share)
        logits = self.logits(params, mixed, hparams)
        own = mixed.mean(cross_entropy(logits, mixed.y))
        other = mixed.mean(cross_entropy(logits, other_y))
        return (share * own + (1.0 - share) * other).mean(), {}


def mix(batch: EnvBatch, order: Tensor, share: Tensor) -> tuple[EnvBatch, Tensor]:
    """Mix environment `order[i]` with `order[i + 1]` (the last with the first); `share[i]` is the share of the former.

    Return the mixed batch, with the labels of the former, and the labels of the latter. If one example of a pair is
    padding, so is the mixed example.
    """
    first = EnvBatch(*(field[order] for field in batch))
    second = EnvBatch(*(field[order.roll(-1)] for field in batch))
    lam = share.view(-1, *(1 for _ in first.x.shape[1:]))
    x = lam * first.x + (1.0 - lam) * second.x
    return EnvBatch(x, first.y, first.weight * second.weight, first.example_keys), second.y


ALGORITHMS.register(
    AlgorithmEntry(
        name="Mixup",
        summary="Train on convex combinations of examples from pairs of environments",
        paper="Yan et al., Improve unsupervised domain adaptation with mixup training, 2020",
        build=Mixup,
        hparams=(Hparam("mixup_alpha", 0.2, LogUniform(10, -1, 1), POSITIVE),),
    )
)
