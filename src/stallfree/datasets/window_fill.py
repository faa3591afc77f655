"""The processes that prepare the samples which join the window of a Smart Cache."""

from __future__ import annotations

import contextlib
import logging
import weakref
from itertools import islice
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch

from stallfree.datasets.reader import Reader
from stallfree.datasets.window import Window
from stallfree.errors import StallfreeError, WaitError
from stallfree.ipc.forked import Owner
from stallfree.ipc.process import Child, Parent, end_all
from stallfree.platform import how_it_ended

log = logging.getLogger("stallfree")

_LOOK_SECONDS = 0.01
_STOP_SECONDS = 5.0
_LIVES = 3
_CHUNK = 8
"""Samples fetched concurrently."""


class FillProcesses:
    """The fill processes of one data set object. Those of other ranks are standbys that take over if these die.

    Args:
        window, reader: of the data set.
        count: number of processes.
        context: starts them.
    """

    def __init__(self, window: Window, reader: Reader, count: int, context: BaseContext) -> None:
        self._window, self._reader, self._count, self._context = window, reader, count, context
        self._processes: list[Child] = []
        self._deaths, self._owner = 0, Owner()
        weakref.finalize(self, _end, self._processes, self._owner)

    @property
    def running(self) -> bool:
        """Whether any process is running."""
        return any(process.alive for process in self._processes)

    def start(self) -> None:
        """Start the processes that are not running."""
        self._remove_dead()
        while len(self._processes) < self._count:
            arguments = self._window, self._reader, self._count
            self._processes.append(Child(fill_main, *arguments, context=self._context, name="stallfree-fill"))

    def look_after(self) -> None:
        """Replace processes that died, up to a limit."""
        dead = self._remove_dead() if self._owner.is_here else []
        if dead:
            self._deaths += len(dead)
            more = self._deaths < _LIVES * self._count
            log.warning(
                "a fill process died: %s; %s",
                how_it_ended(dead[0]),
                "it is replaced" if more else "it is not replaced any more: samples are prepared as they are asked for",
            )
            if more:
                self.start()

    def _remove_dead(self) -> list[int | None]:
        """Remove processes that died or hang at their start; return their exit codes."""
        for process in self._processes:
            with contextlib.suppress(EOFError):
                process.receive()  # its error report
        dead = [process for process in self._processes if process.overdue or not process.alive]
        for process in dead:
            process.end(0.0)
            self._processes.remove(process)
        return [process.exit_code for process in dead]

    def stop(self) -> None:
        """Stop the processes; kill those that do not exit in 5 s."""
        _end(self._processes, self._owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return FillProcesses, (self._window, self._reader, 0, get_context())  # a copy has no processes


def _end(processes: list[Child], owner: Owner) -> None:
    if owner.is_here:
        end_all(processes, _STOP_SECONDS)
        processes.clear()


def fill_main(parent: Parent, window: Window, reader: Reader, fillers: int) -> None:
    """Prepare samples until this process is to stop."""
    parent.report()
    torch.set_num_threads(1)
    reader.split.quiet = True
    working = busy = warned = False
    while not parent.wait(0.0 if busy else _LOOK_SECONDS):
        working = working or any(map(window.claim_filler, range(fillers)))
        if not working:
            continue
        with contextlib.suppress(WaitError):  # the writer lock timed out
            busy, full = _fill(window, reader, fillers)
            if full and not warned:
                warned = True
                log.warning(
                    "the cache is full before all samples of the window are in it, because they are larger than the "
                    "samples that it was measured by: those that do not fit are read each time"
                )
    reader.close()


def _fill(window: Window, reader: Reader, fillers: int) -> tuple[bool, bool]:
    """Prepare some of the samples that join next; return whether there were any, and whether the cache is full.

    Samples that fail are marked, so that no process waits for them. Their error is raised when they are asked for.
    """
    ids, places = window.coming()
    lacking = np.flatnonzero(window.lacking(ids, places)).tolist()
    share = min(_CHUNK, -(-len(lacking) // fillers))
    chosen = list(islice((at for at in lacking if window.claim_place(int(places[at]))), share))
    if not chosen:
        return False, False
    ids, places, failed = ids[chosen], places[chosen], 0
    try:
        try:
            failed = reader.fill(ids)
        except StallfreeError:
            failed = len(ids)
        missing = ~window.cache.resident(ids)
        window.failed[ids[missing]] = places[missing] + 1
    finally:
        for place in places.tolist():
            window.release_place(place)
    return True, int(missing.sum()) > failed
