"""The calls of CUDA by the prefetchers, by a fake of torch's functions. See `test_device_gpu.py` for a GPU's own."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from children import Child
from stallfree.device.copies import BatchBuffer, Cuda

REGISTERED_ALREADY, NOT_REGISTERED = 712, 713


class Driver:
    """CUDA's rules for threads, forked children and errors.

    Attributes:
        registered: addresses, with the size, the flags and the device that was current.
    """

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, int, int]] = {}
        self._owner = os.getpid()
        self.thread = threading.local()  # the device and the last error of each thread

    def cudart(self) -> Driver:
        """Raises like any other call of CUDA in a forked child."""
        if os.getpid() != self._owner:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return self

    @contextmanager
    def device(self, device: torch.device) -> Any:
        before, self.thread.device = getattr(self.thread, "device", 0), device.index
        yield
        self.thread.device = before

    def _result(self, code: int) -> np.int64:
        if code:
            self.thread.error = code
        return np.int64(code)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> np.int64:
        if address in self.registered:
            return self._result(REGISTERED_ALREADY)
        self.registered[address] = size, flags, getattr(self.thread, "device", 0)
        return self._result(0)

    def cudaHostUnregister(self, address: int) -> np.int64:
        return self._result(0 if self.registered.pop(address, None) else NOT_REGISTERED)

    def launch(self, *_: Any, **__: Any) -> None:
        """A kernel launch: torch then checks the last error of the thread, which clears it."""
        error, self.thread.error = getattr(self.thread, "error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")


class Event:
    """A recorded event."""

    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


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
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_memory_is_pinned_for_all_devices_in_the_context_of_the_prefetchers_own(driver: Driver) -> None:
    memory = np.zeros(8192, np.uint8)
    undo = in_thread(lambda: sf.DevicePrefetcher([], "cuda:1").pin(memory))
    portable = 1
    assert driver.registered == {memory.ctypes.data: (memory.nbytes, portable, 1)}
    assert getattr(driver.thread, "device", 0) == 0
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
    undo()
    undo()  # CUDA does not know it any more
    driver.launch()


def test_a_forked_child_leaves_the_device_alone(driver: Driver) -> None:
    prefetcher, event, memory = sf.DevicePrefetcher([], "cuda:0"), Event(), np.zeros(4096, np.uint8)
    prefetcher._buffers.append(BatchBuffer(event, event))
    undo = prefetcher.pin(memory)
    assert Child(undo).wait() == 0
    assert Child(lambda: prefetcher.pin(np.zeros(4096, np.uint8))()).wait() == 0
    assert driver.registered
    undo()
    assert event.waits == 1, "memory was unpinned under a copy"
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
