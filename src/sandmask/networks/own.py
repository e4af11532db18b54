"""Any `nn.Module` as a network of the benchmark, checked before it is used."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter

from sandmask._text import described, first_line
from sandmask.errors import SandmaskError
from sandmask.functional.flat import FlatModule
from sandmask.gradients import find_leaks
from sandmask.networks.backbone import LARGE
from sandmask.networks.featurizer import EvaluatedModel

EXAMPLES = 4  # size of the batch that a module is checked with
CHANGE = 1.1  # factor of the parameters, to check that features depend on them
TOLERANCE = 1e-3  # relative to the largest number


@dataclass(frozen=True)
class NetworkReport:
    """The result of `inspect_module`."""

    n_features: int
    stacks: bool
    why_not_stacked: str = ""


class OwnNetwork(EvaluatedModel):
    """A user's module as a featurizer.

    If it stacks, attention is computed with plain matrix products, because fused kernels do not support stacks of runs.
    """

    def __init__(self, module: nn.Module, report: NetworkReport) -> None:
        super().__init__()
        self.model = module
        self.n_features = report.n_features
        self.stacks = report.stacks
        self.why_not_stacked = report.why_not_stacked
        self.embeds = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in module.modules())
        if any(isinstance(part, nn.MultiheadAttention) for part in module.modules()):
            torch.backends.mha.set_fastpath_enabled(False)  # evaluation would use it, and training would not
        self.train()

    def compute(self, x: Tensor) -> Tensor:
        """Return the features without dropout."""
        with _plain_attention(self.stacks):
            return super().compute(x)


def _plain_attention(wanted: bool) -> AbstractContextManager[object]:
    return sdpa_kernel(SDPBackend.MATH) if wanted else nullcontext()


def inspect_module(name: str, module: object, input_shape: tuple[int, ...], *, stacks: bool = True) -> NetworkReport:
    """Raise an error if training a module would give wrong results, and find out whether its runs can be stacked.

    The module is called on examples of zeros and ones, which are also valid pixels and indices of tokens.

    :param name: its name in messages.
    :param module: the module.
    :param input_shape: shape of one example.
    :param stacks: False if it should not be stacked.
    """
    if not isinstance(module, nn.Module):
        raise SandmaskError(
            f"The function that builds the network {name!r} should return an nn.Module. Found {type(module).__name__}."
        )
    problem = next(_problems(module), None)
    if problem is not None:
        raise SandmaskError(f"The network {name!r} cannot be used: {problem}.")
    tried = copy.deepcopy(module).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randint(0, 2, (EXAMPLES, *input_shape)).float()
        features = _features(name, tried, x)
        _check_function(name, tried, x, features)
        _check_parameters(name, tried, x)
        why_not = _why_not_stacked(tried, x) if stacks else "its entry says so"
    return NetworkReport(features.shape[1], not why_not, why_not)


def _problems(module: nn.Module) -> Iterator[str]:
    """Yield problems that can be found without calling the module."""
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter):
            yield f"its parameter {name!r} has no shape yet. Give lazy layers their input size"
        elif parameter.requires_grad and parameter.dtype != torch.float32:
            yield f"its parameter {name!r} is of type {parameter.dtype}, and should be float32"
    if not any(parameter.requires_grad for parameter in parameters.values()):
        yield "it has no parameters to train"
    for name, part in module.named_modules():
        yield from _problems_of_part(name, part)
    for leak in find_leaks(copy.deepcopy(module).eval()):
        yield f"its layer {leak.name!r} is a {leak.module}: {leak.reason}. To fix it, {leak.remedy}"


def _problems_of_part(name: str, part: nn.Module) -> Iterator[str]:
    for attribute, value in vars(part).items():
        if isinstance(value, Tensor):
            where = f"{name}.{attribute}".lstrip(".")
            yield f"its tensor {where!r} would stay on the CPU. Use register_buffer({attribute!r}, ...)"
    if isinstance(part, _BatchNorm) and _is_fresh(part):
        yield (
            f"its layer {name!r} is a {type(part).__name__} without trained statistics. Statistics of a batch mix "
            "its environments, so batch-norm is always frozen here. Replace it by GroupNorm or LayerNorm, or load "
            "trained statistics"
        )


def _is_fresh(norm: _BatchNorm) -> bool:
    mean, variance = norm.running_mean, norm.running_var
    return mean is not None and variance is not None and not bool(mean.any()) and bool((variance == 1).all())


def _features(name: str, module: nn.Module, x: Tensor) -> Tensor:
    buffers = {key: value.clone() for key, value in module.named_buffers()}
    try:
        with torch.no_grad():
            features = module(x)
    except Exception as error:
        raise SandmaskError(
            f"The network {name!r} fails on inputs {_shape(x)} of zeros and ones: {described(error)}"
        ) from error
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(x):
        found = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise SandmaskError(
            f"The network {name!r} should map inputs {_shape(x)} to features [N, F], one row per example, without a "
            f"classifier. For N = {len(x)} it gave {found}."
        )
    changed = [key for key, value in module.named_buffers() if not torch.equal(value, buffers[key])]
    if changed:
        raise SandmaskError(
            f"The network {name!r} changes its buffer {changed[0]!r} in a forward pass, which would carry information "
            "from one environment to another. A network should be a function of its inputs and parameters."
        )
    return features


def _shape(x: Tensor) -> str:
    return f"[{', '.join(map(str, ['N', *x.shape[1:]]))}]"


@torch.no_grad()
def _check_function(name: str, module: nn.Module, x: Tensor, features: Tensor) -> None:
    """Raise an error if the features are random, or depend on other examples of the batch."""
    if not _is_close(module(x), features):
        raise SandmaskError(
            f"The network {name!r} is random in evaluation mode. Use the hyperparameter `dropout`, or switch its own "
            "dropout off with `training=self.training`."
        )
    others = torch.cat([x[:1], 1.0 - x[1:]])
    if not _is_close(module(others)[:1], features[:1]):
        raise SandmaskError(
            f"The network {name!r} mixes the examples of a batch, so environments would influence each other. Look for "
            "a layer that works along the first dimension; attention, for example, needs batch_first=True."
        )


def _check_parameters(name: str, module: nn.Module, x: Tensor) -> None:
    """Raise an error if features and gradients are not those of a pure function of the module's parameters."""
    other = copy.deepcopy(module)
    trained = {key: value for key, value in other.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.mul_(CHANGE)
    try:
        function = FlatModule(lambda: module)
        vector = function.flatten(trained).detach().requires_grad_()
        with warnings.catch_warnings(action="ignore"):  # they are shown in training
            expected = _with_gradient(other(x), list(trained.values()))
            found = _with_gradient(function(function.unflatten(vector), x), [vector])
    except Exception as error:
        raise SandmaskError(
            f"The network {name!r} cannot be differentiated as a function of its parameters: {first_line(error)} "
            "`torch.utils.checkpoint` and scripted modules, for example, cannot be used in it."
        ) from error
    in_order = function.flatten(dict(zip(trained, expected[1:], strict=True)))
    if not (_is_close(found[0], expected[0]) and _is_close(found[1], in_order)):
        raise SandmaskError(
            f"The network {name!r} uses parameters other than as attributes of its modules, for example in a list, "
            "so training would not change its outputs. Use nn.ParameterList or nn.ModuleList."
        )


def _with_gradient(features: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Return the features, and the gradients of the sum of their squares."""
    grads = torch.autograd.grad(features.square().sum(), parameters, allow_unused=True)
    pairs = zip(parameters, grads, strict=True)
    return [features.detach(), *(torch.zeros_like(each) if grad is None else grad for each, grad in pairs)]


def _why_not_stacked(module: nn.Module, x: Tensor) -> str:
    """Return the reason why K runs should be trained one after the other; empty if they can be stacked."""
    if sum(parameter.numel() for parameter in module.parameters()) >= LARGE:
        return "it has a million parameters or more and fills a machine by itself"
    if any(isinstance(part, _ConvNd) for part in module.modules()):
        return "convolutions of several runs at once are slower than one after the other"
    named = {key: value.detach() for key, value in module.named_parameters()}
    runs = {key: torch.stack([value, 1.1 * value]) for key, value in named.items()}
    with torch.no_grad():
        weights = torch.randn_like(module(x))

    def loss(params: dict[str, Tensor]) -> Tensor:
        with _plain_attention(True):
            features: Tensor = functional_call(module, params, (x,))
        return (weights * features).sum()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            together = vmap(grad(loss))(runs)
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything
            return f"torch.func.vmap does not take it: {first_line(error)}"
    slow = [str(each.message) for each in said if "batching rule" in str(each.message)]
    if slow:
        return slow[0].partition("batching rule for ")[2].partition(". ")[0] + " has no rule for a stack of runs"
    for run in range(2):
        alone = grad(loss)({key: value[run] for key, value in runs.items()})
        stacked = torch.cat([together[key][run].flatten() for key in alone])
        if not _is_close(stacked, torch.cat([value.flatten() for value in alone.values()])):
            return "its gradients under torch.func.vmap are not those of single runs"
    return ""


def _is_close(found: Tensor, expected: Tensor) -> bool:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * scale))
