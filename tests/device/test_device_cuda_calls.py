"""The calls of CUDA by the prefetchers, without a GPU.

A fake of torch's functions implements CUDA's rules for threads, forked children and errors. Tests that need a GPU are
in `test_device_gpu.py`."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fakes import World
from process_tools import PATIENCE

import stallfree as sf
from stallfree.device.copies import Cuda, Place

REGISTERED_ALREADY = 712
"""`cudaErrorHostMemoryAlreadyRegistered`"""

NOT_REGISTERED = 713


class Result:
    """Like torch's result: not a number, but convertible to one."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __int__(self) -> int:
        return self._code


class Driver:
    """A fake of torch's CUDA functions.

    Attributes:
        registered: addresses, with the size, the flags and the device that was current.
    """

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, int, int]] = {}
        self._owner = os.getpid()
        self._thread = threading.local()  # the device and the last error of each thread

    def cudart(self) -> Driver:
        """Raises like any other call of CUDA in a forked child."""
        if os.getpid() != self._owner:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return self

    @property
    def current(self) -> int:
        return int(getattr(self._thread, "device", 0))

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._thread.device = self.current, device.index
        yield
        self._thread.device = before

    def _result(self, code: int) -> Result:
        if code:
            self._thread.error = code
        return Result(code)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Result:
        if address in self.registered:
            return self._result(REGISTERED_ALREADY)
        self.registered[address] = size, flags, self.current
        return self._result(0)

    def cudaHostUnregister(self, address: int) -> Result:
        return self._result(0 if self.registered.pop(address, None) else NOT_REGISTERED)

    def launch(self, *_: Any, **__: Any) -> None:
        """A kernel launch: torch then checks the last error of the thread, which clears it."""
        error, self._thread.error = getattr(self._thread, "error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")


class Event:
    """A recorded event."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.waits = 0

    def synchronize(self) -> None:
        self._driver.cudart()
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
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(PATIENCE)
    return found[0]


def in_child(function: Callable[[], Any]) -> bool:
    """Return whether it raises nothing in a forked child."""
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_memory_is_pinned_for_all_devices_in_the_context_of_the_prefetchers_own(driver: Driver) -> None:
    memory = np.zeros(8192, np.uint8)
    undo = in_thread(lambda: sf.DevicePrefetcher([], "cuda:1").pin(memory))
    portable = 1
    assert driver.registered == {memory.ctypes.data: (memory.nbytes, portable, 1)}
    assert driver.current == 0
    in_thread(undo)
    assert not driver.registered


def test_memory_that_cannot_be_pinned_is_no_error_of_the_next_kernel(driver: Driver) -> None:
    memory = np.zeros(4096, np.uint8)
    first, second = Cuda(torch.device("cuda:1")), Cuda(torch.device("cuda:1"))
    undo = first.pin(memory)
    undo_nothing = second.pin(memory)
    driver.launch()
    undo_nothing()
    assert driver.registered, "what was not pinned was unpinned"
    undo()
    undo()  # CUDA does not know it any more
    driver.launch()


def test_a_forked_child_leaves_the_device_alone(driver: Driver) -> None:
    prefetcher = sf.DevicePrefetcher([], "cuda:0")
    event = Event(driver)
    prefetcher._places.append(Place(event, event))
    memory = np.zeros(4096, np.uint8)
    undo = prefetcher.pin(memory)
    assert in_child(undo)
    assert in_child(lambda: prefetcher.pin(np.zeros(4096, np.uint8))())
    assert driver.registered
    undo()
    assert event.waits == 1, "memory was unpinned under a copy"
    assert not driver.registered


class Numbers:
    """A data set whose samples are their numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, id: int) -> torch.Tensor:
        return torch.full((4096,), id)


def test_forked_workers_fill_slots_that_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked workers inherit the slots of the process that pins them, and have no device."""
    driver = Driver()
    world = World()
    pin = world.backend.pin
    monkeypatch.setattr(world.backend, "pin", lambda memory: driver.cudart() and pin(memory))
    options: Any = {"batch_size": 4, "num_workers": 2, "device": "cuda", "multiprocessing_context": "fork"}
    with world.installed(), sf.DataLoader(Numbers(), **options) as loader:
        seen = [batch[:, 0].tolist() for batch in loader if world.synchronize() is None]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert world.registrations
    world.check()


def test_what_a_transform_leaves_on_the_host_is_not_kept_for_a_stream(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    streams: list[object] = []

    class OnDevice:
        record_stream = streams.append

    backend: Any = Cuda(torch.device("cuda:0"))
    backend.keep(torch.zeros(3))
    backend.keep(OnDevice())
    assert streams == [stream]


def test_who_waits_for_an_event_sleeps(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefetcher's thread waits for most of a step: spinning would occupy a core that the workers need."""

    class Recorded:
        def __init__(self, blocking: bool = False) -> None:
            self.blocking = blocking

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    assert Cuda(torch.device("cuda:0")).new_event().blocking


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
    assert in_child(gc.collect)
    gc.collect()


def test_a_loader_with_a_device_is_freed_without_the_garbage_collector() -> None:
    loader = sf.DataLoader(Numbers(), 4, num_workers=1, persistent_workers=True, device="cpu")
    assert len(list(loader)) == 3
    parts = [weakref.ref(part) for part in (loader, loader._prefetcher, loader._epochs)]
    loader.close()
    gc.disable()
    try:
        del loader
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()
