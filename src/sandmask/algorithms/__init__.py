"""Training methods as pure functions of a state, one file per method. `ALGORITHMS` lists them.

An algorithm is built for a `Problem` and has three pure functions:

    algorithm = ALGORITHMS["SANDMask"].build(problem)
    state = algorithm.init(seed)
    state, metrics = algorithm.step(state, batch, hparams, key)
    logits = algorithm.predict(state, x)

`ALGORITHMS["SANDMask+VREx"]` applies a mask to the gradients of an objective (see `Composed`).

In the docstrings of methods, E is the number of environments, B the number of examples of an environment in a
minibatch, R_e the risk (mean cross-entropy) of environment e, g_e the gradient of R_e, and w the parameters. mean_e,
sum_e and var_e are over environments. CE is the cross-entropy.
"""

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry, ObjectiveAlgorithm, Problem
from sandmask.algorithms._composed import Composed
from sandmask.algorithms._functions import (
    Hparams,
    Metrics,
    State,
    adam_update,
    cross_entropy,
    descend,
    environment_risks,
)
from sandmask.algorithms._held_out import HeldOutProbe
from sandmask.algorithms._rules import (
    DIAGNOSTICS,
    LogMaskedAlgorithm,
    MaskedAlgorithm,
    diagnostic_names,
    mask_diagnostics,
)
from sandmask.algorithms.adrmx import ADRMX
from sandmask.algorithms.agr import AgrRandAlgorithm, AgrSumAlgorithm
from sandmask.algorithms.and_mask import ANDMaskAlgorithm, GeometricMeanAlgorithm, TemporalANDMask
from sandmask.algorithms.arith import Arith
from sandmask.algorithms.arm import ARM
from sandmask.algorithms.cad import CAD, CondCAD
from sandmask.algorithms.causirl import CausIRLCORAL, CausIRLMMD
from sandmask.algorithms.coral import CORAL
from sandmask.algorithms.dann import CDANN, DANN
from sandmask.algorithms.eqrm import EQRM
from sandmask.algorithms.erm import ERM
from sandmask.algorithms.erm_plus_plus import ERMPlusPlus
from sandmask.algorithms.fish import Fish
from sandmask.algorithms.fishr import Fishr
from sandmask.algorithms.genie import GENIE, EnvironmentGENIE
from sandmask.algorithms.gga_l import GGAL
from sandmask.algorithms.group_dro import GroupDRO
from sandmask.algorithms.ib import IBERM, IBIRM
from sandmask.algorithms.iga import IGA
from sandmask.algorithms.irm import IRM
from sandmask.algorithms.miro import MIRO
from sandmask.algorithms.mixup import Mixup
from sandmask.algorithms.mldg import MLDG
from sandmask.algorithms.mmd import MMD
from sandmask.algorithms.mtl import MTL
from sandmask.algorithms.pcgrad import PCGrad
from sandmask.algorithms.pgrad import PGrad
from sandmask.algorithms.rdm import RDM
from sandmask.algorithms.rsc import RSC
from sandmask.algorithms.sagnet import SagNet
from sandmask.algorithms.sam import GSAM, SAGM, SAM
from sandmask.algorithms.sand_mask import SANDMaskAlgorithm
from sandmask.algorithms.sd import SD
from sandmask.algorithms.selfreg import SelfReg
from sandmask.algorithms.transfer import Transfer
from sandmask.algorithms.trm import TRM
from sandmask.algorithms.urm import URM
from sandmask.algorithms.vrex import VREx

__all__ = [
    "ADRMX",
    "ALGORITHMS",
    "ARM",
    "CAD",
    "CDANN",
    "CORAL",
    "DANN",
    "DIAGNOSTICS",
    "EQRM",
    "ERM",
    "GENIE",
    "GGAL",
    "GSAM",
    "IBERM",
    "IBIRM",
    "IGA",
    "IRM",
    "MIRO",
    "MLDG",
    "MMD",
    "MTL",
    "RDM",
    "RSC",
    "SAGM",
    "SAM",
    "SD",
    "TRM",
    "URM",
    "ANDMaskAlgorithm",
    "AgrRandAlgorithm",
    "AgrSumAlgorithm",
    "Algorithm",
    "AlgorithmEntry",
    "Arith",
    "CausIRLCORAL",
    "CausIRLMMD",
    "Composed",
    "CondCAD",
    "ERMPlusPlus",
    "EnvironmentGENIE",
    "Fish",
    "Fishr",
    "GeometricMeanAlgorithm",
    "GroupDRO",
    "HeldOutProbe",
    "Hparams",
    "LogMaskedAlgorithm",
    "MaskedAlgorithm",
    "Metrics",
    "Mixup",
    "ObjectiveAlgorithm",
    "PCGrad",
    "PGrad",
    "Problem",
    "SANDMaskAlgorithm",
    "SagNet",
    "SelfReg",
    "State",
    "TemporalANDMask",
    "Transfer",
    "VREx",
    "adam_update",
    "cross_entropy",
    "descend",
    "diagnostic_names",
    "environment_risks",
    "mask_diagnostics",
]
