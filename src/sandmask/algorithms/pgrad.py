"""PGrad: principal directions of a pass through the environments (Wang et al., ICLR 2023)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry
from sandmask.algorithms._functions import Hparams, Metrics, State, adam_update
from sandmask.functional import EnvBatch, random
from sandmask.hparams import COUNT, NON_NEGATIVE, Constant, Hparam, LogUniform

PARTS = 3  # number of parts of each environment's minibatch, and of passes through the environments
DIRECTIONS = 4


class PGrad(Algorithm):
    """Take an SGD step along the principal directions of a trajectory that passes through the environments one by one.

    1. The trajectory w_0, ..., w_n, where n = 3 E, starts at the parameters. It passes through the environments three
       times, in random order and with another third of the minibatch each time: w_k = Adam(w_(k-1), grad R_e). This
       Adam keeps its state from step to step and has no weight decay.
    2. v_1, ..., v_4 are the first principal directions of the n + 1 points, with variances s_1, ..., s_4. Each has the
       length of d = w_0 - w_n, and a sign such that v_i . d >= 0.
    3. w <- w_0 - pgrad_lr (u + weight_decay w_0), where u = sum_i s_i v_i / |s|.
    """

    captures = False  # `eigh` waits for the device, to check its result

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update: three passes through all environments."""
        w, adam = state["params"], state["adam"]
        inner = {**hparams, "weight_decay": torch.zeros_like(hparams["weight_decay"])}
        inner.pop("decoupled_decay", None)
        points, losses = [w], []
        for number in range(PARTS):
            part = part_of(batch, number).take(random.permutation(random.fold(key, number), batch.n_envs))
            for e in range(batch.n_envs):
                gradient, loss = self.risk_gradient(points[-1], part.environment(e), hparams)
                point, adam = adam_update(points[-1], gradient, adam, inner)
                points.append(point)
                losses.append(loss)
        decay = hparams["weight_decay"] + hparams.get("decoupled_decay", 0.0)
        params = w - hparams["pgrad_lr"] * (principal_gradient(torch.stack(points)) + decay * w)
        changes = {"params": params, "adam": adam, "step": state["step"] + 1}
        return {**state, **changes}, {"loss": torch.stack(losses).mean()}


def principal_gradient(points: Tensor) -> Tensor:
    """Return the vector u for the points [n + 1, P] of a trajectory."""
    centered = points - points.mean(0)
    # If q_i and l_i are the eigenvectors and eigenvalues of the centred points' inner products, the direction of v_i is
    # q_i X / sqrt(l_i), whose product with w_0 - w_n is sqrt(l_i) (q_i0 - q_in), and s_i is proportional to l_i.
    # NaN and inf are replaced here, because `eigh` would raise an error for all runs of a stack. The result of such a
    # run is still not finite, because of `centered`.
    values, vectors = torch.linalg.eigh((centered @ centered.mT).nan_to_num(0.0, 0.0, 0.0))
    values, vectors = values[-DIRECTIONS:].clamp_min(0), vectors[:, -DIRECTIONS:]
    signs = torch.where(vectors[0] > vectors[-1], 1.0, -1.0)
    length, total = torch.linalg.vector_norm(points[0] - points[-1]), torch.linalg.vector_norm(values)
    shares: Tensor = vectors @ (signs * values.sqrt()) * (length / torch.where(total > 0, total, 1.0))
    return torch.mv(centered.mT, shares)


def part_of(batch: EnvBatch, number: int) -> EnvBatch:
    """Return a third of the examples of each environment, by position, or all if there are fewer than three.

    Smaller parts are padded.
    """
    count, positions, size = batch.weight.sum(-1, keepdim=True).to(torch.int64), batch.positions, batch.y.shape[1]
    inside = (positions >= number * count // PARTS) & (positions < (number + 1) * count // PARTS)
    inside = (inside | (count < PARTS)) & (batch.weight > 0)
    most = max(-(-size // PARTS), min(size, PARTS - 1))
    order = inside.to(torch.int64).argsort(dim=-1, descending=True, stable=True)[:, :most]
    rows = torch.arange(batch.n_envs, device=order.device).unsqueeze(1)
    taken = EnvBatch(*(field[rows, order] for field in batch))
    return taken._replace(weight=taken.weight * inside[rows, order])


ALGORITHMS.register(
    AlgorithmEntry(
        name="PGrad",
        summary="Step along the principal directions of a pass through the environments, one by one",
        paper="Wang et al., PGrad: learning principal gradients for domain generalization, ICLR 2023",
        build=PGrad,
        hparams=(
            Hparam("pgrad_lr", 0.1, Constant(0.1), NON_NEGATIVE),
            Hparam("lr", 5e-5, Constant(5e-5), NON_NEGATIVE, scope="image"),
            Hparam("weight_decay", 0.0, LogUniform(10, -6, -4), NON_NEGATIVE, scope="image"),
            Hparam("batch_size", 32, Constant(32), COUNT, scope="image"),
        ),
    )
)
