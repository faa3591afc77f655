"""Several jobs at once: forked processes that begin together, and what they take of the host's memory.

Needs the standard library only.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Longest wait for the others, in seconds."""

Meet = Callable[[], None]
"""Waits until all jobs and the process that started them have called it as often."""


class TeamError(RuntimeError):
    """A job failed. The message holds what it said."""


class Team:
    """`count` forked processes that run `target(number, meet, *arguments)` at once.

    What `target` returns must be picklable. Use it with `with`: at the end no process is left.
    """

    def __init__(self, count: int, target: Callable[..., Any], *arguments: Any) -> None:
        context = get_context("fork")
        self._gate = context.Barrier(count + 1)
        self._jobs = []
        for number in range(count):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(target, number, self._gate, there, arguments))
            process.start()
            there.close()
            self._jobs.append((process, here))

    def meet(self) -> None:
        """Wait for all jobs. Raises `TeamError` if one of them has failed."""
        try:
            self._gate.wait(PATIENCE)
        except threading.BrokenBarrierError:
            self.results()
            raise TeamError(f"the jobs have not met within {PATIENCE:.0f} s") from None

    def results(self) -> list[Any]:
        """What each job returned. Raises `TeamError` for one that failed."""
        found: list[Any] = []
        for number, (_, pipe) in enumerate(self._jobs):
            try:
                worked, what = pipe.recv() if pipe.poll(PATIENCE) else (False, f"no result within {PATIENCE:.0f} s")
            except EOFError:
                worked, what = False, "it died"
            if not worked and what is not None:
                raise TeamError(f"job {number}: {what}")
            found.append(what)
        return found

    def __enter__(self) -> Team:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed:
            self._gate.abort()
        for process, pipe in self._jobs:
            process.join(5.0 if failed else 30.0)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


def _run(target: Callable[..., Any], number: int, gate: Any, pipe: Connection, arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, target(number, lambda: gate.wait(PATIENCE), *arguments)))
    except threading.BrokenBarrierError:
        pipe.send((False, None))  # it is another one that failed
    except BaseException:
        gate.abort()
        pipe.send((False, traceback.format_exc()))


# -- memory -----------------------------------------------------------------------------------------------------------


def family(pid: int | None = None) -> list[int]:
    """This process, or `pid`, and all processes below it."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(status.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, todo = [], [os.getpid() if pid is None else pid]
    while todo:
        found.append(todo.pop())
        todo += parents.get(found[-1], [])
    return found


def shared_pss(pids: list[int]) -> int:
    """Bytes of shared memory that these processes use, each page counted once if only they use it."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss_Shmem:"))
    return total


def bytes_below(folder: Path, *, without: str = "") -> int:
    """Bytes that the files below `folder` take, those in the folder called `without` left out."""
    total = 0
    for here, _, files in os.walk(folder):
        if without and without in Path(here).relative_to(folder).parts:
            continue
        for file in files:
            try:
                total += os.stat(os.path.join(here, file)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
