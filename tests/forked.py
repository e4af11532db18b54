"""The command line in a process forked from a server that has imported torch, which starts in milliseconds."""

import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path


def start(*arguments: str, stderr: Path | None = None, told: Mapping[str, str] | None = None) -> BaseProcess:
    """Start `sandmask` with arguments, as the leader of a process group. What it prints on stderr goes to a file.

    `told` are variables of its environment, such as torchrun sets.
    """
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(arguments, stderr, told or {}))
    process.start()
    return process


def _run(arguments: tuple[str, ...], stderr: Path | None, told: Mapping[str, str]) -> None:
    from sandmask.cli import main

    os.setsid()
    os.environ.update(told)
    for descriptor, target in ((1, None), (2, stderr)):
        os.dup2(os.open(target or os.devnull, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = ["sandmask", *arguments]
    main()
