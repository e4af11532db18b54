"""The driver of a sweep: submits the missing runs to an executor until all are trained."""

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from sandmask._files import replacing
from sandmask._text import counted
from sandmask.errors import SandmaskError
from sandmask.records import RunSpec
from sandmask.records._archive import ARCHIVE_SUFFIX
from sandmask.sweeps._expand import Expansion
from sandmask.sweeps._folder import SweepFolder
from sandmask.sweeps._job import Job, JobOptions, Outcome, run_job, stop_file
from sandmask.sweeps._locks import claimed, turn
from sandmask.sweeps._search import Search
from sandmask.sweeps._stacks import Arrange, Cap, PlannedStack, group, remove_leftovers, unfinished_stacks
from sandmask.sweeps._status import write_work
from sandmask.sweeps.executors import InlineExecutor

POLL_SECONDS = 0.3
LOSSES = 20  # lost workers in a row, without a finished run in between, before their runs are given up
LONGEST = 400  # characters of an error in a message


@dataclass
class SweepResult:
    """The result of a sweep. `failed` has the runs that could not be trained, with the reasons.

    `left` counts the runs that a time limit left for later.
    """

    done: int = 0
    left: int = 0
    failed: dict[str, str] = field(default_factory=dict)


class _TimeIsUpError(Exception):
    """The time limit was reached while stacks train."""


def run_sweep(
    folder: SweepFolder,
    expansion: Expansion,
    options: JobOptions,
    executor: Callable[[], Executor],
    cap: Cap,
    notice: Callable[[str], None] = lambda _: None,
    arrange: Arrange = list,
    search: Search | None = None,
    work: Callable[[RunSpec], float] | None = None,
) -> SweepResult:
    """Train every run that is missing in the folder.

    An interrupt stops the jobs, which save, and is raised again. Runs that another process is training are waited for.
    The time limit of `options` also stops the jobs. Stacks that are not expected to finish by then are not started.

    :param folder: the sweep's folder.
    :param expansion: all runs, from `expand`.
    :param options: options of the jobs.
    :param executor: function that builds the executor.
    :param cap: function of the specs of a stack that returns its largest size.
    :param notice: called with messages for the user.
    :param arrange: puts stacks into the order of training: see `Estimator.arrange`.
    :param search: proposes runs instead of those of `expansion`.
    :param work: function of a run that returns the work of its steps, for the time left: see `Estimator.step_work`.
    """
    options = replace(options, session=options.session or uuid.uuid4().hex[:12])
    return _Driver(folder, expansion, options, executor, cap, notice, arrange, search, work).run()


@dataclass
class _Driver:
    """The arguments of `run_sweep`, the result so far, and the losses of workers in a row."""

    folder: SweepFolder
    expansion: Expansion
    options: JobOptions
    executor: Callable[[], Executor]
    cap: Cap
    notice: Callable[[str], None]
    arrange: Arrange
    search: Search | None
    work: Callable[[RunSpec], float] | None
    works: dict[str, float] = field(default_factory=dict)
    result: SweepResult = field(default_factory=SweepResult)
    late: set[str] = field(default_factory=set)  # runs that are not expected to finish within the time limit
    losses: int = 0
    done_at_loss: int = -1

    def run(self) -> SweepResult:
        self.folder.stacks.mkdir(parents=True, exist_ok=True)
        waiting = False
        while not self._time_is_up() and (missing := self._missing()):
            stacks = self._plan(missing)
            if stacks:
                waiting = False
                self._round(stacks)
                continue
            if not waiting:
                self.notice(
                    f"Another process is training what is missing ({counted(len(missing), 'run')}); waiting for it."
                )
                waiting = True
            time.sleep(POLL_SECONDS)
        self.result.left = self._left() if self.late or self._time_is_up() else 0
        self.result.done = len(self.expansion.runs) - len(self.result.failed) - self.result.left
        return self.result

    def _time_is_up(self) -> bool:
        return self.options.ends is not None and time.time() >= self.options.ends

    def _left(self) -> int:
        runs = self.expansion.runs if self.search is None else self.search.runs()
        ended = self.folder.finished() | self.result.failed.keys()
        return len(self.expansion.runs) - sum(run.id in ended for run in runs)

    def _missing(self) -> list[RunSpec]:
        runs = self.expansion.runs if self.search is None else self.search.propose(self.result.failed)
        settled = self.folder.finished() | self.result.failed.keys() | self.late
        return [run for run in runs if run.id not in settled]

    def _note_work(self, missing: Sequence[RunSpec]) -> None:
        """Write the work of new runs. If this fails, time is estimated without it, and jobs report the error."""
        new = [run for run in missing if run.id not in self.works]
        if self.work is not None and new:
            try:
                self.works |= {run.id: self.work(run) for run in new}
                write_work(self.folder, self.works)
            except Exception:  # noqa: BLE001
                self.work = None

    def _plan(self, missing: Sequence[RunSpec]) -> list[PlannedStack]:
        """Arrange runs into stacks, unfinished stacks first. Runs that a process trains now are left out."""
        self._note_work(missing)
        with turn(self.folder.stacks):
            busy, finished = claimed(self.folder.stacks), self.folder.finished()
            if not busy:
                remove_leftovers(self.folder)
            free = [run for run in missing if run.id not in busy | finished]
            begun = unfinished_stacks(self.folder, free, finished, self.cap, idle=not busy)
        taken = {run.id for stack in begun for run in stack.specs}
        return begun + self.arrange(group([run for run in free if run.id not in taken], self.cap))

    def _round(self, stacks: Sequence[PlannedStack]) -> None:
        """Train stacks until all end, or until the time limit. Unfinished ones are planned again."""
        futures: dict[Future[Outcome], PlannedStack] = {}
        try:
            self._train(stacks, futures)
        except _TimeIsUpError:  # stacks may have finished or failed while the executor shut down
            for future in futures:
                if not future.cancelled() and future.done() and future.exception() is None:
                    self._note(future.result())

    def _train(self, stacks: Sequence[PlannedStack], futures: dict[Future[Outcome], PlannedStack]) -> None:
        """Submit stacks and wait for them; a search adds stacks meanwhile. `futures` holds the unfinished ones."""
        with self._open_executor() as executor:
            self._submit(executor, stacks, futures)
            broken: list[PlannedStack] = []
            while futures:
                future = self._first_to_end(futures)
                stack, error = futures.pop(future), future.exception()
                if error is None:
                    self._note(future.result())
                    if future.result().state == "late":
                        self.late.update(spec.id for spec in stack.specs)
                elif isinstance(error, BrokenExecutor):
                    broken.append(stack)
                    death = error
                elif isinstance(error, SandmaskError):  # the executor cannot be used
                    raise error
                else:
                    self._lost([stack], error)
                if self.search is not None and error is None and not self._time_is_up():
                    self._refill(executor, futures)
            if broken:  # one worker died, and the executor gave up all waiting jobs
                self._lost(broken, death)

    def _first_to_end(self, futures: Iterable[Future[Outcome]]) -> Future[Outcome]:
        ends = self.options.ends
        timeout = None if ends is None else min(ends - time.time(), threading.TIMEOUT_MAX)
        try:
            return next(as_completed(futures, timeout))
        except TimeoutError:
            raise _TimeIsUpError from None

    @contextmanager
    def _open_executor(self) -> Iterator[Executor]:
        """The executor, shut down at the end. After an interrupt or an error, its jobs are asked to save and stop."""
        executor = self.executor()
        stop = stop_file(self.folder, self.options.session)
        failed = False
        try:
            yield executor
        except BaseException as error:
            failed = True
            with suppress(OSError):  # a full disk must not hide the first error
                stop.touch()
            if type(error) is KeyboardInterrupt and not isinstance(executor, InlineExecutor):
                self.notice("Workers finish their steps and save. Press Ctrl-C again to stop now.")
            raise
        finally:  # also at a second interrupt
            try:
                executor.shutdown(wait=True, cancel_futures=failed)
            finally:
                with suppress(OSError):
                    stop.unlink(missing_ok=True)

    def _submit(
        self, executor: Executor, stacks: Sequence[PlannedStack], futures: dict[Future[Outcome], PlannedStack]
    ) -> None:
        with suppress(BrokenExecutor):  # stacks that were not submitted are planned again
            for stack in stacks:
                source = self.expansion.sources[stack.specs[0].dataset]
                work = sum(spec.steps * self.works.get(spec.id, 0.0) for spec in stack.specs)
                job = Job(source, tuple(spec.to_json() for spec in stack.specs), self.options, work)
                future = executor.submit(run_job, job)
                futures[future] = stack
                if self.search is not None and future.done():  # its result may change the next proposals
                    return

    def _refill(self, executor: Executor, futures: dict[Future[Outcome], PlannedStack]) -> None:
        """Submit new proposals, and the rest of a stack that was stopped to prune runs."""
        taken = {run.id for stack in futures.values() for run in stack.specs}
        self._submit(executor, self._plan([run for run in self._missing() if run.id not in taken]), futures)

    def _note(self, outcome: Outcome) -> None:
        # Files of a worker that does not share this disk, models first: a run with records counts as done.
        for name in sorted(outcome.archives, key=lambda name: name.endswith(ARCHIVE_SUFFIX)):
            target = self.folder.stacks / name
            with turn(self.folder.stacks):
                if not target.exists():
                    with replacing(target, durable=True) as temporary:
                        temporary.write_bytes(outcome.archives[name])
        if outcome.state in ("memory", "failed"):
            if outcome.message not in self.result.failed.values():  # once, for the same message of several stacks
                self.notice(f"stack {outcome.stack}: {outcome.message}")
            self.result.failed.update(dict.fromkeys(outcome.runs, outcome.message))

    def _lost(self, stacks: Sequence[PlannedStack], error: BaseException) -> None:
        """Count a lost worker. Its runs are planned again, unless workers are lost repeatedly and no run finishes."""
        said = f"{type(error).__name__}: {' '.join(str(error).split())[-LONGEST:]}"  # some contain a traceback
        runs = [run.id for stack in stacks for run in stack.specs]
        done = len(self.folder.finished())
        self.losses = self.losses + 1 if done == self.done_at_loss else 1
        self.done_at_loss = done
        if self.losses == 1:  # further losses in a row are only counted
            self.notice(f"a worker was lost ({said}); scheduled again: {counted(len(runs), 'run')}")
        if self.losses > LOSSES:
            reason = f"workers were lost {self.losses} times in a row, most recently by {said}"
            self.result.failed.update(dict.fromkeys(runs, reason))
