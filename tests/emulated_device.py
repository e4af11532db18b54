"""A device that is emulated on the CPU: like Apple's GPUs, it has memory of its own and no float64.

`python tests/emulated_device.py` trains and masks on it and prints, as JSON, how far results are from the CPU's. It has
a process of its own because torch cannot unregister a device.
"""
# mypy: disable-error-code="arg-type, assignment, no-untyped-call, override"

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import sandmask
from sandmask import _devices
from sandmask.cli import _machine_checks
from sandmask.records import read_runs

NAME = "laptop"
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)  # from device to device


class OnDevice(Tensor):
    """A tensor on the device, whose values are a tensor on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls: type[Self], values: Tensor) -> Self:
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        tensor: Any = Tensor._make_wrapper_subclass(
            cls, values.size(), dtype=values.dtype, device=f"{NAME}:0", **layout
        )
        tensor.values = values
        made: Self = tensor
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.values.tolist()


def compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operation on the CPU, if all tensors are where the device needs them."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = {id(tensor.values): tensor for tensor in tensors if isinstance(tensor, OnDevice)}
    if ours and func not in COPIES and any(not isinstance(tensor, OnDevice) and tensor.ndim for tensor in tensors):
        raise RuntimeError(f"{func}: some tensors are on the CPU and some on the device")
    asked = kwargs.get("device")
    to_device = bool(ours) if asked is None else torch.device(asked).type == NAME
    if func is torch.ops.aten.copy_.default:
        to_device = isinstance(args[0], OnDevice)
    on_cpu = {**kwargs, "device": "cpu", "pin_memory": False} if asked is not None else kwargs
    inner_args, inner_kwargs = pytree.tree_map_only(OnDevice, lambda tensor: tensor.values, (args, on_cpu))
    output = func(*inner_args, **inner_kwargs)
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)  # of the shape alone
        return args[0]

    def wrapped(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.float64:
            raise TypeError(f"{func}: the device has no float64")
        return ours[id(tensor)] if id(tensor) in ours else OnDevice(tensor)

    return pytree.tree_map_only(Tensor, wrapped, output) if to_device else output


class Emulated(TorchDispatchMode):
    """Within this context, tensors can be made on the device and moved to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def register() -> None:
    """Make the device known to torch and to sandmask."""
    made_on_cpu = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:  # torch's own bypasses the mode
        made = made_on_cpu(*args, **kwargs)
        return made if device is None else made.to(device)

    _setup_privateuseone_for_python_backend(NAME)
    _DummyBackendModule.get_rng_state = lambda self, device: torch.get_rng_state()  # type: ignore[attr-defined]
    torch.tensor = tensor
    _devices._WITHOUT_FLOAT64.add(NAME)


def trained(dataset: str, algorithm: str, device: str, **options: Any) -> list[float]:
    """Accuracies and metrics of a short run, and predictions of its model."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"steps": 4, "checkpoint_every": 2, "progress": False, "train_eval_limit": 32} | options
        run = sandmask.train(dataset, algorithm, 0, device=device, out=folder, **options)
        (record,) = read_runs(folder)
        shape = (18,) if dataset == "Spirals" else (1, 28, 28)
        inputs = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
        predicted = run.model(device).logits(inputs).flatten().tolist()
    curves = [*record.metrics.values(), *record.tables.values(), record.accuracy_in, record.accuracy_out]
    return [*(float(value) for curve in curves for value in curve.flat if value == value), *predicted]


def masked(how: str, mask: sandmask.Mask, model: Callable[[], nn.Module], device: str) -> list[float]:
    """The gradient that a mask leaves of three environments' losses."""
    torch.manual_seed(0)
    network = model()
    batches = [(torch.randn(5, 2, 6, 6), torch.randint(0, 3, (5,))) for _ in range(3)]
    network, batches = network.to(device), [(x.to(device), y.to(device)) for x, y in batches]
    named = dict(network.named_parameters())
    if how == "record":
        with sandmask.record(network, [5] * 3) as recording:
            logits = network(torch.cat([x for x, _ in batches]))
        losses = [F.cross_entropy(rows, y) for rows, (_, y) in zip(logits.split(5), batches, strict=True)]
        str(recording.backward(losses, mask))
    elif how == "backward":
        report = sandmask.backward([F.cross_entropy(network(x), y) for x, y in batches], named.items(), mask)
        report.agreement_histogram(bins=4)
    else:
        moments = sandmask.environment_moments(network, F.cross_entropy, batches)
        for name, gradient in mask.from_moments(moments).items():
            named[name].grad = gradient
    return [value for p in named.values() if p.grad is not None for value in p.grad.cpu().flatten().tolist()]


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def checked(device: str) -> list[float]:
    """Whether `sandmask doctor` finds nothing wrong with the device."""
    lines: list[tuple[str, ...]] = []
    _machine_checks._apple_gpu(lambda *line: lines.append(line), torch.device(device))
    return [float(line[1] == "note") for line in lines]


EVERYTHING: dict[str, Any] = {
    "averages": ("sma", "swad"),
    "metrics": ("f1", "ece", "worst-group", "confusion"),
    "diagnostics": True,
    "hparams": {"batch_size": 4},
}
SMALL = {"batch_size": 4, "mlp_width": 8}
CASES: dict[str, Callable[[str], list[float]]] = {
    "SANDMask, all that is recorded": partial(trained, "Debug28", "SANDMask", **EVERYTHING),
    **{
        f"{method} on Spirals": partial(trained, "Spirals", method, hparams=SMALL | hparams)
        for method, hparams in (
            ("AgrRand", {}),
            ("ARM", {}),
            ("SAM+ANDMask+IRM", {"irm_penalty_anneal_iters": 1}),
            ("SelfReg", {}),
        )
    },
    **{
        f"{how}, {model.__name__}": partial(masked, how, sandmask.SANDMask(0.4), model)
        for how in ("backward", "record", "moments")
        for model in (convnet, mlp)
    },
    "doctor": checked,
}


def distance(case: Callable[[str], list[float]]) -> float:
    """The largest difference between the emulated device and the CPU."""
    there = case("cpu")
    with Emulated():
        here = case(NAME)
    assert len(here) == len(there) > 0
    return max(abs(a - b) for a, b in zip(here, there, strict=True))


if __name__ == "__main__":
    register()
    print(json.dumps({name: distance(case) for name, case in CASES.items()}))
