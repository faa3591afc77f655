"""Run a torch operation single-threaded, in the calling thread.

torch splits a large operation among OpenMP threads, which spin at the barrier and for some time after it. If other
processes use the cores, as during training, all threads wait for a descheduled one. With one of two cores busy, a
gather of 64 images by two threads took 19 times as long as by one. On idle cores the gain of two threads is small,
because memory is the limit.
`torch.set_num_threads` would affect threads that the user's training starts later. OpenMP's own setting is per thread,
and is restored.
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
    """OpenMP's getter and setter in the library that torch has loaded; None if not found."""
    try:
        found = _LIBRARY.findall(Path("/proc/self/maps").read_text())
        torchs = [path for path in found if "torch" in path] or found
        library = ctypes.PyDLL(torchs[0])  # these calls are shorter than releasing the GIL
        return library.omp_get_max_threads, library.omp_set_num_threads
    except (OSError, IndexError, AttributeError):
        return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch runs the operations of this thread single-threaded."""
    functions = None if getattr(_thread, "alone", False) else _openmp()
    if functions is None:
        yield
        return
    get, put = functions
    if not getattr(_thread, "ready", False):
        torch.get_num_threads()  # the first call in a thread sets its number, and would override ours
        _thread.ready = True
    before = get()
    put(1)
    try:
        yield
    finally:
        put(before)


def stay_alone() -> None:
    """Make torch run the operations of this thread single-threaded from now on. For internal threads."""
    functions = _openmp()
    if functions is not None:
        torch.get_num_threads()
        functions[1](1)
        _thread.alone = True
