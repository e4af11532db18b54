"""A small problem, and a slow and obvious trainer that algorithms are compared with, in double precision."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils import _pytree as pytree

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.functional import EnvBatch, make_batch, random
from sandmask.hparams import Hparam
from sandmask.networks import MLP

N_ENVS, N_EXAMPLES, N_INPUTS, N_CLASSES, WIDTH = 3, 7, 5, 4, 6

Minibatches = list[tuple[Tensor, Tensor]]
NaiveObjective = Callable[[nn.ModuleDict, Minibatches, int], Tensor]


def featurizer() -> MLP:
    return MLP(N_INPUTS, width=8, depth=3, n_outputs=WIDTH)


@pytest.fixture
def problem() -> Problem:
    return Problem(featurizer, N_ENVS, N_CLASSES, (N_INPUTS,))


@pytest.fixture
def batches() -> list[EnvBatch]:
    """Minibatches of six steps; the environments differ in mean and scale."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for step in range(6):
        x = torch.randn(N_ENVS, N_EXAMPLES, N_INPUTS, generator=generator, dtype=torch.float64)
        x = x * torch.tensor([0.5, 1.0, 1.5]).view(-1, 1, 1) + torch.tensor([-0.5, 0.0, 0.5]).view(-1, 1, 1)
        y = torch.randint(N_CLASSES, (N_ENVS, N_EXAMPLES), generator=generator)
        made.append(make_batch(x, y, random.key_of(step)))
    return made


@pytest.fixture
def hparams_of() -> Callable[..., dict[str, Tensor]]:
    """The defaults of an algorithm that hold for every dataset, as tensors, with the values given in their place."""

    def build(name: str, **values: float) -> dict[str, Tensor]:
        shared = {"lr": 3e-3, "weight_decay": 1e-2, "dropout": 0.0}
        rows = [row for row in ALGORITHMS[name].hparams if isinstance(row, Hparam)]
        everywhere = [row for row in rows if (row.scope, row.dataset) == (None, None) and row.space in (None, "paper")]
        own = {row.name: row.default for row in everywhere}
        merged = {**shared, **own, **values}
        return {key: torch.tensor(value, dtype=torch.float64) for key, value in merged.items()}

    return build


def double(state: State) -> State:
    """The state in double precision; counters stay whole numbers."""
    doubled: State = pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, state)
    return doubled


@pytest.fixture
def train(problem: Problem) -> Callable[..., tuple[list[float], State]]:
    """Train one run on given minibatches: the losses and the final state."""

    def run(
        name: str,
        batches: Sequence[EnvBatch],
        hparams: dict[str, Tensor],
        problem: Problem = problem,
        seed: int = 5,
    ) -> tuple[list[float], State]:
        algorithm = ALGORITHMS[name].build(problem)
        state = double(algorithm.init(seed))
        losses = []
        for step, batch in enumerate(batches):
            state, metrics = algorithm.step(state, batch, hparams, random.fold(random.key_of(seed), step))
            losses.append(metrics["loss"].item())
        return losses, state

    return run


@pytest.fixture
def assert_minimizes(
    problem: Problem, batches: list[EnvBatch], train: Callable[..., tuple[list[float], State]]
) -> Callable[..., None]:
    """Assert that an algorithm trains as PyTorch's modules, autograd and Adam do on a naive objective.

    The objective gets a model with a "featurizer" and a "classifier", a list of (x, y), and the step. Adam starts
    afresh at the steps `reset_at`, with the learning rate `later_lr` if it is given. Other minibatches than the
    fixture's may be `fed`, of any number of environments.
    """

    def check(
        name: str,
        hparams: dict[str, Tensor],
        naive: NaiveObjective,
        reset_at: int | Sequence[int] = (),
        later_lr: float | None = None,
        fed: Sequence[EnvBatch] = batches,
    ) -> None:
        resets = [reset_at] if isinstance(reset_at, int) else reset_at
        of_fed = replace(problem, n_envs=fed[0].n_envs)
        losses, state = train(name, fed, hparams, problem=of_fed)
        model = nn.ModuleDict({"featurizer": featurizer(), "classifier": nn.Linear(WIDTH, N_CLASSES)}).double()
        vector_to_parameters(ALGORITHMS[name].build(of_fed).init(5)["params"].double(), model.parameters())
        lr, weight_decay = hparams["lr"].item(), hparams["weight_decay"].item()
        for step, batch in enumerate(fed):
            if step in (0, *resets):
                lr = lr if later_lr is None or step not in resets else later_lr
                optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
            loss = naive(model, list(zip(batch.x, batch.y, strict=True)), step)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            assert losses[step] == pytest.approx(loss.item(), rel=1e-9), f"loss at step {step}"
        expected = parameters_to_vector(model.parameters()).detach()
        torch.testing.assert_close(state["params"], expected, rtol=1e-7, atol=1e-9)

    return check
