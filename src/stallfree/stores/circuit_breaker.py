"""One circuit breaker per server: a failure opens it, and a ping closes it when the server answers again.

While a breaker is open, no request is sent. Once its pause is over, the next attempt to use the server starts one ping
in a thread of its own, so no batch waits for it. There is no thread between pings.

The state of a breaker is three numbers in shared memory: a process shares them with its forked children, and through a
file with all processes of its node. There is no lock between processes. A number that a race or a dead process leaves
wrong is corrected by the next ping; until then, samples of that server are misses, or one more process waits for it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stallfree.ipc.shared_array import shared_array
from stallfree.platform import at_fork

LONGEST = 8.0
"""Longest pause between two pings, in seconds. A timeout of 250 ms per pause is then 3% of the time."""

_SOON = 5.0
"""Seconds after a successful ping within which another failure doubles the pause."""

_DUE, _PAUSE, _BACK = range(3)  # time of the next ping, 0 while closed; pause; time of the last successful ping
_CELLS = 3
_CELL_SIZE = 8


class Breaker:
    """The state of one server. It begins closed: requests may be sent.

    The first ping is due at once, because the failure may be that of one busy process. Further pings follow after a
    pause each. A server that fails again within 5 s of a successful ping gets twice the pause, up to 8 s: a link that
    lets only pings through would otherwise cost a timeout every few moments.

    Safe in threads and after a fork.

    Args:
        ping: connects to the server and raises an error if it does not answer. Called in a thread of its own.
        seconds: shortest pause between two pings.

    Attributes:
        trips: how often it was opened by this process and, before the fork, by its parent.
    """

    def __init__(self, ping: Callable[[], object], seconds: float = 0.5) -> None:
        self.trips = 0
        self._ping, self._seconds, self._longest = ping, seconds, max(LONGEST, seconds)
        self._cells: memoryview[float] = memoryview(mmap.mmap(-1, _CELLS * _CELL_SIZE)).cast("d")
        self._pinging = 0  # the id of the process in which a ping is under way
        self._ended = False

    def share(self, cells: memoryview[float]) -> None:
        """Use `cells`, three numbers of `shared_cells`, in common with other processes."""
        self._cells = cells

    @property
    def closed(self) -> bool:
        """Whether requests may be sent. If not, starts a ping if one is due."""
        if self._cells[_DUE] == 0:
            return True
        if self._claim():
            try:
                threading.Thread(target=self._try, name="stallfree-ping", daemon=True).start()
            except RuntimeError:  # no more threads, or the interpreter is ending
                self._pinging = 0
        return False

    @property
    def pause(self) -> float:
        """Seconds between two pings now."""
        pause: float = self._cells[_PAUSE]
        return pause if self._seconds <= pause <= self._longest else self._seconds

    def trip(self) -> None:
        """Open it. Several calls for one failure count once."""
        with _lock:
            cells, now = self._cells, time.monotonic()
            if cells[_DUE] == 0:
                again = 0 < cells[_BACK] <= now < cells[_BACK] + _SOON
                cells[_PAUSE] = min(2 * self.pause, self._longest) if again else self._seconds
                cells[_DUE] = now + self.pause if again else now
                self.trips += 1

    def forget(self) -> None:
        """Start no more pings, and leave what is shared: an open breaker stays open."""
        self._ended = True
        self._cells = memoryview(bytearray(self._cells)).cast("d")

    def _claim(self) -> bool:
        """Whether this thread is to ping now. If so, the next ping is due after another pause."""
        with _lock:
            cells, now, here = self._cells, time.monotonic(), os.getpid()
            waits = now < cells[_DUE] <= now + self._longest  # any other time is over, or cannot be
            if self._ended or self._pinging == here or cells[_DUE] == 0 or waits:
                return False
            cells[_DUE], self._pinging = now + self.pause, here
            return True

    def _try(self) -> None:
        """Ping, and close it if that succeeds."""
        try:
            self._ping()
        except Exception:
            if self._cells[_DUE]:  # else another process has closed it
                self._cells[_DUE] = time.monotonic() + self.pause
        else:
            self._cells[_BACK] = time.monotonic()
            self._cells[_DUE] = 0
        finally:
            self._pinging = 0


_lock = threading.RLock()  # between the threads of a process, for microseconds
at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def shared_cells(file: Path, count: int) -> list[memoryview[float]]:
    """The state of `count` breakers, for all processes that give the same `file`, which is made if it is missing.

    Without room for the file, this process shares it with its children alone.
    """
    cells: memoryview[Any] = shared_array(file, np.float64, count * _CELLS).data
    return [cells[at : at + _CELLS] for at in range(0, count * _CELLS, _CELLS)]
