"""Which precision is used, and that settings come back."""

import pytest
import torch

from sandmask.errors import SandmaskError
from sandmask.functional.split import split_products
from sandmask.training import precision
from sandmask.training.precision import choose_device, set_precision, sweep_precision, temporary_precision


def test_split_products_are_a_setting_of_fp32x3_alone() -> None:
    with temporary_precision("fp32"):
        for name in precision.PRECISIONS:
            with temporary_precision(name):
                assert split_products() == (name == "fp32x3")
                assert (torch.get_float32_matmul_precision() == "highest") == name.startswith("fp32")
            assert not split_products()
        set_precision("fp32x3")
    assert not split_products()


def test_sweeps_on_a_gpu_have_a_default_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep_precision("cuda:0,cuda:1") == "fp32x3"
    assert sweep_precision("cpu") == "fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sweep_precision(None) == "fp32x3"


def test_a_device_that_fails_without_a_message_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(SandmaskError, match="cannot be used here: AssertionError"):
        choose_device("cuda")
