"""Run a torch copy in the calling thread alone.

torch shares a large copy among OpenMP threads, which wait for one another by spinning. While other processes use the
cores, and in training they do, one of the threads is off its core and all wait for it: on two cores with one busy, a
gather of 64 pictures took 19 times as long with two threads as with one, and idle they gain little, since memory is
the limit. `torch.set_num_threads` would change the number for threads that the user's training starts later. OpenMP's
own setting is per thread, and is put back at once.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_LIBRARY = re.compile(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)")
_thread = threading.local()


@lru_cache(maxsize=1)
def _openmp() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """OpenMP's getter and setter in the library that torch has loaded; None where there is none."""
    try:
        found = _LIBRARY.findall(Path("/proc/self/maps").read_text())
        torchs = [path for path in found if "torch" in path] or found
        library = ctypes.PyDLL(torchs[0])  # these calls are shorter than giving the GIL away
        return library.omp_get_max_threads, library.omp_set_num_threads
    except (OSError, IndexError, AttributeError):
        return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block, torch uses no other threads for what this thread does."""
    functions = None if getattr(_thread, "alone", False) else _openmp()
    if functions is None:
        yield
        return
    get, put = functions
    if not getattr(_thread, "ready", False):
        torch.get_num_threads()  # the first call in a thread sets its number, and would undo ours
        _thread.ready = True
    before = get()
    put(1)
    try:
        yield
    finally:
        put(before)


def stay_alone() -> None:
    """From now on, torch uses no other threads for what this thread does. For threads of our own."""
    functions = _openmp()
    if functions is not None:
        torch.get_num_threads()
        functions[1](1)
        _thread.alone = True
