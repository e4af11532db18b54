"""What every registered algorithm must keep, the example of a user's own included."""

import runpy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import vmap
from torch.multiprocessing.spawn import start_processes
from torch.utils import _pytree as pytree

from sandmask.algorithms import ALGORITHMS, Algorithm, AlgorithmEntry, Problem, State
from sandmask.functional import AcrossRuns, Autograd, Differentiator, EnvBatch, Functional, make_batch, random
from sandmask.functional.across_processes import AcrossProcesses
from sandmask.functional.ranks import Ranks
from sandmask.hparams import SCOPES, SPACES, resolve, space_for
from sandmask.networks import MLP, Featurizer, MNISTConvNet
from sandmask.training.processes import leave_group

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "my_method.py"
SHAPE_HPARAMS = ("batch_size", "mlp_width", "mlp_depth")
N_RUNS, N_ENVS, N_EXAMPLES, N_STEPS = 3, 3, 6, 4

# In float64 rounding is far below this: what differs by more differs in the algorithm. (A gradient that is
# zero but for rounding, some 1e-17, is divided by Adam's epsilon of 1e-8.)
RTOL, ATOL = 1e-6, 1e-9

Hparams = dict[str, Tensor]
Input = tuple[int, ...]
VECTOR, IMAGE = (5,), (2, 8, 8)


def registered() -> dict[str, AlgorithmEntry]:
    """Every algorithm, and that of the example plugin, which does not stay in the registry."""
    own = ALGORITHMS._entries
    ALGORITHMS._entries = {key: entry for key, entry in own.items() if key != "softand"}
    runpy.run_path(str(EXAMPLE))
    entries = {entry.name: entry for entry in ALGORITHMS.values()}
    ALGORITHMS._entries = own
    return entries


ENTRIES = registered()
# A mask, a rule on whole gradients and sharpness; objectives with random numbers, a schedule, and state of their own.
COMPOSED = ("SANDMask+Mixup", "PCGrad+IRM", "SAM+ANDMask-temporal+GroupDRO", "SAGM+MTL")
ENTRIES |= {name: ALGORITHMS[name] for name in COMPOSED}
every_algorithm = pytest.mark.parametrize("name", list(ENTRIES))
# One with a single objective, a mask, and each kind that has several networks or takes several steps.
on_images = pytest.mark.parametrize("name", ["ERM", "SANDMask", "ARM", "CDANN", "Fish", "MLDG", "SagNet"])


def build(
    name: str,
    shape: Input = VECTOR,
    differentiate: Differentiator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Algorithm:
    def featurizer(extra_channels: int = 0) -> Featurizer:
        if len(shape) == 3:
            return MNISTConvNet(shape[0] + extra_channels)
        return MLP(shape[0] + extra_channels, width=8, depth=3, n_outputs=7)

    return ENTRIES[name].build(
        Problem(
            featurizer=featurizer,
            n_envs=N_ENVS,
            n_classes=2,
            input_shape=shape,
            sizes={"mlp_width": 8, "mlp_depth": 3},
            dtype=dtype,
            differentiate=differentiate or Functional(),
        )
    )


def hparams_of(name: str, run: int, **values: float) -> Hparams:
    """Run's draw of the algorithm's space, but that everything happens within a few steps."""
    space = space_for("tabular", "Spirals", name, ENTRIES[name].hparams)
    early = {row: float(1 + run) for row in space if row.endswith(("iters", "linear_steps"))}
    alternating = {"d_steps_per_g_step": float(1 + run % 2)} if "d_steps_per_g_step" in space else {}
    dropout = {row: (0.0, 0.1, 0.5)[run] for row in ("dropout", "mlp_dropout") if row in space}
    drawn = {**resolve(space, hparams_seed=1 + run), **early, **alternating, **dropout, **values}
    return {row: torch.tensor(value, dtype=torch.float64) for row, value in drawn.items() if row not in SHAPE_HPARAMS}


def batches_of(run: int, shape: Input = VECTOR, n_steps: int = N_STEPS) -> list[EnvBatch]:
    generator = torch.Generator().manual_seed(run)
    made = []
    for step in range(n_steps):
        x = torch.randn(N_ENVS, N_EXAMPLES, *shape, generator=generator, dtype=torch.float64)
        x = x + torch.tensor([-0.5, 0.0, 0.5]).view(-1, *[1] * (x.dim() - 1))
        y = torch.randint(2, (N_ENVS, N_EXAMPLES), generator=generator)
        weight = torch.ones(y.shape, dtype=torch.float64)
        made.append(make_batch(x, y, random.fold(random.key_of(run), step), weight))
    return made


def initial_state(algorithm: Algorithm, seed: int) -> State:
    """In float64."""
    state: State = pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, algorithm.init(seed))
    return state


def train(algorithm: Algorithm, batches: list[EnvBatch], hparams: Hparams, seed: int = 0) -> tuple[State, Tensor]:
    """The final state, and the losses [steps]."""
    state, losses = initial_state(algorithm, seed), []
    for batch in batches:
        key = random.fold(random.key_of(100 + seed), state["step"])
        state, metrics = algorithm.step(state, batch, hparams, key)
        losses.append(metrics["loss"])
    return state, torch.stack(losses)


def stack(trees: list[Any]) -> Any:
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def assert_close_trees(one: Any, other: Any) -> None:
    assert pytree.tree_structure(one) == pytree.tree_structure(other)
    for (path, leaf), same in zip(pytree.tree_leaves_with_path(one), pytree.tree_leaves(other), strict=True):
        where = pytree.keystr(path)
        torch.testing.assert_close(leaf, same, rtol=RTOL, atol=ATOL, msg=f"{where} differs: {leaf} {same}")


def assert_stack_equals_runs_alone(name: str, shape: Input, n_runs: int, n_steps: int) -> None:
    algorithm = build(name, shape)
    runs = [(batches_of(run, shape, n_steps), hparams_of(name, run)) for run in range(n_runs)]
    alone = [train(algorithm, *runs[run], seed=run) for run in range(n_runs)]

    hparams = stack([hparams for _, hparams in runs])
    keys = torch.stack([random.key_of(100 + run) for run in range(n_runs)])
    for way in (Functional(), AcrossRuns()):
        algorithm = build(name, shape, way)
        state, losses = stack([initial_state(algorithm, run) for run in range(n_runs)]), []
        for step in range(n_steps):
            batch = stack([batches[step] for batches, _ in runs])
            state, metrics = vmap(algorithm.step)(state, batch, hparams, random.fold(keys, state["step"]))
            losses.append(metrics["loss"])
        assert_close_trees(state, stack([state for state, _ in alone]))
        assert_close_trees(torch.stack(losses, 1), torch.stack([losses for _, losses in alone]))

    x = torch.stack([batches[0].x[0] for batches, _ in runs])
    logits = torch.stack([algorithm.predict(alone[run][0], x[run]) for run in range(n_runs)])
    assert_close_trees(vmap(algorithm.predict)(state, x), logits)


@every_algorithm
def test_a_stack_of_runs_equals_the_runs_alone(name: str) -> None:
    assert_stack_equals_runs_alone(name, VECTOR, N_RUNS, N_STEPS)


@on_images
def test_a_stack_of_runs_equals_the_runs_alone_on_images(name: str) -> None:
    assert_stack_equals_runs_alone(name, IMAGE, n_runs=2, n_steps=2)


@every_algorithm
def test_both_differentiators_give_the_same_numbers(name: str) -> None:
    for run in range(N_RUNS):
        batches, hparams = batches_of(run), hparams_of(name, run)
        one, other = (train(build(name, VECTOR, way), batches, hparams) for way in (Functional(), Autograd()))
        assert_close_trees(one, other)


@on_images
def test_both_differentiators_give_the_same_numbers_on_images(name: str) -> None:
    batches, hparams = batches_of(1, IMAGE, 2), hparams_of(name, 1)
    one, other = (train(build(name, IMAGE, way), batches, hparams) for way in (Functional(), Autograd()))
    assert_close_trees(one, other)


def only_read(batch: EnvBatch, algorithm: Algorithm, ranks: Ranks) -> EnvBatch:
    """The batch with NaN instead of the inputs that this process does not read."""
    rows = ranks.rows(algorithm.reads, N_ENVS, N_EXAMPLES)
    if rows is None:
        return batch
    x = torch.full_like(batch.inputs, torch.nan)
    x[rows] = batch.inputs[rows]
    return batch._replace(x=batch.split(x))


def divided(rank: int, folder: str) -> None:
    """Two processes train every algorithm that they can divide, and the first compares with training alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        names = [name for name in ENTRIES if build(name).divides]
        assert set(ENTRIES) - set(names) == {"IGA"}
        for name in names:
            batches, hparams = batches_of(1), hparams_of(name, 1)
            algorithm = build(name, VECTOR, AcrossProcesses(Ranks(rank, 2), Autograd()))
            found = train(algorithm, [only_read(batch, algorithm, Ranks(rank, 2)) for batch in batches], hparams)
            if rank == 0:
                assert_close_trees(found, train(build(name, VECTOR, Autograd()), batches, hparams))
    except Exception as error:
        raise AssertionError(f"{name} differs") from error
    finally:
        leave_group()


def test_two_processes_give_the_same_numbers(tmp_path: Path) -> None:
    start_processes(divided, args=(str(tmp_path),), nprocs=2, start_method="forkserver")  # type: ignore[no-untyped-call]


def padded(batch: EnvBatch, n: int) -> EnvBatch:
    """The batch with `n` more rows an environment, of weight 0, and of contents that would be noticed."""
    x = 30 + 9 * torch.randn(N_ENVS, n, *batch.x.shape[2:], dtype=batch.x.dtype)
    return EnvBatch(
        torch.cat([batch.x, x], 1),
        torch.cat([batch.y, torch.ones(N_ENVS, n, dtype=torch.int64)], 1),
        torch.cat([batch.weight, torch.zeros(N_ENVS, n)], 1),
        torch.cat([batch.example_keys, torch.arange(n).expand(N_ENVS, n)], 1),
    )


@every_algorithm
def test_padding_changes_nothing(name: str) -> None:
    algorithm = build(name)
    for run in range(N_RUNS):
        batches, hparams = batches_of(run), hparams_of(name, run)
        wide = [padded(batch, 3) for batch in batches]
        assert_close_trees(train(algorithm, batches, hparams), train(algorithm, wide, hparams))


@every_algorithm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_state_keeps_its_form_and_a_step_is_a_function(name: str, dtype: torch.dtype) -> None:
    algorithm = build(name, dtype=dtype)
    batch = EnvBatch(*(t.float() if t.is_floating_point() else t for t in batches_of(0)[0]))
    hparams = {row: value.float() for row, value in hparams_of(name, 1).items()}
    before = algorithm.init(3)
    kept = pytree.tree_map(torch.clone, before)
    after, metrics = algorithm.step(before, batch, hparams, random.key_of(1))
    again, _ = algorithm.step(before, batch, hparams, random.key_of(1))

    assert pytree.tree_structure(after) == pytree.tree_structure(before)
    for old, new, same, copy in zip(*map(pytree.tree_leaves, (before, after, again, kept)), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        assert not new.requires_grad
        assert new.isfinite().all()
        assert torch.equal(new, same), "two calls with the same arguments differ"
        assert torch.equal(old, copy), "the step changed its argument"
    assert after["step"].item() == before["step"].item() + 1
    assert all(metric.shape == () and metric.isfinite() for metric in metrics.values())
    assert metrics["loss"] > 0


@every_algorithm
def test_a_step_stays_on_the_device_of_its_arguments(name: str) -> None:
    """On tensors without contents, which any operation with a tensor of another device refuses."""
    algorithm = build(name)
    arguments = (algorithm.init(0), batches_of(0)[0], hparams_of(name, 0), random.key_of(0))
    with FakeTensorMode():
        state, batch, hparams, key = (
            pytree.tree_map(lambda t: torch.empty(t.shape, dtype=_single(t.dtype), device="meta"), tree)
            for tree in arguments
        )
        state, metrics = algorithm.step(state, batch, hparams, key)
        logits = algorithm.predict(state, batch.x[0])
    assert {t.device.type for t in pytree.tree_leaves((state, metrics, logits))} == {"meta"}


def _single(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype


@every_algorithm
def test_seeds_decide_the_initial_state(name: str) -> None:
    algorithm = build(name)
    assert_close_trees(algorithm.init(1), algorithm.init(1))
    for part in ("params", "discriminator", "style", "context"):
        if part in (state := algorithm.init(1)):
            assert not torch.equal(state[part], algorithm.init(2)[part])


# Where the defaults are for another problem, or train nothing (tau = 1 in SAND-mask).
SOLVING: dict[str, dict[str, float]] = {
    "ANDMask": {"tau": 0.5},
    "ANDMask-rescaled": {"tau": 0.5},
    "SANDMask": {"tau": 0.5},
    "SANDMask-rescaled": {"tau": 0.5},
    "SANDMask-released": {"tau": 0.5},
    "IGA": {"penalty": 1.0},
    "MMD": {"mmd_gamma": 0.1},
    "CausIRL_MMD": {"mmd_gamma": 0.1},
    "ERMPlusPlus": {"linear_steps": 10},
    "ADRMX": {"d_steps_per_g_step": 1},
    "ANDMask-temporal": {"tau": 0.5},
    "GENIE": {"convergence_rate": 0.3},
    "GENIE-environments": {"convergence_rate": 0.3},
    "SANDMask+Mixup": {"tau": 0.5},
    "SAM+ANDMask-temporal+GroupDRO": {"tau": 0.5},
}


def gaussians(seed: int, n_examples: int) -> EnvBatch:
    """Two classes, far apart along a direction that environments share; another direction is theirs."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (N_ENVS, n_examples), generator=generator)
    x = torch.randn(N_ENVS, n_examples, *VECTOR, generator=generator)
    x[..., 0] += 5.0 * y - 2.5
    x[..., 1] += torch.tensor([-1.0, 0.0, 1.0]).unsqueeze(1)
    return make_batch(x, y, random.key_of(seed))


@every_algorithm
def test_solves_separable_gaussians(name: str) -> None:
    algorithm = build(name)
    space = space_for("tabular", "Spirals", name, ENTRIES[name].hparams)
    values = resolve(space, overrides=SOLVING.get(name, {}))
    hparams = {row: torch.tensor(float(v)) for row, v in values.items() if row not in SHAPE_HPARAMS}
    state = algorithm.init(0)
    test, step, accuracy = gaussians(1000, 200), 0, 0.0
    while step < 80 and accuracy <= 0.95:
        for _ in range(16):
            state, metrics = algorithm.step(state, gaussians(step, 32), hparams, random.key_of(step))
            step += 1
        right = torch.stack([algorithm.predict(state, x).argmax(-1) for x in test.x]) == test.y
        accuracy = right.double().mean().item()
    assert metrics["loss"].isfinite()
    assert accuracy > 0.95


@every_algorithm
def test_hyperparameters_resolve_in_every_scope(name: str) -> None:
    for scope, space_name in product(SCOPES, SPACES):
        space = space_for(scope, "PACS", name, ENTRIES[name].hparams, space_name)
        assert {"lr", "batch_size", "weight_decay", "dropout"} <= set(space)
        assert set(resolve(space)) == set(space)
        for seed in range(1, 6):
            for row, value in resolve(space, hparams_seed=seed).items():
                assert space[row].parse(value) == value, f"{scope}, {space_name}: drawn from outside the bounds"


@every_algorithm
def test_entries_say_what_they_are(name: str) -> None:
    entry = ENTRIES[name]
    assert entry.summary
    assert not entry.summary.endswith(".")
    assert entry.paper
    assert type(build(name)).__doc__
