"""The staging ring: standing slots of shared memory that hold ready batches, used again and again.

A slot is a file of its own, which grows to the largest batch that was put into it, so the size of a batch need not be
known beforehand. Who fills a slot and when is decided in one place, by the process that iterates. A batch that was
handed out holds its slot on *lease*: when the last tensor made from it is freed, the slot goes back.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.batches.messages import NO_SLOT
from stallfree.errors import StorageError
from stallfree.ipc.folders import SharedFolder, default_root, sweep
from stallfree.platform import OPEN, allocate, shares_memory

Bytes = npt.NDArray[np.uint8]


class Slots:
    """The slots as one process sees them. Picklable; a worker maps them as it needs them."""

    def __init__(self, make: Callable[[], Path], limit: int | None) -> None:
        self._make = make
        self._folder: Path | None = None
        self.limit = limit
        """Bytes that one slot may have, or None."""
        self.pin: Callable[[Bytes], Callable[[], object]] | None = None
        """Makes memory known to a device, in the process that iterates; gives what takes that back."""
        self._pinned: dict[int, Callable[[], object]] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self.kept: dict[int, Any] = {}
        """What others made for the memory of a slot; deleted when the slot is mapped again."""

    def reserve(self, slot: int, size: int) -> Bytes | None:
        """The memory of `slot`, grown to `size` bytes or more; None when there is no room for so much."""
        if slot == NO_SLOT:
            return None
        there = self._maps.get(slot)
        if there is None or len(there) < size:
            if self.limit is not None and size > self.limit:
                return None
            there = self._grow(slot, size) if shares_memory() else self._keep(slot, mmap.mmap(-1, _pages(size)))
            if there is None:
                return None
        return np.frombuffer(there, np.uint8)

    def view(self, slot: int, size: int) -> Bytes:
        """The memory of `slot`, which holds `size` bytes or more. A new array at each call: leases hang on it."""
        there = self._maps.get(slot)
        if there is None or len(there) < size:
            there = self._map(slot)
            if len(there) < size:
                raise StorageError(
                    f"slot {slot} of the staging ring has {len(there)} bytes, a batch of {size} was announced",
                    page="record-malformed",
                )
        return np.frombuffer(there, np.uint8)

    def _grow(self, slot: int, size: int) -> mmap.mmap | None:
        fd = os.open(self._file(slot), os.O_RDWR | os.O_CREAT | OPEN, 0o600)
        try:
            have = os.fstat(fd).st_size
            if have < size:
                wanted = _pages(size + size // 8)
                if self.limit is not None:
                    wanted = min(wanted, max(_pages(size), self.limit))
                try:
                    allocate(fd, 0, wanted)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.ftruncate(fd, have)
                    return None
        finally:
            os.close(fd)
        return self._map(slot)

    def _map(self, slot: int) -> mmap.mmap:
        fd = os.open(self._file(slot), os.O_RDWR | OPEN)
        try:
            there = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        return self._keep(slot, there)

    def _keep(self, slot: int, there: mmap.mmap) -> mmap.mmap:
        self._unpin(slot)
        self._maps[slot] = there
        self.kept.pop(slot, None)
        if self.pin is not None:
            self._pinned[slot] = self.pin(np.frombuffer(there, np.uint8))
        return there

    def _unpin(self, slot: int) -> None:
        unpin = self._pinned.pop(slot, None)
        if unpin is not None:
            unpin()

    @property
    def folder(self) -> Path:
        """The folder of the slots, which is made when it is first needed."""
        if self._folder is None:
            self._folder = self._make()
        return self._folder

    def _file(self, slot: int) -> Path:
        return self.folder / f"slot-{slot}"

    def release(self, slot: int) -> None:
        """Give the memory of a free slot back to the system.

        The file and the mappings of other processes remain, for `restore`: they cannot be unmapped from here.
        """
        if shares_memory():
            with contextlib.suppress(FileNotFoundError):  # never filled
                (self._maps.get(slot) or self._map(slot)).madvise(mmap.MADV_REMOVE)
        else:
            self._maps.pop(slot, None)
            self.kept.pop(slot, None)

    def restore(self, slot: int) -> bool:
        """Allocate the memory of a released slot again. Returns False if there is no room."""
        if not shares_memory():
            return True
        try:
            fd = os.open(self._file(slot), os.O_RDWR | OPEN)
        except FileNotFoundError:
            return True
        try:
            allocate(fd, 0, os.fstat(fd).st_size)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    @property
    def bytes(self) -> int:
        """Bytes that are mapped here."""
        return sum(map(len, self._maps.values()))

    def close(self) -> None:
        """Let go of the memory. What batches are kept in stays until they are freed."""
        for slot in list(self._pinned):
            self._unpin(slot)
        self._folder = None
        self._maps.clear()
        self.kept.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self.folder, "limit": self.limit, "pin": None, "_pinned": {}, "_maps": {}, "kept": {}}


class Ring:
    """`count` slots, and who has them. Belongs to the process that hands out tasks.

    Args:
        count: number of slots.
        capacity: bytes for all slots together; None: as large as the batches are.
    """

    def __init__(self, count: int, capacity: int | None) -> None:
        self._folder: SharedFolder | None = None
        self._making = threading.RLock()  # the garbage collector may close the ring in any thread, at any point
        self._closed = False
        self.count = count
        self._last = count  # number of slots ever made
        self._released: list[int] = []  # slots without memory
        self._surplus = 0
        self.slots = Slots(self._make, None if capacity is None else capacity // count // mmap.PAGESIZE * mmap.PAGESIZE)
        self._free: deque[int] = deque(range(count))
        self._leases: dict[int, weakref.ref[Bytes]] = {}

    def _make(self) -> Path:
        with self._making:
            if self._folder is None and not self._closed:
                sweep(default_root())  # what killed processes left
                self._folder = SharedFolder(f"ring-{os.getpid()}-{secrets.token_hex(6)}", initialize=lambda _: None)
            if self._closed:
                self.clear()
            if self._folder is None:
                raise StorageError("the staging ring is closed", page="iteration-over")
            return self._folder.path

    def take(self) -> int | None:
        """A free slot, if there is one: the one used last, which caches still hold. Any thread may ask."""
        if self._closed:
            return None
        if self._folder is None:  # now: workers are forked with what there is
            _ = self.slots.folder
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give(self, slot: int) -> None:
        """The slot is free again. Safe to be called by a finaliser, in any thread. `NO_SLOT` is none."""
        if slot == NO_SLOT:
            return
        if self._surplus:
            self._surplus -= 1
            self._release(slot)
        else:
            self._free.append(slot)

    def resize(self, count: int) -> None:
        """Have `count` slots. Those that are too many go as they come free. Not with `lease` or `pin`."""
        while self.count < count:
            self.count += 1
            if self._surplus:
                self._surplus -= 1
            else:
                self._free.append(self._another())
        while self.count > count:
            self.count -= 1
            slot = self._free.popleft() if self._free else None
            if slot is None:
                self._surplus += 1
            else:
                self._release(slot)

    def _release(self, slot: int) -> None:
        self.slots.release(slot)
        self._released.append(slot)

    def _another(self) -> int:
        """A released slot if its memory can be allocated again, or a new one."""
        if self._released and self.slots.restore(self._released[-1]):
            return self._released.pop()
        self._last += 1
        return self._last - 1

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def leased(self) -> int:
        """Slots on lease to tensors that are alive."""
        return len(self._leases)

    def lease(self, slot: int, memory: Bytes) -> None:
        """`slot` goes back when `memory` is freed, on which the tensors of a batch are views."""

        def end(_: object) -> None:  # in any thread; refers to no ring, which may have ended before
            if leases.pop(slot, None) is not None:
                free.append(slot)

        leases, free = self._leases, self._free
        leases[slot] = weakref.ref(memory, end)

    @property
    def bytes(self) -> int:
        """Bytes of memory of all slots."""
        if not shares_memory():
            return self.slots.bytes
        if self._folder is None:
            return 0
        with contextlib.suppress(OSError):
            return slot_bytes(self._folder.path)
        return 0

    def clear(self) -> None:
        """Remove the files. Batches that are still kept stay valid: their memory lives as long as they do."""
        with self._making:
            self.slots.close()
            folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def close(self) -> None:
        """As `clear`, for good: nothing is made any more."""
        self._closed = True
        self.clear()


def slot_bytes(folder: Path) -> int:
    """Bytes of memory of the slots in `folder`."""
    return sum(512 * entry.stat().st_blocks for entry in os.scandir(folder) if entry.name.startswith("slot-"))


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
