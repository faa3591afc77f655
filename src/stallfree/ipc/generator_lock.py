"""Makes forks wait until the lock of torch's generator is free.

A child could never take a lock that was copied while a thread of the parent held it.

Threads take the lock after they have released the GIL to draw random numbers. The fork holds the GIL, so it waits until
those threads are done; no thread can start meanwhile. This costs 2 ms where other threads draw nothing.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import torch

from stallfree.platform import at_fork

_WINDOW = 0.05
"""Seconds for which no other thread can make this one release the GIL."""

_LIMIT = 2.0
"""Seconds after which the fork proceeds in any case."""

_CHECKS = 4
_PAUSES = (0.0005, 0.005)
"""Seconds between two checks, first and after the lock was found in use: for threads that are about to take it."""

_IN_USE = 0.0002
"""Seconds of waiting above which the lock counts as in use."""

_usable = True  # whether the lock is known to be usable in this process
_switch_interval = 0.0
_pause = getattr(ctypes.PyDLL(None), "usleep", None) if sys.platform.startswith("linux") else None


def check_generator() -> None:
    """Take the lock of torch's generator once; a forked process does so before it forks others.

    Hangs if the fork has copied a held lock; the parent must then replace the process.
    """
    global _usable
    torch.default_generator.get_state()
    _usable = True


def _before() -> None:
    global _switch_interval
    _switch_interval = 0.0
    if not _usable or _pause is None or threading.active_count() == 1:
        return
    _switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(_WINDOW)
    pause, deadline = _PAUSES[0], time.perf_counter() + _LIMIT
    while time.perf_counter() < deadline:
        time.sleep(0.001)  # another thread gets the GIL, so the window begins when this one reacquires it
        began = time.perf_counter()
        longest = max(_lock_seconds(pause) for _ in range(_CHECKS))
        if longest < _IN_USE and time.perf_counter() - began < 0.8 * _WINDOW:
            return
        pause = _PAUSES[1]


def _lock_seconds(pause: float) -> float:
    """Pause, then return the seconds until the generator's lock was free. Holds the GIL throughout."""
    assert _pause is not None
    _pause(int(1e6 * pause))
    began = time.perf_counter()
    torch.default_generator.get_state()
    return time.perf_counter() - began


def _after() -> None:
    if _switch_interval:
        sys.setswitchinterval(_switch_interval)


def _after_in_child() -> None:
    global _usable
    _after()
    _usable = False


at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
