"""Finding what lets environments see each other, and freezing batch-norm."""

import copy
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sandmask
from sandmask.training.processes import leave_group


class Derived(nn.BatchNorm1d):
    """As image-model libraries do: batch-norm and activation in one."""


def test_a_clean_model_has_no_leaks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2), nn.Dropout())
    assert sandmask.find_leaks(model) == []


@pytest.mark.parametrize(
    ("module", "reason", "remedy"),
    [
        (nn.BatchNorm1d(2), "mixes the examples of a batch", "freeze_batchnorm"),
        (nn.BatchNorm2d(2), "mixes the examples of a batch", "freeze_batchnorm"),
        (nn.BatchNorm3d(2), "mixes the examples of a batch", "freeze_batchnorm"),
        (nn.LazyBatchNorm1d(), "mixes the examples of a batch", "freeze_batchnorm"),
        (Derived(2), "mixes the examples of a batch", "freeze_batchnorm"),
        (nn.SyncBatchNorm(2), "all processes", "freeze_batchnorm"),
        (nn.BatchNorm1d(2, track_running_stats=False), "even in evaluation", "GroupNorm"),
        (nn.BatchNorm1d(2, track_running_stats=False).eval(), "even in evaluation", "GroupNorm"),
        (nn.InstanceNorm2d(2, track_running_stats=True), "mix all environments", "track_running_stats=False"),
    ],
    ids=repr,
)
def test_leaks_say_what_why_and_what_to_do(module: nn.Module, reason: str, remedy: str) -> None:
    (leak,) = sandmask.find_leaks(nn.Sequential(nn.Linear(2, 2), nn.Sequential(module)))
    assert (leak.name, leak.module) == ("1.0", type(module).__name__)
    assert reason in leak.reason
    assert remedy in leak.remedy
    assert str(leak).startswith(f"1.0 ({type(module).__name__}): ")


@pytest.mark.parametrize("module", [nn.BatchNorm1d(2), nn.InstanceNorm2d(2, track_running_stats=True), Derived(2)])
def test_evaluation_mode_mends_layers_with_statistics(module: nn.Module) -> None:
    assert sandmask.find_leaks(module.eval()) == []


def test_distributed_data_parallel_is_no_leak(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert sandmask.find_leaks(DistributedDataParallel(nn.Linear(2, 2))) == []
    finally:
        leave_group()


def test_sharded_models_are_reported() -> None:
    sharded = type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2)
    (leak,) = sandmask.find_leaks(sharded)
    assert str(leak).startswith("the model (FullyShardedDataParallel)")
    assert "whole model" in leak.remedy


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(Derived(4), nn.Dropout(0.5)))


def test_frozen_layers_stay_frozen() -> None:
    model = make_model()
    assert sandmask.freeze_batchnorm(model) is model
    model.train()
    assert sandmask.find_leaks(model) == []
    assert model.get_submodule("2.1").training  # everything else trains
    before = model.get_buffer("1.running_mean").clone()
    model(torch.randn(5, 3))
    assert torch.equal(model.get_buffer("1.running_mean"), before)
    assert all(p.requires_grad for p in model.parameters())


def test_examples_of_a_frozen_model_are_independent() -> None:
    model = sandmask.freeze_batchnorm(make_model()[:2].train())
    x = torch.randn(6, 3)
    torch.testing.assert_close(model(x)[:2], model(x[:2]))


def test_copies_and_saved_models_stay_frozen() -> None:
    model = sandmask.freeze_batchnorm(make_model())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.train()
        assert sandmask.find_leaks(other) == []
        assert other[1].train().training is False
        assert other[1].train() is other[1]  # and not the layer of the original


def test_weights_load_into_a_frozen_model() -> None:
    model = make_model()
    sandmask.freeze_batchnorm(make_model()).load_state_dict(model.state_dict())


def test_a_layer_without_statistics_cannot_be_frozen() -> None:
    with pytest.raises(sandmask.MaskError, match="Batch-norm layer `1` should have running statistics"):
        sandmask.freeze_batchnorm(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2, track_running_stats=False)))
