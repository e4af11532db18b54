import os
import signal
import threading
import time

import pytest

from sandmask import _signals
from sandmask._signals import TerminatedError, deferred, exit_status, sigterm_raises, stop_requested


def test_sigterm_is_an_exception_inside_and_the_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TerminatedError) as caught, sigterm_raises():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert exit_status(caught.value) == 143
    assert exit_status(KeyboardInterrupt()) == 130


def test_only_the_first_sigterm_raises() -> None:
    saved = []

    def terminated_twice() -> None:
        with sigterm_raises():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                saved.append(True)

    with pytest.raises(TerminatedError):
        terminated_twice()
    assert saved == [True]


def test_an_ignored_sigterm_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with sigterm_raises():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_may_use_it() -> None:
    done = []

    def work() -> None:
        with sigterm_raises():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_ends_at_sigterm() -> None:
    with sigterm_raises():
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM


@pytest.mark.parametrize(("slow", "first"), [(True, True), (False, True), (True, False)])
def test_a_deferred_ctrl_c_says_that_it_waits_where_a_step_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], slow: bool, first: bool
) -> None:
    monkeypatch.setattr(_signals, "SLOW_SECONDS", 0.0 if slow else 60.0)
    monkeypatch.setattr(_signals, "is_first", lambda: first)  # of several processes

    def interrupted() -> None:
        with deferred(signal.SIGINT):
            assert not stop_requested()
            time.sleep(0.01)
            signal.raise_signal(signal.SIGINT)
            assert stop_requested() == signal.SIGINT

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    said = capsys.readouterr().err
    assert said == ("Finishing the current step. Press Ctrl-C again to stop now.\n" if slow and first else "")
    assert stop_requested() == 0


def test_a_second_ctrl_c_is_not_deferred() -> None:
    done = []

    def interrupted_twice() -> None:
        with deferred(signal.SIGINT):
            signal.raise_signal(signal.SIGINT)
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert done == ["first"]
