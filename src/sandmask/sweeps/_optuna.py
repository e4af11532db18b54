"""The interface to Optuna: distributions, samplers, pruners, and studies in a journal file."""

import inspect
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from sandmask._files import lock
from sandmask.errors import SandmaskError
from sandmask.hparams import Choice, Constant, Hparam, LogUniform, Uniform, seed_hash
from sandmask.records import RunSpec
from sandmask.registry import closest

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import JournalStorage

_SUFFIX = "Sampler"
_NOT_BY_NAME = ("base", "basega", "grid", "partialfixed")  # they need arguments
WARM_UP = 3  # no run is pruned by the median in the first third of its steps
REDUCTION = 3  # Hyperband keeps one run in three at a ninth and at a third of the steps


def require() -> None:
    """Raise an error if Optuna is not installed; otherwise, reduce its log to warnings."""
    if find_spec("optuna") is None:
        raise SandmaskError("--search optuna needs Optuna. Install it with: pip install 'sandmask[optuna]'")
    from optuna.logging import WARNING, set_verbosity

    set_verbosity(WARNING)


def sampler_name(name: str) -> str:
    """The short name of a sampler: "tpe" for "TPE" or "TPESampler"; an unknown name is an error."""
    plain, known = name.lower().replace("-", "").removesuffix(_SUFFIX.lower()), sorted(_samplers())
    if plain not in known:
        raise SandmaskError(f"Unknown sampler {name!r}. {closest(plain, known)}")
    return plain


def _samplers() -> dict[str, Callable[..., "BaseSampler"]]:
    require()
    from optuna import samplers

    names = {name.removesuffix(_SUFFIX).lower(): name for name in samplers.__all__ if name.endswith(_SUFFIX)}
    return {short: getattr(samplers, name) for short, name in names.items() if short not in _NOT_BY_NAME}


def make_sampler(name: str, seed: int, number: int) -> "BaseSampler":
    """The sampler of proposal `number`. It does not depend on earlier calls, so a search can be interrupted."""
    build = _samplers()[name]
    # All points of a quasi-Monte-Carlo sequence have the same seed. Other samplers would propose the same point again.
    options = {"seed": seed if name == "qmc" else seed_hash(seed, number), "constant_liar": True}
    known = inspect.signature(build).parameters
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return build(**{option: value for option, value in options.items() if option in known})


def rehearse(sampler: str, ranges: "dict[str, BaseDistribution]") -> None:
    """Make a few proposals in memory, to find errors before anything is written."""
    from optuna import create_study

    try:
        study = create_study(sampler=make_sampler(sampler, 0, 0))
        for _ in range(3):
            study.tell(study.ask(ranges), 0.0)
    except ImportError as error:
        raise SandmaskError(f"The sampler {sampler!r} needs another package: pip install {error.name}") from error
    except ValueError as error:
        raise SandmaskError(f"The sampler {sampler!r} cannot search here: {error}") from error


def make_pruner(name: str, spec: RunSpec) -> "BasePruner":
    """The pruner of runs like this one."""
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

    if name == "median":
        return MedianPruner(n_warmup_steps=spec.steps // WARM_UP)
    if name == "hyperband":
        least = max(spec.steps // REDUCTION**2, spec.checkpoint_every)
        return HyperbandPruner(min(least, spec.steps), spec.steps, REDUCTION)
    return NopPruner()


def distribution(hparam: Hparam) -> "BaseDistribution | None":
    """The range of a hyperparameter as a distribution of Optuna; None for a constant."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    draw = hparam.draw
    if isinstance(draw, Constant):
        return None
    if isinstance(draw, Choice):
        return CategoricalDistribution(draw.values)
    if isinstance(draw, LogUniform):
        low, high = draw.base**draw.low, draw.base**draw.high
    elif isinstance(draw, Uniform):
        low, high = draw.low, draw.high
    else:
        raise SandmaskError(f"{hparam.name} cannot be searched: {draw} is not a range. Set it with --hparam.")
    log = isinstance(draw, LogUniform)
    if draw.integer:  # rounded down, from below `high`
        return IntDistribution(math.floor(low), math.ceil(high) - 1, log=log)
    return FloatDistribution(low, high, log=log)


class DamagedJournalError(SandmaskError):
    """The content of the journal is not what was written."""


def open_journal(path: Path) -> "JournalStorage":
    """The studies in a journal file, which is created if it does not exist.

    An incomplete last line, left by a killed process, is removed, because the next line would be appended to it.
    """
    require()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    guard = _Lock(path.with_suffix(".lock"))
    if not _ends_whole(path):
        with guard.held():  # waits for a program that is writing
            if not _ends_whole(path):
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    try:
        if _last_line_error(path) is not None:
            with guard.held():
                if (damage := _last_line_error(path)) is not None:
                    raise damage
        return JournalStorage(JournalFileBackend(str(path), lock_obj=guard))  # type: ignore[arg-type]
    except OSError:
        raise
    except Exception as error:  # a damaged line may raise anything when it is replayed
        said = " ".join(str(error).split())
        raise DamagedJournalError(f"{path} is damaged: {said}. Rerun the sweep to rebuild it.") from error


def _ends_whole(path: Path) -> bool:
    """Whether the last line of a file is complete."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        return file.read() in (b"\n", b"")
    return True


def _last_line_error(path: Path) -> ValueError | None:
    """The error in the last line of a journal, or None. Optuna ignores such an error until another line follows."""
    try:
        for line in path.read_bytes().splitlines()[-1:]:
            json.loads(line)
    except FileNotFoundError:
        return None
    except ValueError as error:
        return error
    return None


class _Lock:
    """A lock on the journal that is released when its process ends, even if it is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def acquire(self) -> bool:
        """Wait for the lock."""
        file = FileIO(self._path, "a+")
        lock(file, wait=True)
        self._file = file
        return True

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock within this context."""
        self.acquire()
        try:
            yield
        finally:
            self.release()
