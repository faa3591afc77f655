"""A breaker per server: one failure opens it, and a thread in the background closes it when the server is back.

Processes share what they know: those that a process forks always, those of a node by a file. What is shared is three
numbers per breaker, and no lock. Whatever a dead process or a race leaves in them heals with the next ping: at worst
samples of a server that is there are misses until then, or one more process waits for a server that is not.
"""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stallfree.platform import at_fork
from stallfree.stores.shared_array import shared_array

LONGEST = 8.0
"""Seconds between two pings, at most: a wait of 250 ms in that time is 3% of it."""

AT_ONCE = 32
"""Servers of which one process asks for signs of life at the same time."""

_SOON = 5.0
"""Seconds within which a server that was back and fails again is a bad one."""

_DUE, _PAUSE, _GOOD_UNTIL = range(3)
_CELLS = 3
_CELL_SIZE = 8


class Breaker:
    """Says whether a server is to be asked. It begins closed, which means yes.

    Safe in threads. A forked child shares it: whoever finds the server lost, or back, finds it for both.

    A server that answers pings and not what matters, by a bad link for instance, would cost a wait every few moments:
    who fails again soon after it was back is asked half as often, down to once in 8 s. The first time it is pinged at
    once: perhaps one process has had no time to listen, and the others shall not do without the server for that.

    Args:
        ping: asks the server for a sign of life; raises anything if there is none. Called in the background.
        seconds: pause between two pings.

    Attributes:
        trips: how often it was opened by this process and, before the fork, by its parent.
    """

    def __init__(self, ping: Callable[[], object], seconds: float = 0.5) -> None:
        self.trips = 0
        self._ping = ping
        self._seconds = seconds
        self._longest = max(LONGEST, seconds)
        # When to ping, on the clock that all processes of a host have in common, or 0 while it is closed; the pause
        # between pings; and the time before which a trip means that the server has failed again soon.
        self._cells: memoryview[float] = memoryview(mmap.mmap(-1, _CELLS * _CELL_SIZE)).cast("d")
        self._turn = 0.0  # of this process, not before
        self._forgotten = False

    def share(self, cells: memoryview[float]) -> None:
        """From now on know what all know who share `cells`, three numbers of `shared_cells`."""
        self._cells = cells

    @property
    def closed(self) -> bool:
        """Whether the server is to be asked."""
        if self._cells[_DUE] == 0:
            return True
        _rejoin.watch(self)  # perhaps another process has opened it
        return False

    @property
    def pause(self) -> float:
        """Seconds between two pings now."""
        pause: float = self._cells[_PAUSE]
        return pause if self._seconds <= pause <= self._longest else self._seconds

    def trip(self) -> None:
        """Open it. It counts once, however many threads say so."""
        with _rejoin.lock:
            cells = self._cells
            if cells[_DUE] == 0:
                now = time.monotonic()
                again = now < cells[_GOOD_UNTIL] <= now + _SOON
                cells[_PAUSE] = min(2 * self.pause, self._longest) if again else self._seconds
                cells[_DUE] = now + self.pause if again else now
                self.trips += 1
                self._turn = 0.0
        _rejoin.watch(self)

    def forget(self) -> None:
        """Do not ping any more: an open breaker stays open. What others share it does not touch any more."""
        self._forgotten = True
        _rejoin.drop(self)
        self._cells = memoryview(bytearray(self._cells)).cast("d")

    def _when(self) -> float:
        """When this process is to ping: at once, if what stands there cannot be."""
        due = self._cells[_DUE]
        return max(self._turn, due if due <= time.monotonic() + self._longest else 0.0)

    def _order(self) -> tuple[float, float]:
        return self._when(), self._turn

    def _claim(self) -> bool:
        """Whether it is this process's turn to ping. Then the others wait for another pause."""
        cells, now = self._cells, time.monotonic()
        if cells[_DUE] == 0 or self._when() > now:
            return False
        cells[_DUE] = now + self.pause
        return True

    def _try(self) -> None:
        """Ping, and close it if there is an answer."""
        try:
            self._ping()
        except Exception:
            back = False
        else:
            back = True
        cells, now = self._cells, time.monotonic()
        if back:
            cells[_GOOD_UNTIL] = now + _SOON
            cells[_DUE] = 0
        elif cells[_DUE] != 0:  # or another process has had an answer
            cells[_DUE] = now + self.pause
            self._turn = now + self.pause * (1 + time.monotonic_ns() % 997 / 1994)  # others may have more luck


def shared_cells(file: Path, count: int) -> list[memoryview[float]]:
    """What the breakers of `count` servers can `share` with all processes that give the same `file`.

    It is made if it is not there. Without room for it, the breakers of this process have it for themselves.
    """
    cells: memoryview[Any] = shared_array(file, np.float64, count * _CELLS).data
    return [cells[at : at + _CELLS] for at in range(0, count * _CELLS, _CELLS)]


class _Rejoin:
    """The thread that looks after all open breakers of a process. It ends when there are none.

    It pings in threads of their own: many servers that are lost shall not hide one that is back.
    """

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """Nothing is watched: at the beginning, and in a forked child."""
        self.lock = threading.RLock()  # a finalizer may drop a breaker within `watch`, in the same thread
        self._wake = threading.Event()
        self._watched: weakref.WeakSet[Breaker] = weakref.WeakSet()
        self._pinged: set[Breaker] = set()  # at this moment
        self._running = False

    def watch(self, breaker: Breaker) -> None:
        with self.lock:
            if breaker._forgotten or (breaker in self._watched and self._running):
                return
            self._watched.add(breaker)
            if self._running:
                self._wake.set()  # it may be due before the others are
                return
            self._running = True
        try:
            threading.Thread(target=self._run, args=(self._wake,), name="stallfree-rejoin", daemon=True).start()
        except RuntimeError:  # no more threads, or the interpreter is ending: the next look at `closed` tries again
            self._running = False

    def drop(self, breaker: Breaker) -> None:
        with self.lock:
            self._watched.discard(breaker)
        self._wake.set()

    def _run(self, wake: threading.Event) -> None:
        while True:
            wake.clear()
            self._begin(wake)
            with self.lock:
                open_ones = [breaker for breaker in self._watched if breaker._cells[_DUE]]
                self._watched = weakref.WeakSet(open_ones)
                if not open_ones:
                    self._running = False
                    return
                due = None
                if len(self._pinged) < AT_ONCE:
                    waiting = (breaker._when() for breaker in open_ones if breaker not in self._pinged)
                    due = min(waiting, default=None)
                del open_ones  # nobody may refer to them for as long as this waits
            wake.wait(None if due is None else max(0.0, due - time.monotonic()))

    def _begin(self, wake: threading.Event) -> None:
        """Ping for those that are due, the longest first, but for no more than there may be at once."""
        with self.lock:
            longest = sorted(self._watched - self._pinged, key=Breaker._order)[: AT_ONCE - len(self._pinged)]
            claimed = [breaker for breaker in longest if breaker._claim()]
            self._pinged.update(claimed)
        for breaker in claimed:
            try:
                threading.Thread(target=self._ping, args=(breaker, wake), name="stallfree-ping", daemon=True).start()
            except RuntimeError:  # no more threads: one after the other
                self._ping(breaker, wake)

    def _ping(self, breaker: Breaker, wake: threading.Event) -> None:
        breaker._try()
        with self.lock:
            self._pinged.discard(breaker)
        wake.set()  # it may be another one's turn


_rejoin = _Rejoin()
at_fork(after_in_child=_rejoin.start_anew)
