"""The base class of DANN, CDANN and ADRMX, which train in turns with a discriminator of environments."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sandmask.algorithms._base import Algorithm
from sandmask.algorithms._functions import Hparams, Metrics, State
from sandmask.functional import AdamState, Dropout, EnvBatch, adam_step, random
from sandmask.functional.adam import adam_where
from sandmask.functional.ranks import Reads
from sandmask.networks import MLP

_NOISE = 1000  # stream of the discriminator's dropout, separate from the network's


class Discriminator(nn.Module):
    """Predicts the environment from features. With `n_classes`, it also has an embedding of each class."""

    def __init__(self, n_features: int, n_envs: int, n_classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.mlp = MLP(n_features, width, depth, n_envs)
        if n_classes:
            self.embedding = nn.Parameter(torch.randn(n_classes, n_features))

    def forward(self, part: str, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """Return the "embedding" of one-hot labels, or the "logits" of features, as `part` says."""
        if part == "embedding":
            return x.to(self.embedding.dtype) @ self.embedding
        logits: Tensor = self.mlp(x, drop)
        return logits


class Adversarial(Algorithm):
    """Base class of adversarial methods. A discriminator minimizes D, and a generator minimizes G, which contains -D.

    The generator is everything but the discriminator. Step t = 1, 2, ... updates the discriminator if
    t mod (1 + d_steps_per_g_step) < d_steps_per_g_step, and otherwise the generator. Each has its own Adam with betas
    (beta1, 0.9).
    """

    reads: Reads = "examples"
    generator: tuple[str, ...] = ("params",)  # the vectors of the state that `adam` trains together

    @abstractmethod
    def losses(
        self, vectors: Sequence[Tensor], batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return G, D and the loss to report. The last of `vectors` is that of the discriminator."""

    @abstractmethod
    def rates(self, who: str, hparams: Hparams) -> Hparams:
        """Return the hyperparameters with `lr` and `weight_decay` of the generator ("g") or the discriminator ("d")."""

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update of the discriminator or of the generator. Both use the same backward pass."""
        turn = hparams["d_steps_per_g_step"]
        discriminates = (state["step"] + 1) % (1 + turn) < turn
        vectors = [state[name] for name in (*self.generator, "discriminator")]
        sizes = [len(vector) for vector in vectors]

        def objective(joint: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            of_generator, confusion, loss = self.losses(torch.split(joint, sizes), batch, hparams, key)
            return torch.where(discriminates, confusion, of_generator), (loss, confusion)

        joint = torch.cat(vectors)
        gradient, _, (loss, confusion) = self.problem.differentiate.gradient(objective, joint)
        parts = [sum(sizes[:-1]), sizes[-1]]
        (g_vector, d_vector), (g_gradient, d_gradient) = torch.split(joint, parts), torch.split(gradient, parts)
        g_vector, adam = _step_where(~discriminates, g_vector, g_gradient, state["adam"], self.rates("g", hparams))
        d_vector, d_adam = _step_where(
            discriminates, d_vector, d_gradient, state["discriminator_adam"], self.rates("d", hparams)
        )
        changes: State = dict(zip(self.generator, torch.split(g_vector, sizes[:-1]), strict=True))
        changes |= {"adam": adam, "discriminator": d_vector, "discriminator_adam": d_adam, "step": state["step"] + 1}
        return {**state, **changes}, {"loss": loss, "discriminator_loss": confusion}

    def discriminator_dropout(self, batch: EnvBatch, hparams: Hparams) -> Dropout | None:
        """Return the dropout of the discriminator."""
        if not self.problem.dropout or "mlp_dropout" not in hparams:
            return None
        return Dropout(hparams["mlp_dropout"], random.fold(batch.example_keys.flatten(), _NOISE))


def _step_where(
    when: Tensor, params: Tensor, gradient: Tensor, adam: AdamState, hparams: Hparams
) -> tuple[Tensor, AdamState]:
    """Take an Adam step where `when` is true, and change nothing elsewhere."""
    lr, weight_decay, betas = hparams["lr"], hparams["weight_decay"], (hparams["beta1"], 0.9)
    decoupled = hparams.get("decoupled_decay", 0.0)
    moved, stepped = adam_step(params, gradient, adam, lr, weight_decay, betas, decoupled)
    return torch.where(when, moved, params), adam_where(when, stepped, adam)
