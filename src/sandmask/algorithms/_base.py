"""The base classes of algorithms and their registry. Each method has its own file."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sandmask.algorithms._functions import Hparams, Metrics, State, adam_update, descend, environment_risks
from sandmask.errors import SandmaskError
from sandmask.functional import Differentiator, Dropout, EnvBatch, Functional, Params, adam_init, adam_reset
from sandmask.functional.ranks import Reads
from sandmask.hparams import Hparam, Like
from sandmask.networks import Featurizer, Network
from sandmask.registry import Registry, checked_parts, parts_of


@dataclass(frozen=True)
class Problem:
    """The sizes of the data and the network of a run, and how gradients are computed.

    Hyperparameters that determine shapes (`batch_size`, `mlp_width`, ...) are integers in `sizes`. All others are
    passed to `step` as tensors, with one value per run.
    """

    featurizer: Callable[..., Featurizer]  # featurizer(extra_channels=n) takes n more channels
    n_envs: int
    n_classes: int
    input_shape: tuple[int, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    dropout: bool = True  # False if no run of the stack uses dropout; then no noise is drawn
    dtype: torch.dtype = torch.float32  # of activations; parameters and losses are float32
    differentiate: Differentiator = field(default_factory=Functional)
    diagnostics: bool = False  # whether masked methods also return `mask_diagnostics`

    @property
    def nonlinear(self) -> bool:
        """Whether the classifier has hidden layers."""
        return bool(self.sizes.get("nonlinear_classifier", 0))

    def with_differentiator(self, differentiate: Differentiator) -> "Problem":
        """Return a copy of the problem with another differentiator."""
        return replace(self, differentiate=differentiate)


class Algorithm(ABC):
    """Base class of training methods, which are the pure functions `init`, `step` and `predict`.

    `step` must not branch in Python on the value of a tensor (use `torch.where`), must compute gradients with
    `problem.differentiate`, and must draw random numbers only from `key`. It can then train one run, or K runs under
    `torch.func.vmap`, with the same results up to rounding.
    """

    uses_context = False  # whether a prediction depends on the other examples of the batch
    averaged: tuple[str, ...] = ("params",)  # entries of the state that are averaged over steps (SMA, EMA, SWAD)
    training_only: tuple[str, ...] = ()  # entries of the state that `predict` does not need
    # Whether runs can be stacked if the network stacks only with the GPU kernels of its layers. All gradients of the
    # network must then be computed by `problem.differentiate`, not by `torch.func`.
    stacks_by_kernels = True
    captures = True  # whether steps can be captured as CUDA graphs, which they can if they do not wait for the device
    divides = True  # whether several processes can divide a step; not if it calls the network inside of `torch.func`
    # Which inputs of a minibatch each of several processes reads (see `Ranks.rows`). "examples" is for methods that
    # compute a single gradient from `batch.inputs`, "environments" for methods with a gradient of each environment.
    reads: Reads = "all"
    linear_only = False  # whether the method needs a linear classifier
    least_envs = 1  # the smallest number of training environments

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "reads" not in vars(cls) and not cls.__module__.startswith("sandmask."):
            cls.reads = "all"  # a subclass of a plugin may use other inputs than its base class

    def __init__(self, problem: Problem) -> None:
        if problem.n_envs < self.least_envs:
            raise SandmaskError(
                f"{type(self).__name__} needs at least {self.least_envs} training environments. Found {problem.n_envs}."
            )
        if self.linear_only and problem.nonlinear:
            raise SandmaskError(f"{type(self).__name__} needs a linear classifier. Leave out nonlinear_classifier.")
        self.problem = problem
        self.network = self.build_network()

    def build_network(self) -> Network:
        """Build the model. A method that needs another classifier overrides this."""
        problem = self.problem
        return Network(problem.featurizer, problem.n_classes, dtype=problem.dtype, nonlinear=problem.nonlinear)

    def to(self, device: torch.device) -> "Algorithm":
        """Move the constants of the networks to a device."""
        self.network.to(device)
        return self

    def use(self, problem: Problem) -> None:
        """Replace the problem by one with the same shapes, but with another differentiator or other diagnostics."""
        self.problem = problem

    def init(self, seed: int) -> State:
        """Return the state of a run before its first step, on the CPU."""
        params = self.network.init(seed)
        step = torch.zeros((), dtype=torch.int64)
        return {"params": params, "adam": adam_init(params), "step": step, **self.extra_state(seed)}

    def extra_state(self, seed: int) -> State:
        """Return further entries of the state, such as averages, or other networks and their optimizers."""
        return {}

    @property
    def is_network(self) -> bool:
        """Whether predictions are the logits of an ordinary network."""
        kind = type(self)
        return kind.predict is Algorithm.predict and kind.build_network is Algorithm.build_network

    @abstractmethod
    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """Take one training step, and return the new state and the metrics."""

    def predict(self, state: State, x: Tensor) -> Tensor:
        """Return the logits [N, n_classes] of inputs [N, *input_shape], which are all from one environment."""
        return self.network.logits(self.network.unflatten(state["params"]), x)

    def dropout(self, batch: EnvBatch, hparams: Hparams) -> Dropout | None:
        """Return the dropout of the examples of a batch, in the order of `batch.inputs`, or None for no dropout."""
        if not self.problem.dropout or "dropout" not in hparams:
            return None
        return Dropout(hparams["dropout"], batch.example_keys.flatten())

    def logits(self, params: Params, batch: EnvBatch, hparams: Hparams) -> Tensor:
        """Return the logits [E, B, n_classes] of a training batch, from one forward pass."""
        return batch.split(self.network.logits(params, batch.inputs, self.dropout(batch, hparams)))

    def features(self, params: Params, batch: EnvBatch, hparams: Hparams) -> Tensor:
        """Return the features [E, B, n_features] of a training batch, from one forward pass."""
        return batch.split(self.network.features(params, batch.inputs, self.dropout(batch, hparams)))

    def risks(self, params: Params, batch: EnvBatch, hparams: Hparams) -> Tensor:
        """Return the risks [E] of a training batch, from one forward pass."""
        return environment_risks(self.logits(params, batch, hparams), batch)

    def risks_by(self, hparams: Hparams) -> Callable[[Tensor, EnvBatch], Tensor]:
        """Return a function that computes the risks [E] from the vector of parameters and a batch."""
        return lambda vector, batch: self.risks(self.network.unflatten(vector), batch, hparams)

    def risk_gradient(self, vector: Tensor, batch: EnvBatch, hparams: Hparams) -> tuple[Tensor, Tensor]:
        """Return the gradient of mean_e R_e at the parameters `vector`, and the value of mean_e R_e."""
        risks = self.risks_by(hparams)
        gradient, value, _ = self.problem.differentiate.gradient(lambda v: (risks(v, batch).mean(), ()), vector)
        return gradient, value

    def descend_together(
        self, state: State, objective: Callable[..., tuple[Tensor, Any]], hparams: Mapping[str, Hparams]
    ) -> tuple[State, Tensor, Any]:
        """Take one Adam step of several vectors of the state, which minimize a common objective.

        `hparams` has the hyperparameters of each vector, by its name in the state. The optimizer of a vector is
        `<name>_adam`, and that of `params` is `adam`. Return the new state, and the value and the other results of the
        objective.
        """
        sizes = [len(state[name]) for name in hparams]
        joint = torch.cat([state[name] for name in hparams])
        gradient, value, more = self.problem.differentiate.gradient(lambda v: objective(*torch.split(v, sizes)), joint)
        changes: State = {"step": state["step"] + 1}
        for (name, own), piece in zip(hparams.items(), torch.split(gradient, sizes), strict=True):
            adam = "adam" if name == "params" else f"{name}_adam"
            changes[name], changes[adam] = adam_update(state[name], piece, state[adam], own)
        return {**state, **changes}, value, more


class ObjectiveAlgorithm(Algorithm):
    """Base class of methods that minimize one objective with one Adam optimizer."""

    reads: Reads = "examples"
    # Whether the objective uses parameters only through `self.network`, so that its gradient can be split by
    # environment, which rules such as masks need.
    by_environment = True
    changes_at: tuple[str, ...] = ()  # hyperparameters that are steps at which Adam is reset
    later_lr: str | None = None  # hyperparameter that replaces `lr` from the first of these steps

    @abstractmethod
    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """Return the value to minimize, and the entries of the state that this step replaces (often none)."""

    def resets_adam(self, step: Tensor, hparams: Hparams) -> Tensor | None:
        """Whether Adam is reset at this step, because the objective changes suddenly; None if it is never reset."""
        sudden = [(step >= hparams[name]) & (step - 1 < hparams[name]) for name in self.changes_at]
        return torch.stack(sudden).any(0) if sudden else None

    def rates(self, step: Tensor, hparams: Hparams) -> Hparams:
        """Return the hyperparameters with the learning rate of this step."""
        if self.later_lr is None:
            return hparams
        later = step >= hparams[self.changes_at[0]]
        return {**hparams, "lr": torch.where(later, hparams[self.later_lr], hparams["lr"])}

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        found = self.problem.differentiate.gradient(
            lambda vector: self.value(vector, state, batch, hparams, key), state["params"]
        )
        return self.update(state, *found, hparams)

    def value(
        self, vector: Tensor, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """Return the results of `objective` for the parameters as one vector."""
        found = self.objective(self.network.unflatten(vector), state, batch, hparams, key)
        if not isinstance(found, tuple) or len(found) != 2:
            raise SandmaskError(
                f"{type(self).__name__}.objective should return a value and a dict of updated entries of the state "
                f"(it may be empty). Found {type(found).__name__}."
            )
        return found

    def update(
        self, state: State, gradient: Tensor, loss: Tensor, changes: State, hparams: Hparams
    ) -> tuple[State, Metrics]:
        """Complete a step, given the gradient and the value of the objective."""
        name = type(self).__name__
        if loss.ndim != 0:
            raise SandmaskError(f"{name}.objective should return one number. Found a tensor of shape {[*loss.shape]}.")
        if unknown := changes.keys() - state.keys():
            raise SandmaskError(
                f"{name}.objective should only update entries that the state has. Found new ones: {sorted(unknown)}. "
                "Create them in `extra_state`."
            )
        step, adam = state["step"], state["adam"]
        reset = self.resets_adam(step, hparams)
        if reset is not None:
            adam = adam_reset(adam, reset)
        return {**state, **changes, **descend(state, gradient, adam, self.rates(step, hparams))}, {"loss": loss}


@dataclass(frozen=True)
class AlgorithmEntry:
    """An entry of `ALGORITHMS`: a name, a summary, the paper, the hyperparameters and the class."""

    name: str
    summary: str
    paper: str
    build: Callable[[Problem], Algorithm]
    hparams: Sequence[Hparam | Like] = ()
    caution: Callable[[Mapping[str, float]], str | None] = lambda _: None  # returns a warning for bad settings
    compares_environments: bool = True  # False if one training environment is enough

    def __post_init__(self) -> None:
        if isinstance(self.build, type) and (missing := getattr(self.build, "__abstractmethods__", None)):
            raise SandmaskError(f"{self.build.__name__} cannot be registered: it does not define {min(missing)}.")

    @property
    def kind(self) -> str | None:
        """Its kind in a composition: "sharpness", "rule" or "objective"; None if it cannot be composed."""
        from sandmask.algorithms._composed import kind_of

        return kind_of(self)


class _Algorithms(Registry[AlgorithmEntry]):
    """Algorithms by name, in alphabetical order. A composition such as `SANDMask+VREx` is built from its parts."""

    reserved = "+"

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__(), key=str.casefold))

    def __getitem__(self, name: str) -> AlgorithmEntry:
        parts = [super(_Algorithms, self).__getitem__(part) for part in checked_parts(name)]
        if len(parts) == 1:
            return parts[0]
        from sandmask.algorithms._composed import compose

        return compose(name, parts, self.values())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and all(super(_Algorithms, self).__contains__(part) for part in parts_of(name))

    def module_of(self, name: str) -> str:
        """The module that registered an entry. For a composition, a module outside of this package if there is one."""
        modules = [super(_Algorithms, self).module_of(part) for part in parts_of(name)]
        return next((module for module in modules if module.partition(".")[0] != "sandmask"), modules[0])


ALGORITHMS: Registry[AlgorithmEntry] = _Algorithms("algorithm")
