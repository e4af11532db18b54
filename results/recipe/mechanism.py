"""What happens to the weights: first-layer weights of the two spiral inputs and of the signature inputs over training.

python results/recipe/mechanism.py FILE.csv [STEPS]     trains one stack of runs and writes what it sees every 10 steps
"""

import csv
import itertools
import sys
from pathlib import Path

import torch
from torch import Tensor

from sandmask.algorithms import ALGORITHMS, AlgorithmEntry, Hparams, MaskedAlgorithm, Metrics, State
from sandmask.datasets import DATASETS, load_dataset
from sandmask.hparams import FRACTION, NON_NEGATIVE, Constant, Hparam
from sandmask.masks import ANDMask, Mask, TensorMoments
from sandmask.training import Stack, choose_device, make_spec, set_precision

EVERY = 10
HELD_OUT = (3, 5, 14)
VARIANTS = {  # weight decay, decoupled decay, scale of the initial weights
    "L2 3e-4": (3e-4, 0.0, 1.0),
    "L2 1e-6": (1e-6, 0.0, 1.0),
    "L2 1e-9": (1e-9, 0.0, 1.0),
    "none": (0.0, 0.0, 1.0),
    "AdamW 0.1": (0.0, 0.1, 1.0),
    "AdamW 3": (0.0, 3.0, 1.0),
    "none, initial weights / 10": (0.0, 0.0, 0.1),
    "none, initial weights / 100": (0.0, 0.0, 0.01),
    "none, initial weights / 1000": (0.0, 0.0, 0.001),
}


class TracedANDMask(MaskedAlgorithm):
    """The rescaled AND-mask, which counts how often each element was open."""

    def extra_state(self, seed: int) -> State:  # noqa: ARG002
        """The counts."""
        return {"opened": torch.zeros(self.network.numel)}

    def mask(self, hparams: Hparams) -> Mask:
        """The rescaled AND-mask."""
        return ANDMask(tau=hparams["tau"], rescale="sparsity")

    def update(self, state: State, moments: TensorMoments, risks: Tensor, hparams: Hparams) -> tuple[State, Metrics]:
        """The step, and one more for what is open."""
        weights, _ = self.mask(hparams).weigh(moments)
        new, metrics = super().update(state, moments, risks, hparams)
        return {**new, "opened": state["opened"] + (weights > 0)}, metrics


ALGORITHMS.register(
    AlgorithmEntry(
        name="TracedANDMask",
        summary="AND-mask, rescaled, with counts of openings",
        paper="an experiment of this repository",
        build=TracedANDMask,
        hparams=(
            Hparam("tau", 0.9, Constant(0.9), FRACTION),
            Hparam("decoupled_decay", 0.0, Constant(0.0), NON_NEGATIVE),
            Hparam("init_scale", 1.0, Constant(1.0), NON_NEGATIVE),
        ),
    )
)


def groups(stack: Stack) -> dict[str, Tensor]:
    """Which elements of the flat parameters belong to what: true where they do."""
    network = stack.algorithm.network
    number = torch.arange(network.numel)
    by_name = network.unflatten(number)
    first, *others = [tensor for tensor in by_name.values() if tensor.ndim == 2]
    parts = {
        "spiral": first[:, :2],
        "signature": first[:, 2:],
        "later layers": torch.cat([t.flatten() for t in others]),
    }
    return {name: torch.isin(number, part.flatten()).to(stack.device) for name, part in parts.items()}


def main() -> None:
    """Train and write."""
    path, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1001
    pairs = list(itertools.product(VARIANTS, HELD_OUT))
    specs = []
    for variant, env in pairs:
        decay, decoupled, scale = VARIANTS[variant]
        hparams = {"weight_decay": decay, "decoupled_decay": decoupled, "init_scale": scale}
        entry = DATASETS["Spirals"]
        specs.append(
            make_spec(entry, "TracedANDMask", [env], steps=steps, hparams=hparams, space="recipe", precision="tf32")
        )
    set_precision("tf32")
    stack = Stack(specs, load_dataset("Spirals"), choose_device(None))
    members, state, before = groups(stack), stack.init(), None
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(
            ["variant", "held_out", "step", "loss", "training", "held_out_accuracy", "weights", "rms", "open"]
        )
        for step in range(steps):
            (batch,) = stack.batches(state["step"][0], 1)
            state, metrics = stack.step(state, batch)
            if step % EVERY:
                continue
            found = stack.accuracies(state)
            opened = state["opened"] - (0 if before is None else before)
            before = state["opened"].clone()
            for name, mask in members.items():
                rms = state["params"][:, mask].square().mean(1).sqrt().tolist()
                share = (opened[:, mask].mean(1) / (EVERY if step else 1)).tolist()
                for k, (variant, env) in enumerate(pairs):
                    trained = [e for e in range(17) if e != env]
                    accuracies = found.outside[k, trained].mean(), found.inside[k, env]
                    numbers = (float(metrics["loss"][k]), *accuracies, rms[k], share[k])
                    loss, training, held_out, size, opens = (f"{number:.6g}" for number in numbers)
                    table.writerow([variant, env, step, loss, training, held_out, name, size, opens])


if __name__ == "__main__":
    main()
