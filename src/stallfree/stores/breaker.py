"""A breaker per server: one failure opens it, and a thread in the background closes it when the server is back."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable

LONGEST = 30.0
"""Seconds between two pings, at most."""

_SOON = 10
"""Pauses within which a server that was back and fails again is a bad one."""


class Breaker:
    """Says whether a server is to be asked. It begins closed, which means yes.

    Safe in threads. In a forked child an open breaker stays open, and is closed by the child's own thread.

    A server that answers pings and not what matters, by a bad link for instance, would cost a wait every few moments:
    who fails again soon after it was back is asked half as often, down to once in 30 s.

    Args:
        ping: asks the server for a sign of life; raises anything if there is none. Called in the background.
        seconds: pause between two pings.

    Attributes:
        trips: how often it was opened in this process and, before the fork, in its parent.
        pause: seconds between two pings now.
    """

    def __init__(self, ping: Callable[[], object], seconds: float = 0.5) -> None:
        self.trips = 0
        self.pause = seconds
        self._ping = ping
        self._seconds = seconds
        self._due = 0.0  # when to ping
        self._good_until = -math.inf  # tripped before that, it has failed again soon
        self._open = False
        self._forgotten = False

    @property
    def closed(self) -> bool:
        """Whether the server is to be asked."""
        if self._open:
            _rejoin.watch(self)  # in a forked child nobody does so yet
        return not self._open

    def trip(self) -> None:
        """Open it. It counts once, however many threads say so."""
        with _rejoin.lock:
            if not self._open:
                now = time.monotonic()
                again = now < self._good_until
                self.pause = min(2 * self.pause, max(LONGEST, self._seconds)) if again else self._seconds
                self._due = now + self.pause
                self._open = True
                self.trips += 1
        _rejoin.watch(self)

    def forget(self) -> None:
        """Do not ping any more: an open breaker stays open."""
        self._forgotten = True
        _rejoin.drop(self)


class _Rejoin:
    """The thread that pings for all open breakers of a process. It ends when there are none."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """Nothing is watched: at the beginning, and in a forked child."""
        self.lock = threading.RLock()  # a finalizer may drop a breaker within `watch`, in the same thread
        self._wake = threading.Event()
        self._watched: weakref.WeakSet[Breaker] = weakref.WeakSet()
        self._running = False

    def watch(self, breaker: Breaker) -> None:
        with self.lock:
            if breaker._forgotten or not breaker._open or (breaker in self._watched and self._running):
                return
            self._watched.add(breaker)
            if self._running:
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
            with self.lock:
                due = [breaker._due for breaker in self._watched]
                if not due:
                    self._running = False
                    return
            if wake.wait(max(0.0, min(due) - time.monotonic())):
                wake.clear()  # a breaker was forgotten: perhaps that was the last one
            else:
                self._round()

    def _round(self) -> None:
        for breaker in list(self._watched):
            if breaker._due > time.monotonic():
                continue
            with contextlib.suppress(Exception):
                breaker._ping()
                with self.lock:
                    breaker._open = False
                    breaker._good_until = time.monotonic() + _SOON * breaker.pause
                    self._watched.discard(breaker)
            breaker._due = time.monotonic() + breaker.pause


_rejoin = _Rejoin()
os.register_at_fork(after_in_child=_rejoin.start_anew)
