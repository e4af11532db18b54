"""The hyperparameters of DomainBed's methods: defaults and draws, to the bit, beside plain NumPy calls."""

import hashlib
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from sandmask.algorithms import ALGORITHMS
from sandmask.hparams import resolve, space_for

Draw = Callable[[np.random.RandomState], float]
Rows = dict[str, tuple[float, Draw]]

BOTTLENECK: Rows = {
    "ib_lambda": (1e2, lambda r: 10 ** r.uniform(-1, 5)),
    "ib_penalty_anneal_iters": (500, lambda r: int(10 ** r.uniform(0, 4.0))),
}
IRM: Rows = {
    "irm_lambda": (1e2, lambda r: 10 ** r.uniform(-1, 5)),
    "irm_penalty_anneal_iters": (500, lambda r: int(10 ** r.uniform(0, 4.0))),
}
GAMMA: Rows = {"mmd_gamma": (1.0, lambda r: 10 ** r.uniform(-1, 1))}
RDM: Rows = {
    "rdm_lambda": (5.0, lambda r: r.uniform(0.1, 10.0)),
    "rdm_penalty_anneal_iters": (1500, lambda r: int(r.uniform(800, 2700))),
    "variance_weight": (0.004, lambda r: r.uniform(0.001, 0.007)),
    "rdm_lr": (1.5e-5, lambda r: r.uniform(8e-6, 2e-5)),
}
RDM_BATCH: Rows = {"batch_size": (88, lambda r: int(r.uniform(70, 100)))}
SMALL_BATCH: Rows = {"batch_size": (40, lambda r: int(r.uniform(30, 60)))}
NO_VARIANCE: Rows = {"variance_weight": (0.0, lambda r: 0.0)}
HIGHER: Rows = {"rdm_lambda": (5.0, lambda r: r.uniform(1.0, 10.0))}
CAD: Rows = {
    "lmbda": (1e-1, lambda r: r.choice([1e-4, 1e-3, 1e-2, 1e-1, 1, 1e1, 1e2])),
    "temperature": (0.1, lambda r: r.choice([0.05, 0.1])),
    "is_normalized": (0, lambda r: 0),
    "is_flipped": (1, lambda r: 1),
}
URM: Rows = {
    "urm_adv_lambda": (0.1, lambda r: float(r.uniform(0, 0.2))),
    "urm_discriminator_hidden_layers": (1, lambda r: int(r.choice([1, 2, 3]))),
    "urm_generator_output": (0, lambda r: ["tanh", "relu"].index(r.choice(["tanh", "relu"]))),
}
ADRMX: Rows = {
    "cnt_lambda": (1.0, lambda r: 1.0),
    "dclf_lambda": (1.0, lambda r: 1.0),
    "disc_lambda": (0.75, lambda r: 0.75),
    "rmxd_lambda": (1.0, lambda r: 1.0),
    "d_steps_per_g_step": (2, lambda r: 2),
    "beta1": (0.5, lambda r: 0.5),
    "mlp_dropout": (0.0, lambda r: 0.0),
    "mlp_width": (256, lambda r: 256),
    "mlp_depth": (9, lambda r: int(r.choice([8, 9, 10]))),
}
DANN: Rows = {
    "lambda": (1.0, lambda r: 10 ** r.uniform(-2, 2)),
    "weight_decay_d": (0.0, lambda r: 10 ** r.uniform(-6, -2)),
    "d_steps_per_g_step": (1, lambda r: int(2 ** r.uniform(0, 3))),
    "grad_penalty": (0.0, lambda r: 10 ** r.uniform(-2, 1)),
    "beta1": (0.5, lambda r: r.choice([0.0, 0.5])),
    "mlp_width": (256, lambda r: int(2 ** r.uniform(6, 10))),
    "mlp_depth": (3, lambda r: int(r.choice([3, 4, 5]))),
    "mlp_dropout": (0.0, lambda r: r.choice([0.0, 0.1, 0.5])),
}
OF_IMAGES: Rows = {
    "lr_g": (5e-5, lambda r: 10 ** r.uniform(-5, -3.5)),
    "lr_d": (5e-5, lambda r: 10 ** r.uniform(-5, -3.5)),
    "weight_decay_g": (0.0, lambda r: 10 ** r.uniform(-6, -2)),
}
OF_DIGITS: Rows = {
    "lr_g": (1e-3, lambda r: 10 ** r.uniform(-4.5, -2.5)),
    "lr_d": (1e-3, lambda r: 10 ** r.uniform(-4.5, -2.5)),
    "weight_decay_g": (0.0, lambda r: 0.0),
}
CASES: dict[tuple[str, str, str], Rows] = {
    ("ERM", "image", "PACS"): {
        "lr": (5e-5, lambda r: 10 ** r.uniform(-5, -3.5)),
        "weight_decay": (0.0, lambda r: 10 ** r.uniform(-6, -2)),
        "batch_size": (32, lambda r: int(2 ** r.uniform(3, 5.5))),
    },
    ("ERM", "mnist", "RotatedMNIST"): {
        "lr": (1e-3, lambda r: 10 ** r.uniform(-4.5, -2.5)),
        "weight_decay": (0.0, lambda r: 0.0),
        "batch_size": (64, lambda r: int(2 ** r.uniform(3, 9))),
    },
    ("ERM", "image", "DomainNet"): {"batch_size": (32, lambda r: int(2 ** r.uniform(3, 5)))},
    ("ARM", "image", "PACS"): {"batch_size": (8, lambda r: 8)},
    ("IRM", "image", "PACS"): IRM,
    ("VREx", "mnist", "ColoredMNIST"): {
        "vrex_lambda": (1e1, lambda r: 10 ** r.uniform(-1, 5)),
        "vrex_penalty_anneal_iters": (500, lambda r: int(10 ** r.uniform(0, 4))),
    },
    ("GroupDRO", "image", "PACS"): {"groupdro_eta": (1e-2, lambda r: 10 ** r.uniform(-3, -1))},
    ("Mixup", "image", "PACS"): {"mixup_alpha": (0.2, lambda r: 10 ** r.uniform(-1, 1))},
    ("MLDG", "image", "PACS"): {
        "mldg_beta": (1.0, lambda r: 10 ** r.uniform(-1, 1)),
        "n_meta_test": (2, lambda r: r.choice([1, 2])),
    },
    ("CORAL", "image", "PACS"): GAMMA,
    ("MMD", "image", "PACS"): GAMMA,
    ("DANN", "image", "PACS"): DANN | OF_IMAGES,
    ("CDANN", "mnist", "ColoredMNIST"): DANN | OF_DIGITS,
    ("MTL", "image", "PACS"): {"mtl_ema": (0.99, lambda r: r.choice([0.5, 0.9, 0.99, 1.0]))},
    ("SagNet", "image", "PACS"): {"sag_w_adv": (0.1, lambda r: 10 ** r.uniform(-2, 1))},
    ("RSC", "image", "PACS"): {
        "rsc_f_drop_factor": (1 / 3, lambda r: r.uniform(0, 0.5)),
        "rsc_b_drop_factor": (1 / 3, lambda r: r.uniform(0, 0.5)),
    },
    ("SD", "image", "PACS"): {"sd_reg": (0.1, lambda r: 10 ** r.uniform(-5, -1))},
    ("IGA", "image", "PACS"): {"penalty": (1000.0, lambda r: 10 ** r.uniform(1, 5))},
    ("Fish", "image", "PACS"): {"meta_lr": (0.5, lambda r: r.choice([0.05, 0.1, 0.5]))},
    ("ANDMask-rescaled", "image", "PACS"): {"tau": (1.0, lambda r: r.uniform(0.5, 1.0))},
    ("SANDMask-released", "image", "PACS"): {
        "tau": (1.0, lambda r: r.uniform(0.0, 1.0)),
        "k": (10.0, lambda r: 10 ** r.uniform(-3, 5)),
    },
    ("IB_ERM", "image", "PACS"): BOTTLENECK,
    ("IB_IRM", "mnist", "ColoredMNIST"): IRM | BOTTLENECK,
    ("Fishr", "image", "PACS"): {
        "lambda": (1000.0, lambda r: 10 ** r.uniform(1.0, 4.0)),
        "penalty_anneal_iters": (1500, lambda r: int(r.uniform(0.0, 5000.0))),
        "ema": (0.95, lambda r: r.uniform(0.90, 0.99)),
    },
    ("CausIRL_CORAL", "image", "PACS"): GAMMA,
    ("CausIRL_MMD", "image", "PACS"): GAMMA,
    ("EQRM", "image", "PACS"): {
        "eqrm_quantile": (0.75, lambda r: r.uniform(0.5, 0.99)),
        "eqrm_burnin_iters": (2500, lambda r: 10 ** r.uniform(2.5, 3.5)),
        "eqrm_lr": (1e-6, lambda r: 10 ** r.uniform(-7, -5)),
    },
    ("CAD", "image", "PACS"): CAD,
    ("CondCAD", "mnist", "ColoredMNIST"): CAD,
    ("URM", "mnist", "ColoredMNIST"): URM | {"urm_discriminator_lr": (1e-3, lambda r: 10 ** r.uniform(-5.5, -3.5))},
    ("URM", "image", "PACS"): URM | {"urm_discriminator_lr": (5e-5, lambda r: 10 ** r.uniform(-6, -4.5))},
    ("ERMPlusPlus", "image", "PACS"): {
        "linear_lr": (5e-5, lambda r: 10 ** r.uniform(-5, -3.5)),
        "linear_steps": (500, lambda r: 500),
        "sma_start": (598, lambda r: 598),  # of the averages, which DomainBed does not call a hyperparameter
    },
    ("Transfer", "image", "PACS"): {
        "t_lambda": (1.0, lambda r: 10 ** r.uniform(-2, 1)),
        "delta": (2.0, lambda r: r.uniform(0.1, 3.0)),
        "d_steps_per_g": (10, lambda r: int(r.choice([1, 2, 5]))),
        "lr_d": (1e-3, lambda r: 10 ** r.uniform(-4.5, -2.5)),
        "gda": (0, lambda r: 1),
    },
    ("TRM", "image", "PACS"): {
        "cos_lambda": (1e-4, lambda r: 10 ** r.uniform(-5, 0)),
        "iters": (200, lambda r: int(10 ** r.uniform(0, 4))),
        "groupdro_eta": (1e-2, lambda r: 10 ** r.uniform(-3, -1)),
    },
    ("SelfReg", "image", "PACS"): {},
    ("ADRMX", "mnist", "ColoredMNIST"): ADRMX | {"lr": (3e-3, lambda r: r.choice([5e-4, 1e-3, 2e-3, 3e-3]))},
    ("ADRMX", "image", "PACS"): ADRMX | {"lr": (3e-5, lambda r: r.choice([2e-5, 3e-5, 4e-5, 5e-5]))},
    ("RDM", "mnist", "ColoredMNIST"): RDM,
    ("RDM", "image", "VLCS"): RDM | RDM_BATCH,
    ("RDM", "image", "PACS"): RDM | RDM_BATCH | HIGHER,
    ("RDM", "image", "OfficeHome"): RDM | RDM_BATCH | NO_VARIANCE,
    ("RDM", "image", "TerraIncognita"): RDM | SMALL_BATCH | HIGHER | NO_VARIANCE,
    ("RDM", "image", "DomainNet"): RDM | SMALL_BATCH | NO_VARIANCE | {
        "rdm_lambda": (0.5, lambda r: r.uniform(0.1, 1.0)),
        "rdm_penalty_anneal_iters": (2400, lambda r: int(r.uniform(1500, 3000))),
    },
}  # fmt: skip


def seed_of(*args: object) -> int:
    return int(hashlib.md5(str(args).encode("utf-8")).hexdigest(), 16) % (2**31)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_defaults_and_draws_are_domainbeds(case: tuple[str, str, str]) -> None:
    (name, scope, dataset), rows = case, CASES[case]
    space = space_for(scope, dataset, name, ALGORITHMS[name].hparams, "domainbed")
    assert {row: space[row].default for row in rows} == {row: default for row, (default, _) in rows.items()}
    shared = space_for(scope, dataset, "ERM", (), "domainbed")
    assert set(space) == set(shared) | set(rows), "no hyperparameter is missing here"
    for hparams_seed, trial_seed in itertools.product((1, 2, 19), (0, 1)):
        drawn = resolve(space, hparams_seed, trial_seed)
        seed = seed_of(hparams_seed, trial_seed)
        expected = {row: draw(np.random.RandomState(seed_of(seed, row))) for row, (_, draw) in rows.items()}
        assert {row: drawn[row] for row in rows} == expected
