"""The processes that train one run together, and the exchange between them."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sandmask._torchrun import LostProcessError, OtherProcessError

Reads = Literal["all", "examples", "environments", "within"]


@dataclass(frozen=True)
class Ranks:
    """Process `rank` of `size`. All processes have to call every method that exchanges data.

    `group` sums tensors on their device. `control` exchanges everything else on the CPU.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's part of `count` rows. The sizes of all parts differ by at most one."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def environments(self, n_envs: int) -> tuple[range, range]:
        """The environments of this process, the same number as in other processes, and the rest, which all share."""
        own = n_envs // self.size
        return range(own * self.rank, own * (self.rank + 1)), range(own * self.size, n_envs)

    def rows(self, reads: Reads, n_envs: int, n_examples: int) -> Tensor | None:
        """Return the indices in a minibatch [E * B] of the inputs that this process reads; None if it reads all.

        :param reads: "examples" is the process's part of all E * B examples; "environments" is its own environments and
            its part of the shared ones; "within" is its part of each environment; "all" is everything.
        :param n_envs: number of environments.
        :param n_examples: number of examples of each environment.
        """
        if self.size == 1 or reads == "all":
            return None
        read = torch.zeros(n_envs, n_examples, dtype=torch.bool)
        if reads == "examples":
            read.view(-1)[self._passed(n_envs * n_examples)] = True
        else:
            own, rest = self.environments(n_envs) if reads == "environments" else (range(0), range(n_envs))
            read[own.start : own.stop] = True
            read[rest.start : rest.stop, self._passed(n_examples)] = True
        return read.flatten().nonzero()[:, 0]

    def _passed(self, count: int) -> slice:
        """The rows of a divided pass that this process computes. Fewer rows than processes are not divided."""
        return self.share(count) if count >= self.size else slice(count)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over processes, in place. The result is the same, bit for bit, in all processes."""
        if self.size > 1:
            with _contact():
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Compute the maximum over processes of each element of a tensor on the CPU, in place."""
        if self.size > 1:
            with _contact():
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control)
        return tensor

    def of_first(self, value: Any) -> Any:
        """Return the value of the first process. The values of other processes are ignored."""
        return self.of_all(value if self.first else None)[0]

    def of_all(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of their ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _contact():
            dist.all_gather_object(found, value, group=self.control)
        return found

    def copy_first(self, tensors: list[Tensor]) -> None:
        """Replace the values of tensors by the values in the first process."""
        if self.size > 1:
            with _contact():
                for tensor in tensors:
                    dist.broadcast(tensor, 0, group=self.group)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block in which nothing is exchanged. If it fails in one process, all other processes stop after it."""
        try:
            yield
        except LostProcessError:
            raise
        except BaseException as error:
            with suppress(LostProcessError):
                self.of_all(error if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__)
            raise
        for rank, said in enumerate(self.of_all(None)):
            if isinstance(said, KeyboardInterrupt):
                raise said
            if said is not None:
                raise OtherProcessError(f"Process {rank} of {self.size} stopped: {said}")


@contextmanager
def _contact() -> Iterator[None]:
    """Convert torch's errors, which differ between backends and versions, to `LostProcessError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LostProcessError(
            "Another process of this run has stopped or does not answer. Rerun the same command to continue from the "
            "last checkpoint."
        ) from error


ALONE = Ranks()
