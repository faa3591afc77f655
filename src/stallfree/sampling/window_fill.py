"""The processes that prepare the replacements of a Smart Cache during training."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext

import numpy as np
import torch

from stallfree.errors import WaitError
from stallfree.ipc.forked import Owner
from stallfree.ipc.process import Child, Parent, end_all
from stallfree.platform import how_it_ended
from stallfree.sampling.plans.window import WindowPlan
from stallfree.sampling.window_source import Window

log = logging.getLogger("stallfree")

_LOOK_SECONDS = 0.01
_STOP_SECONDS = 5.0
_LIVES = 3
_CHUNK = 8
"""Samples fetched concurrently."""


@dataclass
class FillSetup:
    """The arguments of a fill process.

    Attributes:
        window: determines the next samples, and stores them.
        fillers: number of fill processes; each prepares its part of the replacements.
    """

    window: Window
    fillers: int
    _tidied: tuple[int, int] = field(default=(-1, -1), init=False)
    _warned: bool = field(default=False, init=False)

    def work(self, filler: int) -> bool:
        """Prepare one chunk for the next epoch; return whether there was work."""
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
        if full and not self._warned and len(coming) <= plan.replace:  # after a delay, more does not fit
            self._warned = True
            log.warning(
                "the cache is full before all samples of the window are in it: the others are read each time. They are "
                "larger than the first ones; give capacity in place of cache_num"
            )
        return True


class FillProcesses:
    """The fill processes of one data set object. Those of other ranks are standbys that take over if these die.

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
        """Whether the processes are running."""
        return any(process.alive for process in self._processes)

    def start(self) -> None:
        """Start the processes that are not running."""
        self._bury()
        for _ in range(self._setup.fillers - len(self._processes)):
            self._processes.append(Child(fill_main, self._setup, context=self._context, name="stallfree-fill"))

    def restart(self, plan: WindowPlan) -> None:
        """Restart with another plan."""
        started = bool(self._processes)
        self.stop()
        self._setup.window.plan = plan
        if started:
            self.start()

    def look_after(self) -> None:
        """Restart processes that died, up to a limit. Does nothing if none was started."""
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
        """Remove processes that died or hang at their start; return their exit codes."""
        for process in self._processes:
            with contextlib.suppress(EOFError):
                process.receive()  # its error report
        dead = [process for process in self._processes if process.overdue or not process.alive]
        self._processes = [process for process in self._processes if process not in dead]
        for process in dead:
            process.end(0.0)
        return [process.exit_code for process in dead]

    def stop(self) -> None:
        """Stop the processes; kill those that do not exit in 5 s."""
        if self._owner.is_here:
            processes, self._processes = self._processes, []
            end_all(processes, _STOP_SECONDS)


def fill_main(parent: Parent, setup: FillSetup) -> None:
    """Prepare samples until this process is to stop."""
    parent.report()
    torch.set_num_threads(1)
    window = setup.window
    window.reader.split.quiet = True
    mine: int | None = None
    busy = False
    while not parent.wait(0.0 if busy else _LOOK_SECONDS):
        if mine is None:
            mine = next((number for number in range(setup.fillers) if window.state.claim(number)), None)
        with contextlib.suppress(WaitError):  # the writer lock timed out
            busy = mine is not None and (setup.work(mine) or _stand_in(setup, mine))
    window.reader.close()


def _stand_in(setup: FillSetup, mine: int) -> bool:
    """Prepare one chunk of the part of dead processes; return whether there was work."""
    window = setup.window
    for number in range(setup.fillers):
        if number != mine and window.state.claim(number):
            try:
                if setup.work(number):
                    return True
            finally:
                window.state.release(number)
    return False
