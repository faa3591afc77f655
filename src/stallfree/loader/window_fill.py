"""The processes that prepare the replacements of a Smart Cache while training goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

import numpy as np
import numpy.typing as npt
import torch

from stallfree.errors import StallfreeError, WaitError
from stallfree.loader.reader import Reader
from stallfree.loader.window_state import WindowState
from stallfree.loader.worker import orphaned
from stallfree.plans.window import WindowPlan
from stallfree.platform import begin_child, how_it_ended, interrupts_later

log = logging.getLogger("stallfree")

Ids = npt.NDArray[np.int64]

_LOOK_SECONDS = 0.01
_STOP_SECONDS = 5.0
_LIVES = 3
_CHUNK = 8
"""Samples that are fetched side by side."""


@dataclass
class FillSetup:
    """What it takes to fill.

    Attributes:
        reader: prepares the deterministic part, and stores it.
        state: says where the window is.
        plan: says which samples come next.
        fillers: number of fill processes; each takes its part of the replacements.
    """

    reader: Reader
    state: WindowState
    plan: WindowPlan
    fillers: int
    _tidied: tuple[int, int] = field(default=(-1, -1), init=False)
    _told: bool = field(default=False, init=False)

    def work(self, filler: int) -> bool:
        """Do a little of what is to be done for the next epoch; whether there was anything."""
        epoch = self.state.epoch
        start = self.state.start(epoch) if epoch >= 0 else None
        if start is None:
            return False
        plan = self.plan
        first = start + plan.size
        end = min((epoch + 1) * plan.replace, first) + plan.size
        coming = plan.sequence(first, end)
        if self._tidied != (epoch, start) and self.tidy(np.concatenate((plan.window(start), coming))):
            self._tidied = (epoch, start)
        places = np.arange(first, first + len(coming))
        todo = ~self.reader.cache.resident(coming) & (self.state.unkept[coming] != places + 1)  # type: ignore[union-attr]
        todo &= places % self.fillers == filler
        at = np.flatnonzero(todo)[:_CHUNK]
        if len(at) == 0:
            return False
        full = self.fill(coming[at], places[at])
        if full and not self._told and len(coming) <= plan.replace:  # for more, after a delay, there is no room
            self._told = True
            log.warning(
                "the cache is full before all samples of the window are in it: the others are read each time. They are "
                "larger than the first ones; give capacity in place of cache_num"
            )
        return True

    def fill(self, ids: Ids, places: Ids) -> bool:
        """Prepare and store `ids`; those that cannot be had or stored are noted, so that nobody waits for them.

        Returns whether there was no room for some.
        """
        failed = 0
        try:
            failed = self.reader.fill(ids)
        except StallfreeError:  # met again, and heard of, by whoever asks for the sample
            failed = len(ids)
        there = self.reader.cache.resident(ids)  # type: ignore[union-attr]
        self.state.unkept[ids[~there]] = (places + 1)[~there]
        return int(np.count_nonzero(~there)) > failed

    def tidy(self, keep: Ids) -> bool:
        """Drop all samples but `keep`; False if the lock of writers is not free in time."""
        cache = self.reader.cache
        assert cache is not None
        there = cache.resident(np.arange(cache.num_ids))
        there[keep] = False
        try:
            if there.any():
                cache.drop(np.flatnonzero(there))  # it is of this host
        except WaitError:
            return False
        return True


class FillCrew:
    """The fill processes of one data set object. Those of other ranks stand by, to take over if these die.

    Args:
        setup: what it takes to fill.
        context: starts the processes.
    """

    def __init__(self, setup: FillSetup, context: BaseContext) -> None:
        self._setup = setup
        self._context = context
        self._processes: list[tuple[BaseProcess, Connection]] = []
        self._deaths = 0

    @property
    def running(self) -> bool:
        """Whether the processes run."""
        return any(process.is_alive() for process, _ in self._processes)

    def start(self) -> None:
        """Start those that do not run."""
        self._bury()
        direct = self._context.get_start_method() != "forkserver"
        for _ in range(self._setup.fillers - len(self._processes)):
            theirs, ours = self._context.Pipe(duplex=False)
            process = self._context.Process(  # type: ignore[attr-defined]
                target=fill_main,
                args=(theirs, self._setup, os.getpid(), direct),
                name="stallfree-fill",
                daemon=True,
            )
            with interrupts_later(self._context.get_start_method()):
                process.start()
            theirs.close()
            self._processes.append((process, ours))

    def follow(self, plan: WindowPlan) -> None:
        """Prepare the samples of another plan from now on."""
        started = bool(self._processes)
        self.stop()
        self._setup.plan = plan
        if started:
            self.start()

    def look_after(self) -> None:
        """Replace those that died, until that has happened too often. Does nothing if none was started."""
        dead = self._bury()
        if dead:
            self._deaths += len(dead)
            more = self._deaths < _LIVES * self._setup.fillers
            log.warning(
                "a fill process died: %s; %s",
                how_it_ended(dead[0]),
                "it is replaced" if more else "it is not replaced any more: samples are prepared as they are asked for",
            )
            if more:
                self.start()

    def _bury(self) -> list[int | None]:
        """Forget the dead; their exit codes."""
        dead = [pair for pair in self._processes if not pair[0].is_alive()]
        self._processes = [pair for pair in self._processes if pair not in dead]
        codes = [process.exitcode for process, _ in dead]
        for process, ours in dead:
            ours.close()
            process.close()
        return codes

    def stop(self) -> None:
        """End them; those that do not end in 5 s are killed."""
        processes, self._processes = self._processes, []
        for _, ours in processes:  # told in words: a forked process may still hold our end of the pipe
            with contextlib.suppress(OSError):
                ours.send_bytes(b"stop")
            ours.close()
        for process, _ in processes:
            process.join(_STOP_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def fill_main(connection: Connection, setup: FillSetup, parent: int, child: bool) -> None:
    """The life of a fill process: until its parent says something on `connection`, or dies."""
    begin_child()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):
        poller.register(os.pidfd_open(parent), select.POLLIN)
    setup.reader.quiet = True
    mine: int | None = None
    busy = False
    while not poller.poll(0 if busy else _LOOK_SECONDS * 1000) and not orphaned(parent, child):
        if mine is None:
            mine = next((number for number in range(setup.fillers) if setup.state.claim(number)), None)
        with contextlib.suppress(WaitError):  # the lock of writers was not free in time
            busy = mine is not None and (setup.work(mine) or _stand_in(setup, mine))
    setup.reader.close()


def _stand_in(setup: FillSetup, mine: int) -> bool:
    """Do a little of the part of those who are not there; whether there was anything."""
    for number in range(setup.fillers):
        if number != mine and setup.state.claim(number):
            try:
                if setup.work(number):
                    return True
            finally:
                setup.state.release(number)
    return False
