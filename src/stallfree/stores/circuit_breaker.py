"""One circuit breaker per server: a failure opens it, and an answered ping closes it.

While a breaker is open, no request is sent. Once its pause is over, the next attempt to use the server starts one ping
in a separate thread, so no batch waits for it. There is no thread between pings.

The state of a breaker is three numbers in shared memory. A process shares them with its forked children, and through a
file with all processes of its node. There is no lock between processes. A race or a dead process may leave a wrong
number, which the next ping corrects. Until then, samples of that server are misses, or one more process waits for it.
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
"""Maximum pause between two pings, in seconds. A timeout of 250 ms per pause is then 3% of the time."""

_SOON = 5.0
"""Seconds after a successful ping within which another failure doubles the pause."""

_DUE, _PAUSE, _ANSWERED = range(3)  # time of the next ping, 0 while closed; pause; time of the last successful ping
_CELLS = 3
_CELL_SIZE = 8


class CircuitBreaker:
    """The circuit breaker of one server. Initially closed: requests may be sent.

    The first ping is due immediately, because the failure may be that of one busy process. Further pings follow after
    one pause each. If a server fails again within 5 s of a successful ping, the pause doubles, up to 8 s. Otherwise a
    link that passes only pings would cause frequent timeouts.

    Thread-safe and fork-safe.

    Args:
        ping: connects to the server and raises an error if it does not answer. Called in a separate thread.
        seconds: minimum pause between two pings.

    Attributes:
        trips: how often this process and, before the fork, its parent opened it.
    """

    def __init__(self, ping: Callable[[], object], seconds: float = 0.5) -> None:
        self.trips = 0
        self._ping, self._seconds, self._longest = ping, seconds, max(LONGEST, seconds)
        self._cells: memoryview[float] = memoryview(mmap.mmap(-1, _CELLS * _CELL_SIZE)).cast("d")
        self._pinging = 0  # the id of the process with a ping in flight
        self._ended = False

    def share(self, cells: memoryview[float]) -> None:
        """Share `cells`, three numbers of `shared_cells`, with other processes."""
        self._cells = cells

    @property
    def closed(self) -> bool:
        """Whether requests may be sent. If not, starts a ping if one is due."""
        if self._cells[_DUE] == 0:
            return True
        if self._claim():
            try:
                threading.Thread(target=self._try, name="stallfree-ping", daemon=True).start()
            except RuntimeError:  # no more threads, or the interpreter is exiting
                self._pinging = 0
        return False

    @property
    def pause(self) -> float:
        """Current seconds between two pings."""
        pause: float = self._cells[_PAUSE]
        return pause if self._seconds <= pause <= self._longest else self._seconds

    def trip(self) -> None:
        """Open the breaker. Several calls for one failure count once."""
        with _lock:
            cells, now = self._cells, time.monotonic()
            if cells[_DUE] == 0:
                again = 0 < cells[_ANSWERED] <= now < cells[_ANSWERED] + _SOON
                cells[_PAUSE] = min(2 * self.pause, self._longest) if again else self._seconds
                cells[_DUE] = now + self.pause if again else now
                self.trips += 1

    def forget(self) -> None:
        """Start no more pings, and detach from the shared state: an open breaker stays open."""
        self._ended = True
        self._cells = memoryview(bytearray(self._cells)).cast("d")

    def _claim(self) -> bool:
        """Claim the ping if it is due, and return whether it was.

        The next ping is then due after another pause.
        """
        with _lock:
            cells, now, here = self._cells, time.monotonic(), os.getpid()
            waits = now < cells[_DUE] <= now + self._longest  # any other time has passed or is invalid
            if self._ended or self._pinging == here or cells[_DUE] == 0 or waits:
                return False
            cells[_DUE], self._pinging = now + self.pause, here
            return True

    def _try(self) -> None:
        """Ping, and close the breaker on success."""
        try:
            self._ping()
        except Exception:
            if self._cells[_DUE]:  # else another process has closed it
                self._cells[_DUE] = time.monotonic() + self.pause
        else:
            self._cells[_ANSWERED] = time.monotonic()
            self._cells[_DUE] = 0
        finally:
            self._pinging = 0


_lock = threading.RLock()  # between the threads of a process, for microseconds
at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def shared_cells(file: Path, count: int) -> list[memoryview[float]]:
    """The state of `count` breakers, shared by all processes with the same `file`, which is created if missing.

    If there is no space for the file, this process shares it only with its children.
    """
    cells: memoryview[Any] = shared_array(file, np.float64, count * _CELLS).data
    return [cells[at : at + _CELLS] for at in range(0, count * _CELLS, _CELLS)]
