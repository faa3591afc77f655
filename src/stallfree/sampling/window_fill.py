"""The processes that prepare the replacements of a Smart Cache while training goes on."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext

import numpy as np
import torch

from stallfree.errors import WaitError
from stallfree.ipc.fork_guard import Owner
from stallfree.ipc.process import Child, Parent, end_all
from stallfree.platform import how_it_ended
from stallfree.sampling.plans.window import WindowPlan
from stallfree.sampling.window_source import Window

log = logging.getLogger("stallfree")

_LOOK_SECONDS = 0.01
_STOP_SECONDS = 5.0
_LIVES = 3
_CHUNK = 8
"""Samples that are fetched side by side."""


@dataclass
class FillSetup:
    """What a fill process is given.

    Attributes:
        window: says which samples come next, and stores them.
        fillers: number of fill processes; each takes its part of the replacements.
    """

    window: Window
    fillers: int
    _tidied: tuple[int, int] = field(default=(-1, -1), init=False)
    _warned: bool = field(default=False, init=False)

    def work(self, filler: int) -> bool:
        """Do a little of what is to be done for the next epoch; whether there was anything."""
        window, plan = self.window, self.window.plan
        epoch = window.state.epoch
        start = window.state.start(epoch) if epoch >= 0 else None
        if start is None:
            return False
        first = start + plan.size
        end = min((epoch + 1) * plan.replace, first) + plan.size
        coming = plan.sequence(first, end)
        if self._tidied != (epoch, start) and window.tidy(np.concatenate((plan.window(start), coming))):
            self._tidied = (epoch, start)
        places = np.arange(first, first + len(coming))
        todo = window.lacking(coming, places) & (places % self.fillers == filler)
        at = np.flatnonzero(todo)[:_CHUNK]
        if len(at) == 0:
            return False
        full = window.fill(coming[at], places[at])
        if full and not self._warned and len(coming) <= plan.replace:  # for more, after a delay, there is no room
            self._warned = True
            log.warning(
                "the cache is full before all samples of the window are in it: the others are read each time. They are "
                "larger than the first ones; give capacity in place of cache_num"
            )
        return True


class FillProcesses:
    """The fill processes of one data set object. Those of other ranks stand by, to take over if these die.

    Args:
        setup: is sent to each.
        context: starts them.
    """

    def __init__(self, setup: FillSetup, context: BaseContext) -> None:
        self._setup = setup
        self._context = context
        self._processes: list[Child] = []
        self._deaths = 0
        self._owner = Owner()

    @property
    def running(self) -> bool:
        """Whether the processes run."""
        return any(process.alive for process in self._processes)

    def start(self) -> None:
        """Start those that do not run."""
        self._bury()
        for _ in range(self._setup.fillers - len(self._processes)):
            self._processes.append(Child(fill_main, self._setup, context=self._context, name="stallfree-fill"))

    def restart(self, plan: WindowPlan) -> None:
        """Prepare the samples of another plan from now on."""
        started = bool(self._processes)
        self.stop()
        self._setup.window.plan = plan
        if started:
            self.start()

    def look_after(self) -> None:
        """Replace those that died, until that has happened too often. Does nothing if none was started."""
        dead = self._bury() if self._owner.is_here else []
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
        """Forget those that died or hang at their start; their exit codes."""
        for process in self._processes:
            with contextlib.suppress(EOFError):
                process.receive()  # its report
        dead = [process for process in self._processes if process.overdue or not process.alive]
        self._processes = [process for process in self._processes if process not in dead]
        for process in dead:
            process.end(0.0)
        return [process.exit_code for process in dead]

    def stop(self) -> None:
        """End them; those that do not end in 5 s are killed."""
        if self._owner.is_here:
            processes, self._processes = self._processes, []
            end_all(processes, _STOP_SECONDS)


def fill_main(parent: Parent, setup: FillSetup) -> None:
    """Prepare samples until this process shall end."""
    parent.report()
    torch.set_num_threads(1)
    window = setup.window
    window.reader.split.quiet = True
    mine: int | None = None
    busy = False
    while not parent.wait(0.0 if busy else _LOOK_SECONDS):
        if mine is None:
            mine = next((number for number in range(setup.fillers) if window.state.claim(number)), None)
        with contextlib.suppress(WaitError):  # the lock of writers was not free in time
            busy = mine is not None and (setup.work(mine) or _stand_in(setup, mine))
    window.reader.close()


def _stand_in(setup: FillSetup, mine: int) -> bool:
    """Do a little of the part of processes that have died; whether there was anything."""
    window = setup.window
    for number in range(setup.fillers):
        if number != mine and window.state.claim(number):
            try:
                if setup.work(number):
                    return True
            finally:
                window.state.release(number)
    return False
