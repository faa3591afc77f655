"""Forks that do not copy the lock of torch's generator while another thread holds it: the child could never take it.

The lock is taken by threads that have released Python's global lock to draw numbers. A fork holds the global lock, so
it waits until those threads are through; none can begin meanwhile. This costs 2 ms where other threads draw nothing.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import torch

from stallfree.platform import at_fork

_WINDOW = 0.05
"""Seconds for which no other thread can make this one release the global lock."""

_LIMIT = 2.0
"""Seconds after which the fork is made in any case."""

_LOOKS = 4
_PAUSES = (0.0005, 0.005)
"""Seconds between two looks, at first and once the lock was seen in use: for threads that are about to take it."""

_IN_USE = 0.0002
"""Seconds after which the lock was not free."""

_usable = True  # in this process, as far as is known
_switch_interval = 0.0
_pause = getattr(ctypes.PyDLL(None), "usleep", None) if sys.platform.startswith("linux") else None


def check_generator() -> None:
    """Take the lock of torch's generator once, which a forked process does before it forks others.

    Hangs if the fork has copied a lock in use; its parent must replace it.
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
        time.sleep(0.001)  # another thread gets the global lock, so the window begins when it comes back
        began = time.perf_counter()
        longest = max(_look(pause) for _ in range(_LOOKS))
        if longest < _IN_USE and time.perf_counter() - began < 0.8 * _WINDOW:
            return
        pause = _PAUSES[1]


def _look(pause: float) -> float:
    """Seconds until the generator's lock was free, after a pause. Both keep the global lock."""
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
