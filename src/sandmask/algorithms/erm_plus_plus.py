"""ERM++: ERM with a warm start of the classifier (Teterwak et al., WACV 2025)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, Problem
from sandmask.algorithms._functions import Hparams, Metrics, Parts, State, adam_update, change_step
from sandmask.algorithms.erm import ERM
from sandmask.functional import adam_init
from sandmask.functional.adam import adam_where
from sandmask.hparams import COUNT, NON_NEGATIVE, Constant, Hparam, LogUniform


class ERMPlusPlus(ERM):
    """ERM that trains only the classifier in the first `linear_steps` steps, with its own Adam and `linear_lr`.

    The other parts of the method are options of every run: averaged weights (`--average sma`; the average starts at the
    same step as in DomainBed's code), the initialization (`--network resnet50.ram_in1k`), a second training on all data
    (`full_data=1`), the search for a learning rate (`lr_patience=1`), and unfrozen batch-norm (`freeze_bn=0`).
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.parts = Parts(self.network)

    def extra_state(self, seed: int) -> State:
        """Return the optimizer of the first steps."""
        return {"linear_adam": adam_init(self.parts.split(self.network.init(seed))[1])}

    def update(
        self, state: State, gradient: Tensor, loss: Tensor, changes: State, hparams: Hparams
    ) -> tuple[State, Metrics]:
        """Complete a step, of the classifier or of all parameters."""
        featurizer, head = self.parts.split(state["params"])
        of_head = self.parts.split(gradient)[1]
        linear = {**hparams, "lr": hparams["linear_lr"]}
        head, linear_adam = adam_update(head, of_head, state["linear_adam"], linear)
        params, adam = adam_update(state["params"], gradient, state["adam"], hparams)
        warms = state["step"] < hparams["linear_steps"]
        stepped = {
            "params": torch.where(warms, torch.cat([featurizer, head]), params),
            "adam": adam_where(warms, state["adam"], adam),
            "linear_adam": adam_where(warms, linear_adam, state["linear_adam"]),
        }
        return {**state, **stepped, "step": state["step"] + 1}, {"loss": loss}


ALGORITHMS.register(
    AlgorithmEntry(
        name="ERMPlusPlus",
        summary="ERM that trains the classifier alone at first",
        paper="Teterwak et al., ERM++: an improved baseline for domain generalization, WACV 2025",
        build=ERMPlusPlus,
        compares_environments=False,
        hparams=(
            Hparam("linear_lr", 5e-5, LogUniform(10, -5, -3.5), NON_NEGATIVE),
            Hparam("linear_lr", 5e-3, LogUniform(10, -3, -1.5), NON_NEGATIVE, scope="tabular", space="recipe"),
            *change_step("linear_steps", 500, Constant(500), recipe=(100, Constant(100))),
            Hparam("sma_start", 598, Constant(598), COUNT),  # at step 600, the average has two iterates
        ),
    )
)
