"""Steps that write to the tensors that they read, as a CUDA graph does, against steps that make new ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sandmask.algorithms import ALGORITHMS, AlgorithmEntry, Hparams, ObjectiveAlgorithm, State
from sandmask.datasets import Dataset
from sandmask.functional import EnvBatch, Params
from sandmask.records import RunSpec
from sandmask.training import Stack
from sandmask.training.cuda_graph import Carry, Program, _copy


class Remembers(ObjectiveAlgorithm):
    """Pulls the parameters to those before the last step, which its state keeps."""

    def extra_state(self, seed: int) -> State:
        return {"previous": self.network.init(seed)}

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        del key
        pull = (self.network.flatten(params) - state["previous"]).square().sum()
        return self.risks(params, batch, hparams).mean() + pull, {"previous": state["params"]}


def trained(stack: Stack, *, captured: bool) -> list[Tensor]:
    program = Program(stack, Carry(stack.init(), {}, torch.full((stack.n_runs,), -1)))
    if captured:  # a function that is called again and again in place of a graph

        def capture(function: Callable[[], object], warm_up: Callable[[], object]) -> Callable[[], object]:
            warm_up()
            return function

        program._captures = True
        program._capture = capture  # type: ignore[assignment, method-assign]
    while program.done < 6:
        program.advance(1)
    leaves: list[Tensor] = pytree.tree_leaves(program.carry.tree())
    return leaves


@pytest.mark.parametrize("n_runs", [1, 2])
def test_a_captured_step_keeps_what_it_reads_until_it_is_read(
    n_runs: int, dataset: Dataset, spec_of: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = AlgorithmEntry(name="Remembers", summary="", paper="", build=Remembers)
    monkeypatch.setitem(ALGORITHMS._entries, "remembers", entry)
    specs = [spec_of("Remembers", trial_seed=seed, checkpoint_every=1) for seed in range(n_runs)]
    stack = Stack(specs, dataset, torch.device("cpu"))
    expected, found = (trained(stack, captured=captured) for captured in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_copy_into_a_tree_that_it_is_made_of() -> None:
    first, second, third = (torch.full((2,), float(i)) for i in range(3))
    target: dict[str, Any] = {"a": first, "b": second, "c": third}
    _copy({"a": second, "b": first[:2], "c": third}, target)
    assert [leaf.tolist() for leaf in target.values()] == [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]
