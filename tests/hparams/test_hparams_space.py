import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import sandmask.hparams
from sandmask.algorithms import ALGORITHMS
from sandmask.datasets import DATASETS, load_dataset
from sandmask.errors import SandmaskError
from sandmask.hparams import (
    COUNT,
    OPTIONAL,
    SHARED,
    Choice,
    Constant,
    Hparam,
    IntLogUniform,
    Like,
    LogUniform,
    Space,
    Uniform,
    parse_overrides,
    resolve,
    seed_hash,
    space_for,
)
from sandmask.training import make_spec, train_stack
from sandmask.training.averaging import SWAD_RATIO

AND = (Hparam("tau", 1.0, Uniform(0, 1)), Hparam("tau", 1.0, Uniform(0.5, 1), space="domainbed"))
SAND = (Hparam("tau", 1.0, Uniform(0, 1)), Hparam("k", 10.0, LogUniform(10, -3, 5), space="domainbed"))
ARM = (Hparam("batch_size", 8, Constant(8), COUNT, scope="image"),)
DANN = (
    Hparam("lambda", 1.0, LogUniform(10, -2, 2)),
    Hparam("d_steps_per_g_step", 1, IntLogUniform(2, 0, 3), COUNT),
    Hparam("beta1", 0.5, Choice(0.0, 0.5)),
    Hparam("mlp_width", 256, IntLogUniform(2, 6, 10), COUNT),
    Like("lr_g", "lr"),
    Like("lr_d", "lr"),
    Like("weight_decay_g", "weight_decay"),
)
Draw = Callable[[np.random.RandomState], float]


def naive_seed(*args: object) -> int:
    return int(hashlib.md5(str(args).encode("utf-8")).hexdigest(), 16) % (2**31)


def naive(hparams_seed: int, trial_seed: int, draws: dict[str, tuple[str, Draw]]) -> dict[str, float]:
    """The draws, written down plainly: public name -> (name of the stream, NumPy call)."""
    seed = naive_seed(hparams_seed, trial_seed)
    return {name: draw(np.random.RandomState(naive_seed(seed, s))) for name, (s, draw) in draws.items()}


PACS: dict[str, tuple[str, Draw]] = {
    "lr": ("lr", lambda r: 10 ** r.uniform(-5, -3.5)),
    "batch_size": ("batch_size", lambda r: int(2 ** r.uniform(3, 5.5))),
    "weight_decay": ("weight_decay", lambda r: 10 ** r.uniform(-6, -2)),
    "dropout": ("resnet_dropout", lambda r: r.choice([0.0, 0.1, 0.5])),
}
COLORED: dict[str, tuple[str, Draw]] = {
    "lr": ("lr", lambda r: 10 ** r.uniform(-4.5, -3.5)),
    "batch_size": ("batch_size", lambda r: int(2 ** r.uniform(3, 9))),
    "weight_decay": ("weight_decay", lambda r: 0.0),
    "dropout": ("resnet_dropout", lambda r: r.choice([0.0, 0.1, 0.5])),
}
SPIRALS: dict[str, tuple[str, Draw]] = {
    "lr": ("lr", lambda r: 10 ** r.uniform(-3.5, -1.5)),
    "batch_size": ("batch_size", lambda r: int(2 ** r.uniform(3, 9))),
    "weight_decay": ("weight_decay", lambda r: 10 ** r.uniform(-6, -2)),
    "mlp_width": ("mlp_width", lambda r: int(2 ** r.uniform(6, 10))),
    "mlp_depth": ("mlp_depth", lambda r: int(r.choice([3, 4, 5]))),
    "dropout": ("mlp_dropout", lambda r: r.choice([0.0, 0.1, 0.5])),
}
TAU: dict[str, tuple[str, Draw]] = {"tau": ("tau", lambda r: r.uniform(0, 1))}
K: dict[str, tuple[str, Draw]] = {"k": ("k", lambda r: 10 ** r.uniform(-3, 5))}
BED_LR: dict[str, tuple[str, Draw]] = {"lr": ("lr", lambda r: 10 ** r.uniform(-4.5, -2.5))}
HALF_TAU: dict[str, tuple[str, Draw]] = {"tau": ("tau", lambda r: r.uniform(0.5, 1))}
DANN_PACS: dict[str, tuple[str, Draw]] = {
    "lambda": ("lambda", lambda r: 10 ** r.uniform(-2, 2)),
    "d_steps_per_g_step": ("d_steps_per_g_step", lambda r: int(2 ** r.uniform(0, 3))),
    "beta1": ("beta1", lambda r: r.choice([0.0, 0.5])),
    "mlp_width": ("mlp_width", lambda r: int(2 ** r.uniform(6, 10))),
    "lr_g": ("lr_g", lambda r: 10 ** r.uniform(-5, -3.5)),
    "lr_d": ("lr_d", lambda r: 10 ** r.uniform(-5, -3.5)),
    "weight_decay_g": ("weight_decay_g", lambda r: 10 ** r.uniform(-6, -2)),
}
CASES = {
    "ERM on PACS": (space_for("image", "PACS", "ERM", (), "paper"), PACS),
    "SAND on ColoredMNIST": (space_for("small-image", "ColoredMNIST", "SANDMask", SAND, "paper"), COLORED | TAU),
    "SAND on ColoredMNIST, DomainBed": (
        space_for("small-image", "ColoredMNIST", "SANDMask", SAND, "domainbed"),
        COLORED | BED_LR | TAU | K,
    ),
    "AND on Spirals": (space_for("tabular", "Spirals", "ANDMask", AND, "paper"), SPIRALS | TAU),
    "AND on Spirals, DomainBed": (
        space_for("tabular", "Spirals", "ANDMask", AND, "domainbed"),
        SPIRALS | HALF_TAU,
    ),
    "DANN on PACS": (space_for("image", "PACS", "DANN", DANN, "paper"), PACS | DANN_PACS),
}


@pytest.mark.parametrize("case", CASES)
def test_draws_equal_a_naive_twin_to_the_bit(case: str) -> None:
    space, draws = CASES[case]
    for hparams_seed, trial_seed in itertools.product((1, 2, 19), (0, 1, 2)):
        drawn = resolve(space, hparams_seed, trial_seed)
        assert drawn == naive(hparams_seed, trial_seed, draws)
        assert list(drawn) == list(space)
        assert all(type(drawn[name]) is (int if space[name].integer else float) for name in space)


@pytest.mark.parametrize(
    ("trial_seed", "published"),
    [
        (0, {"batch_size": 39, "lr": 2.7028930742148706e-05, "weight_decay": 0.00044832883881609976}),
        (1, {"batch_size": 8, "lr": 2.2352558725944602e-05, "weight_decay": 1.9967320578799288e-06}),
    ],
)
def test_draws_equal_those_in_domainbeds_published_logs(trial_seed: int, published: dict[str, float]) -> None:
    """Hyperparameters as recorded by DomainBed's own test sweep: ERM on VLCS, hparams_seed 1."""
    assert resolve(space_for("image", "VLCS", "ERM", (), "paper"), 1, trial_seed) == {**published, "dropout": 0.5}


def test_seed_hash_equals_the_seeds_in_domainbeds_published_logs() -> None:
    assert seed_hash("VLCS", "ERM", [1, 2], 1, 0) == 360234358
    assert seed_hash("VLCS", "ERM", [0], 0, 0) == 1721972278
    assert seed_hash(np.int64(3), np.float64(0.5)) == seed_hash(3, 0.5)


def test_hparams_seed_zero_means_the_defaults_for_every_trial() -> None:
    expected = {"lr": 1e-3, "batch_size": 64, "weight_decay": 0.0, "dropout": 0.0, "tau": 1.0}
    space = space_for("small-image", "RotatedMNIST", "ANDMask", AND, "paper")
    assert [resolve(space, 0, trial) for trial in range(3)] == [expected] * 3
    spirals = resolve(space_for("tabular", "Spirals", "ERM", (), "paper"))
    assert spirals == {
        "lr": 0.01, "batch_size": 512, "weight_decay": 1e-3, "mlp_width": 256, "mlp_depth": 3, "dropout": 0.0
    }  # fmt: skip
    images = resolve(space_for("image", "PACS", "ERM", (), "paper"))
    assert images == {"lr": 5e-5, "batch_size": 32, "weight_decay": 0.0, "dropout": 0.0}


def test_the_registered_masks_have_the_papers_ranges() -> None:
    for name in ("ANDMask", "SANDMask", "GeometricMean", "SANDMask-released"):
        space = space_for("image", "PACS", name, ALGORITHMS[name].hparams, "paper")
        assert (space["tau"].default, str(space["tau"].draw)) == (1.0, "U(0, 1)")
        assert ("k" in space) == (name == "SANDMask-released")
    assert (space["k"].default, str(space["k"].draw)) == (10.0, "10^U(-3, 5)")


def test_every_name_has_a_stream_of_its_own() -> None:
    """Two hyperparameters with one distribution must not move together."""
    space = Space("two", (Hparam("a", 0.5, Uniform(0, 1)), Hparam("b", 0.5, Uniform(0, 1))))
    draws = np.array([list(space.draw(seed).values()) for seed in range(2000)])
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.1
    assert len(np.unique(draws)) == draws.size
    alone = Space("one", (space["b"],))
    assert [alone.draw(seed)["b"] for seed in range(20)] == [space.draw(seed)["b"] for seed in range(20)]


def test_trials_and_seeds_give_different_draws() -> None:
    space = space_for("image", "PACS", "ERM", (), "paper")
    assert len({resolve(space, h, t)["lr"] for h in range(1, 21) for t in range(3)}) == 60


def test_the_last_row_that_holds_counts() -> None:
    assert str(space_for("small-image", "ColoredMNIST", "ERM", (), "paper")["lr"].draw) == "10^U(-4.5, -3.5)"
    assert str(space_for("small-image", "ColoredMNIST", "ERM", (), "domainbed")["lr"].draw) == "10^U(-4.5, -2.5)"
    assert str(space_for("image", "PACS", "ERM", (), "paper")["batch_size"].draw) == "int 2^U(3, 5.5)"
    assert str(space_for("image", "DomainNet", "ERM", (), "paper")["batch_size"].draw) == "int 2^U(3, 5)"
    assert "k" not in space_for("image", "PACS", "SANDMask", SAND, "paper")
    assert "k" in space_for("image", "PACS", "SANDMask", SAND, "domainbed")


@pytest.mark.parametrize("dataset", ["PACS", "DomainNet"])
def test_an_algorithms_row_replaces_the_datasets(dataset: str) -> None:
    for seed in (0, 5):
        assert resolve(space_for("image", dataset, "ARM", ARM, "paper"), seed)["batch_size"] == 8
    assert resolve(space_for("small-image", "ColoredMNIST", "ARM", ARM, "paper"))["batch_size"] == 64
    own = [Hparam("ema_decay", 2, Constant(2), COUNT)]  # an option of every run, which is below 1 elsewhere
    assert resolve(space_for("image", dataset, "X", own, "paper"), overrides={"ema_decay": 3})["ema_decay"] == 3


def test_options_at_their_defaults_have_no_effect(tmp_path: Path) -> None:
    """The optimizer, the averages and the split have defaults of their own, which must be those of the table."""
    data, size = load_dataset("DebugVector"), {"mlp_width": 8, "batch_size": 8}
    options = {row.name: row.default for row in OPTIONAL if row.name not in ("last_blocks", "attention_only")}
    plain, explicit = (
        make_spec(
            DATASETS["DebugVector"],
            "ERM",
            [0],
            steps=111,
            hparams=hparams,
            space="paper",
            averages=["sma", "ema", "swad"],
        )
        for hparams in (size, {**size, **options})
    )
    assert set(explicit.hparams) - set(plain.hparams) == set(options)
    assert options["swad_ratio"] == SWAD_RATIO  # too few steps here for it to matter
    (one,), (other,) = (
        train_stack([spec], data, torch.device("cpu"), tmp_path / f"{spec.id}.safetensors")
        for spec in (plain, explicit)
    )
    np.testing.assert_array_equal(one.accuracy_out, other.accuracy_out)
    for name, curve in one.metrics.items():
        np.testing.assert_array_equal(curve, other.metrics[name], err_msg=name)


def test_like_takes_over_everything_but_the_stream() -> None:
    for scope, dataset in (("small-image", "ColoredMNIST"), ("image", "PACS"), ("tabular", "Spirals")):
        space = space_for(scope, dataset, "DANN", DANN, "paper")
        assert (space["lr_g"].default, space["lr_g"].draw) == (space["lr"].default, space["lr"].draw)
        assert len({resolve(space, 1)[name] for name in ("lr", "lr_g", "lr_d")}) == 3
    twice = space_for("image", "PACS", "X", [Hparam("a", 0.5, Uniform(0, 1), stream="s"), Like("b", "a")], "paper")
    assert len(set(map(resolve(twice, 1).get, "ab"))) == 2
    with pytest.raises(SandmaskError, match=r"'lr_g' refers to 'learn'.*Choose from: lr, batch_size"):
        space_for("image", "PACS", "DANN", [Like("lr_g", "learn")], "paper")


def test_a_space_prints_as_a_table() -> None:
    assert str(space_for("image", "PACS", "ANDMask", AND, "paper")).splitlines() == [
        "ANDMask on PACS, space 'paper'",
        "  lr            5e-05     10^U(-5, -3.5)",
        "  batch_size    32        int 2^U(3, 5.5)",
        "  weight_decay  0         10^U(-6, -2)",
        "  dropout       0         {0, 0.1, 0.5}",
        "  tau           1         U(0, 1)",
    ]


def test_a_space_is_a_mapping() -> None:
    space = space_for("image", "PACS", "ERM", (), "paper")
    assert list(space) == ["lr", "batch_size", "weight_decay", "dropout"]
    assert len(space) == 4
    with pytest.raises(KeyError):
        space["tau"]


def test_overrides_are_taken_as_text_or_number_and_come_out_plain() -> None:
    space = space_for("image", "PACS", "ANDMask", AND, "paper")
    values = resolve(space, 3, 1, {"lr": "1e-3", "batch_size": "16", "tau": 1, "dropout": np.float64(0.25)})
    assert (values["lr"], values["batch_size"], values["tau"], values["dropout"]) == (1e-3, 16, 1.0, 0.25)
    assert [type(values[name]) for name in ("lr", "batch_size", "tau", "dropout")] == [
        float,
        int,
        float,
        float,
    ]
    assert values["weight_decay"] == resolve(space, 3, 1)["weight_decay"]
    assert resolve(space, overrides={"batch_size": 16.0})["batch_size"] == 16
    assert resolve(space, overrides={"batch_size": np.int64(16)})["batch_size"] == 16  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"batchsize": 8}, r"Unknown hyperparameter 'batchsize' of ERM on PACS.*Did you mean 'batch_size'\?"),
        ({"batch_size": "8.5"}, r"'batch_size' should be a whole number\. Found '8\.5'"),
        ({"batch_size": "0"}, r"'batch_size' should be at least 1\. Found '0'"),
        ({"batch_size": "inf"}, r"'batch_size' should be a whole number\. Found 'inf'"),
        ({"lr": "fast"}, r"'lr' should be a finite number\. Found 'fast'"),
        ({"lr": "nan"}, r"'lr' should be a finite number\. Found 'nan'"),
        ({"lr": True}, r"'lr' should be a finite number\. Found True"),
        ({"lr": None}, r"'lr' should be a finite number\. Found None"),
        ({"dropout": 1}, r"'dropout' should be in \[0, 1\)\. Found 1"),
        ({"lr": -1, "dropout": 2}, r"'lr' should be at least 0.*'dropout' should be in"),
    ],
)
def test_a_wrong_override_is_named_with_the_remedy(overrides: dict[str, float], message: str) -> None:
    with pytest.raises(SandmaskError, match=message):
        resolve(space_for("image", "PACS", "ERM", (), "paper"), overrides=overrides)


def test_more_layers_than_memory_holds_are_refused() -> None:
    with pytest.raises(SandmaskError, match=r"'mlp_depth' should be in \[1, 1000\]\. Found 1000000000"):
        resolve(space_for("tabular", "Spirals", "ERM", (), "paper"), overrides={"mlp_depth": 10**9})


def test_overrides_are_read_from_the_command_line() -> None:
    assert parse_overrides(["lr=1e-3", " tau = 0.5 "]) == {"lr": "1e-3", "tau": "0.5"}
    for item in ("lr", "lr=", "=3", ""):
        with pytest.raises(SandmaskError, match="should look like name=value"):
            parse_overrides([item])
    with pytest.raises(SandmaskError, match="--hparam lr is given twice: 1 and 2"):
        parse_overrides(["lr=1", "lr=2"])


@pytest.mark.parametrize("seeds", [(-1, 0), (1, -1)])
def test_negative_seeds_are_refused(seeds: tuple[int, int]) -> None:
    with pytest.raises(SandmaskError, match=r"_seed should be 0 or more\. Found -1"):
        resolve(space_for("image", "PACS", "ERM", (), "paper"), *seeds)


def test_unknown_spaces_and_scopes_are_named() -> None:
    with pytest.raises(SandmaskError, match=r"Unknown hyperparameter space 'papers'\. Did you mean 'paper'"):
        space_for("image", "PACS", "ERM", (), "papers")
    with pytest.raises(SandmaskError, match=r"MySet: unknown scope 'images'\. Did you mean 'image'"):
        space_for("images", "MySet", "ERM", (), "paper")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hparam("tau", 1, Uniform(0, 1)), "should both be int or both be float"),
        (lambda: Hparam("n", 1.0, Choice(1, 2)), "should both be int or both be float"),
        (lambda: Hparam("my tau", 1.0, Uniform(0, 1)), "'my tau' should be one word"),
        (lambda: Hparam("n", 0, Choice(1, 2), COUNT), "'n' should be at least 1. Found 0"),
        (lambda: Hparam("t", 1.0, Uniform(0, 1), scope="x"), "unknown scope 'x'"),  # type: ignore[arg-type]
        (lambda: Hparam("t", 1.0, Uniform(0, 1), space="x"), "unknown space 'x'"),  # type: ignore[arg-type]
    ],
)
def test_a_row_that_makes_no_sense_is_refused(make: Callable[[], Hparam], message: str) -> None:
    with pytest.raises(SandmaskError, match=message):
        make()


def test_shared_rows_hold_for_every_scope() -> None:
    assert {row.scope for row in SHARED} == {None, "small-image", "image", "tabular"}
    for scope in ("small-image", "image", "tabular"):
        assert {"lr", "batch_size", "weight_decay", "dropout"} <= set(space_for(scope, "X", "ERM", (), "paper"))


def test_public_names_resolve() -> None:
    assert all(hasattr(sandmask.hparams, name) for name in sandmask.hparams.__all__)


def test_former_names_of_scopes_still_work() -> None:
    assert Hparam("x", 1.0, Constant(1.0), scope="spirals").scope == "tabular"  # type: ignore[arg-type]
    for former, scope in (("spirals", "tabular"), ("mnist", "small-image")):
        assert space_for(former, "Mine", "ERM", ()) == space_for(scope, "Mine", "ERM", ())
