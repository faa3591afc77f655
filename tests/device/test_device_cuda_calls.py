"""The calls of CUDA by the prefetchers, by a fake of torch's functions. See `test_device_gpu.py` for a GPU's own."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import stallfree as sf
from children import Child
from stallfree.device.copies import BatchBuffer, Cuda

REGISTERED_ALREADY, NOT_REGISTERED = 712, 713


class Driver:
    """CUDA's rules for threads, forked children and errors."""

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, int, int]] = {}  # by address: size, flags, and the current device
        self._owner = os.getpid()
        self._thread = threading.local()  # the device and the last error of each thread

    def cudart(self) -> "Driver":
        """Raises like any other call of CUDA in a forked child."""
        if os.getpid() != self._owner:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return self

    @property
    def current(self) -> int:
        return getattr(self._thread, "device", 0)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._thread.device = self.current, device.index
        yield
        self._thread.device = before

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if address in self.registered:
            self._thread.error = REGISTERED_ALREADY
            return REGISTERED_ALREADY
        self.registered[address] = size, flags, self.current
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if self.registered.pop(address, None):
            return 0
        self._thread.error = NOT_REGISTERED
        return NOT_REGISTERED

    def launch(self, *_: Any, **__: Any) -> None:
        """A kernel launch: torch then checks the last error of the thread, which clears it."""
        error, self._thread.error = getattr(self._thread, "error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "cudart", made.cudart)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch, "ones", made.launch)
    return made


def in_thread(function: Callable[[], Any]) -> Any:
    """Return the result in a thread that has chosen no device."""
    with ThreadPoolExecutor() as pool:
        return pool.submit(function).result()


def test_memory_is_pinned_for_all_devices_in_the_context_of_the_prefetchers_own(driver: Driver) -> None:
    memory = np.zeros(8192, np.uint8)
    undo = in_thread(lambda: sf.DevicePrefetcher([], "cuda:1").pin(memory))
    assert driver.registered == {memory.ctypes.data: (memory.nbytes, 1, 1)}  # flags: portable; and its device
    assert driver.current == 0
    in_thread(undo)
    assert not driver.registered
    with pytest.raises(sf.InputError, match="there are 2 GPUs here, counted from 0"):
        sf.DevicePrefetcher([], "cuda:2")


def test_memory_that_cannot_be_pinned_is_no_error_of_the_next_kernel(driver: Driver) -> None:
    memory = np.zeros(4096, np.uint8)
    undo, undo_nothing = (Cuda(torch.device("cuda:1")).pin(memory) for _ in range(2))
    driver.launch()
    undo_nothing()
    assert driver.registered, "what was not pinned was unpinned"
    undo(), undo()  # CUDA does not know it any more
    driver.launch()


def test_a_forked_child_leaves_the_device_alone(driver: Driver) -> None:
    prefetcher, event, memory = sf.DevicePrefetcher([], "cuda:0"), Mock(), np.zeros(4096, np.uint8)
    prefetcher._buffers.append(BatchBuffer(event, event))
    undo = prefetcher.pin(memory)
    assert Child(undo).wait() == 0
    assert Child(lambda: prefetcher.pin(np.zeros(4096, np.uint8))()).wait() == 0
    assert driver.registered
    undo()
    assert event.synchronize.call_count == 1, "memory was unpinned under a copy"
    assert not driver.registered


def test_a_forked_child_never_frees_the_garbage_of_a_prefetcher(driver: Driver) -> None:
    """The destructors of torch's events and of tensors in pinned memory call CUDA, which aborts a forked child."""
    owner = os.getpid()

    class Fatal:
        def __del__(self) -> None:
            if os.getpid() != owner:
                os._exit(77)

    prefetcher: Any = sf.DevicePrefetcher([], "cuda:0")
    prefetcher.itself, prefetcher.fatal = prefetcher, Fatal()  # freed by the garbage collector
    del prefetcher
    assert Child(gc.collect).wait() == 0
    gc.collect()
