"""Decoupled weight decay after a mask is warned about, once; other optimizers are not."""

import gc
import warnings
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

import sandmask
from sandmask.gradients import _backward
from sandmask.masks import MaskWarning, _errors


@pytest.fixture(autouse=True)
def nothing_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_errors, "_warned", set())
    _backward._pending.clear()


def parameter() -> Tensor:
    return torch.ones(3, requires_grad=True)


def groups(w: Tensor) -> list[dict[str, Any]]:
    return [{"params": [w], "weight_decay": 0.0}, {"params": [parameter()]}]


def named(name: str, base: Any = SGD) -> Any:
    """A class of another library."""
    return type(name, (base,), {})


def masked_backward(w: Tensor) -> None:
    sandmask.backward([(w * slope).sum() for slope in (1.0, 2.0)], [w], sandmask.ANDMask(1.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda w: AdamW([w], lr=0.1),
        lambda w: Adam([w], lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
        lambda w: AdamW(groups(w), lr=0.1),
        lambda w: Adafactor([w], weight_decay=0.1),
        lambda w: SGD([{"params": [w], "weight_decay": 0.1, "weight_decouple": True}], lr=0.1),
        lambda w: named("Lion8bit")([w], lr=0.1, weight_decay=0.1),
        lambda w: named("Adam", named("Optimizer2State"))([w], lr=0.1, weight_decay=0.1),
    ],
)
def test_decoupled_weight_decay_warns_once(make: Callable[[Tensor], Optimizer]) -> None:
    w = parameter()
    optimizer = make(w)
    masked_backward(w)
    with pytest.warns(MaskWarning, match=r"decoupled weight decay.*torch\.optim\.Adam") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    masked_backward(w)
    optimizer.step()  # warnings are errors here


@pytest.mark.parametrize(
    "make",
    [
        lambda w: Adam([w], lr=0.1, weight_decay=0.1),
        lambda w: AdamW([w], lr=0.1, weight_decay=0.0),
        lambda w: SGD([w], lr=0.1, weight_decay=0.1),
        lambda w: Adafactor([w]),
    ],
)
def test_other_optimizers_do_not(make: Any) -> None:
    w = parameter()
    masked_backward(w)
    make(w).step()


def test_an_optimizer_of_other_parameters_does_not() -> None:
    w, other = parameter(), parameter()
    other.grad = torch.ones(3)
    masked_backward(w)
    AdamW([other], lr=0.1).step()
    with pytest.warns(MaskWarning):
        AdamW([w], lr=0.1).step()


def test_one_hook_is_installed_and_then_idle() -> None:
    for _ in range(2):
        w = parameter()
        optimizer = Adam([w])
        for _ in range(2):
            masked_backward(w)
            optimizer.step()
            assert len(_backward._pending) == 0
    assert list(torch_optimizer._global_optimizer_pre_hooks.values()).count(_backward._inspect) == 1


def test_a_model_that_is_gone_is_not_waited_for() -> None:
    masked_backward(parameter())
    gc.collect()
    assert len(_backward._pending) == 0


def test_threads_may_train_models_of_their_own() -> None:
    failures: list[Exception] = []

    def train() -> None:
        try:
            w = parameter()
            optimizer = AdamW([w], lr=0.1)
            for _ in range(20):
                masked_backward(w)
                optimizer.step()
        except Exception as error:  # noqa: BLE001 - of any kind
            failures.append(error)

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        threads = [Thread(target=train) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
