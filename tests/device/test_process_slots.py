"""The slots of `ProcessPrefetcher` at both ends, and the pinning of a stallfree loader's ring."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import stallfree as sf
from stallfree.device import producer, staging
from stallfree.device.batch_codec import join, lay_out, pack_layout
from stallfree.device.producer import Producer, Setup
from stallfree.device.protocol import unpack_length
from stallfree.device.slots import OpenSlots, SharedCuda, SharedHost
from stallfree.ipc.folders import SharedFolder

CPU = torch.device("cpu")
SAMPLES, BATCH, SIDE = 40, 4, 40
DEPTH = 2


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of the slots."""
    shared = SharedFolder("prefetch-slots", initialize=lambda _: None)
    yield shared.path
    shared.close()


# -- a loader of ours -------------------------------------------------------------------------------------------------


class Pictures:
    """Pictures filled with their number, and their labels."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        return torch.full((SIDE, SIDE), id, dtype=torch.uint8), id


class Pinning(SharedHost):
    """Copies only from pinned memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pinned: dict[int, int] = {}  # address and end
        self.made: list[torch.Tensor] = []
        self.staged: set[int] = set()
        self.most = 0

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
        address = memory.ctypes.data
        self.pinned[address] = address + memory.nbytes
        self.most = max(self.most, len(self.pinned))
        return lambda: self.pinned.pop(address)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end in self.pinned.items())

    def empty_pinned(self, size: int) -> torch.Tensor:
        self.made.append(super().empty_pinned(size))
        return self.made[-1]

    def stage(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.staged.update(source.nbytes for source in sources)
        super().stage(targets, sources)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        mine = any(source.untyped_storage().data_ptr() == memory.data_ptr() for memory in self.made)
        assert mine or self.is_pinned(source)
        super().copy(target, source)


class OneConsumer:
    """A server of consumers; the active one checks each batch at once, and requests several epochs."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.free = deque(range(DEPTH + 1))
        self.labels: list[int] = []
        self.memories: dict[int, torch.Tensor] = {}

    def begin(self) -> bool:
        self.epochs -= 1
        return self.epochs >= 0

    def take(self) -> int:
        return self.free.popleft()

    def announce(self, slot: int, memory: torch.Tensor, share: Callable[[int], bytes], body: bytes) -> None:
        layout, rest = pickle.loads(body)
        pictures, labels = join(lay_out(memory, layout), rest, CPU)
        assert torch.equal(pictures, labels[:, None, None].to(torch.uint8).expand(-1, SIDE, SIDE))
        self.labels += labels.tolist()
        self.memories[slot] = memory
        self.free.append(slot)

    def fail(self, slot: int, error: BaseException) -> None:
        raise error

    def end(self, slot: int) -> None:
        self.free.append(slot)

    def set_length(self, length: bytes) -> None:
        assert unpack_length(length) == SAMPLES // BATCH


def test_pictures_go_straight_out_of_pinned_slots(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, server = Pinning(folder), OneConsumer(epochs=2)
    monkeypatch.setattr(producer, "memory_of", lambda *_: memory)
    monkeypatch.setattr(staging, "SMALL", 1024)
    loaders: list[Any] = []

    def make() -> Any:
        loaders.append(sf.DataLoader(Pictures(), BATCH, num_workers=1, seed=1))
        return loaders[0]

    Producer(server, Setup(make, CPU, DEPTH, 1, folder)).run()  # type: ignore[arg-type]
    assert sorted(server.labels) == sorted([*range(SAMPLES)] * 2)
    assert memory.staged == {BATCH * 8}  # the labels
    assert memory.most > 0
    assert memory.pinned == {}  # the loader is closed
    assert loaders[0].stats().wait_seconds > 0  # what the process has waited for, as without a prefetcher
    assert len(server.memories) == DEPTH + 1
    assert all(bool((memory == 255).all()) for memory in server.memories.values())  # who still uses a batch sees it


@pytest.mark.parametrize("newer", [False, True])
def test_memory_on_a_gpu_can_be_shared_whatever_the_allocator_was_told(
    monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    """Memory of expandable segments cannot be shared, or not with all processes."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append(str(device)))
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
    if newer:
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    else:
        monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)
    memory = SharedCuda.__new__(SharedCuda)
    memory.device = torch.device("cuda", 1)
    memory.bind()
    assert told == ["expandable_segments:False", "cuda:1"]


# -- a consumer -------------------------------------------------------------------------------------------------------


class Mortal(SharedHost):
    """Memory that is freed with its owner, whose events must not be used afterwards."""

    ends_with_owner = True
    alive = True

    def event(self, event: Any) -> bool:
        assert self.alive
        return True

    reached = finish = record = wait = event


def opened(memory: SharedHost, alive: Callable[[], bool]) -> tuple[OpenSlots, torch.Tensor, bytes]:
    """Open a slot; returns its tensors and their layout."""
    there = memory.empty(10_000)
    there[:3] = torch.tensor([5, 6, 7])
    slots = OpenSlots(memory, alive)
    slots.open(0, pickle.dumps((memory.share(there), (None, None))))
    return slots, there, pack_layout([there[:3]])


def test_nothing_is_asked_of_the_device_of_a_process_that_is_dead(folder: Path) -> None:
    memory = Mortal(folder)
    slots, _, layout = opened(memory, lambda: memory.alive)
    (tensor,) = slots.take(0, layout)
    assert tensor.tolist() == [5, 6, 7]
    memory.alive = False
    slots.release(0, None)
    with pytest.raises(EOFError):
        slots.take(0, layout)
    slots.close()


def test_a_batch_that_is_there_is_given_when_the_memory_outlives_its_owner(folder: Path) -> None:
    slots, _, layout = opened(SharedHost(folder), lambda: False)
    assert slots.take(0, layout)[0].tolist() == [5, 6, 7]
    slots.poison()
    assert slots.take(0, layout)[0].tolist() == [255] * 3


def test_a_slot_that_lies_elsewhere_by_now_is_told_once_more(folder: Path) -> None:
    memory = SharedHost(folder)
    slots, there, layout = opened(memory, lambda: True)
    larger, handles = memory.empty(20_000), pickle.dumps((memory.share(there), (None, None)))
    larger[:3] = 9
    memory.discard(there)
    slots.open(0, handles)  # of an epoch that was broken off
    slots.open(0, pickle.dumps((memory.share(larger), (None, None))))
    assert slots.take(0, layout)[0].tolist() == [9, 9, 9]


def test_a_memory_that_cannot_be_opened_is_an_error_while_its_owner_lives(folder: Path) -> None:
    class Closed(SharedHost):
        def open(self, handle: Any) -> torch.Tensor:
            raise RuntimeError("CUDA error: invalid resource handle")

    memory = Closed(folder)
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        opened(memory, lambda: True)
    opened(memory, lambda: False)  # who takes a batch of it hears of the end
