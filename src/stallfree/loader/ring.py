"""The staging ring: reusable slots of shared memory that hold ready batches.

Each slot is a file that grows to the largest batch written to it, so batch sizes need not be known in advance. Only the
process that iterates assigns slots. A batch leases its slot: the slot is free when the last tensor over it is freed.

A forked child shares the memory of the slots. Slots that are leased at a fork are therefore not filled again: once
free, each is replaced by a new one, and its memory is freed with the last process that maps it.
"""

import contextlib
import itertools
import mmap
import os
import secrets
import sys
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stallfree.errors import StorageError
from stallfree.ipc.folders import SharedFolder, default_root, sweep
from stallfree.ipc.process import prepare_for_forks
from stallfree.loader.messages import NO_SLOT, Bytes
from stallfree.platform import OPEN, allocate


class Slots:
    """The slots as seen by one process. Picklable; each process maps a slot on first use.

    Args:
        make: creates the folder of the slots.
        limit: largest size of a slot in bytes.

    Attributes:
        pin: pins memory for a device and returns the function that unpins it; set in the process that iterates.
        derived: objects that depend on the memory of a slot; deleted when the slot is mapped again.
    """

    _access = mmap.ACCESS_WRITE

    def __init__(self, make: Callable[[], Path], limit: int = sys.maxsize) -> None:
        self._make, self.limit = make, limit
        self._folder: Path | None = None
        self.pin: Callable[[Bytes], Callable[[], object]] | None = None
        self._pinned: dict[int, Callable[[], object]] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self.derived: dict[int, Any] = {}

    def reserve(self, slot: int, size: int) -> Bytes | None:
        """Return the memory of `slot`, grown to at least `size` bytes; None if there is no room."""
        mapping = self._maps.get(slot)
        if mapping is None or len(mapping) < size:
            mapping = None if slot == NO_SLOT or size > self.limit else self._grow(slot, size)
        return None if mapping is None else np.frombuffer(mapping, np.uint8)

    def view(self, slot: int, size: int) -> Bytes:
        """Return the memory of `slot`, which holds `size` bytes, as a new array, to which a lease can be tied."""
        mapping = self._maps.get(slot)
        if mapping is None or len(mapping) < size:
            mapping = self._map(slot)
        return np.frombuffer(mapping, np.uint8)

    def _grow(self, slot: int, size: int) -> mmap.mmap | None:
        fd = os.open(self._file(slot), os.O_RDWR | os.O_CREAT | OPEN, 0o600)
        try:
            have = os.fstat(fd).st_size
            if have < size:
                wanted = -(-(size + size // 8) // mmap.PAGESIZE) * mmap.PAGESIZE
                try:
                    allocate(fd, 0, min(wanted, self.limit))
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
            mapping = mmap.mmap(fd, 0, access=self._access)
        finally:
            os.close(fd)
        if slot not in self._maps:
            for known in list(self._maps):
                if not self._file(known).exists():  # discarded by the process that iterates
                    self.forget(known)
        self.forget(slot)
        self._maps[slot] = mapping
        if self.pin is not None:
            self._pinned[slot] = self.pin(np.frombuffer(mapping, np.uint8))
        return mapping

    def forget(self, slot: int) -> None:
        """Unmap a slot. The memory of a batch that is still held stays mapped until it is freed."""
        if (unpin := self._pinned.pop(slot, None)) is not None:
            unpin()
        self._maps.pop(slot, None)
        self.derived.pop(slot, None)

    def discard(self, slot: int, *, free: bool) -> None:
        """Unmap a slot and remove its file. Other processes unmap it when they map another slot.

        With `free`, the memory is returned to the system now, although they still map it.
        """
        if self._folder is not None:
            with contextlib.suppress(FileNotFoundError, ValueError):  # never filled
                if free:
                    (self._maps.get(slot) or self._map(slot)).madvise(mmap.MADV_REMOVE)
                self._file(slot).unlink()
        self.forget(slot)

    @property
    def folder(self) -> Path:
        """The folder of the slots, created on first use."""
        if self._folder is None:
            self._folder = self._make()
        return self._folder

    def _file(self, slot: int) -> Path:
        return self.folder / f"slot-{slot}"

    def close(self) -> None:
        """Unmap the slots. The memory of batches that are still held stays mapped until they are freed."""
        self._folder = None
        for slot in list(self._maps):
            self.forget(slot)

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self.folder, "limit": self.limit, "pin": None, "_pinned": {}, "_maps": {}, "derived": {}}


class _Lease(weakref.ref[Bytes]):
    """The lease of a slot, which ends with the memory that it refers to."""

    slot: int


class Ring:
    """Assigns `count` slots to batches. Used only in the process that submits the tasks.

    Args:
        count: number of slots.
        capacity: bytes for all slots together; None means no limit.
    """

    def __init__(self, count: int, capacity: int | None) -> None:
        self._folder: SharedFolder | None = None
        self._closed = False
        self.count = count
        self._numbers = itertools.count(count)  # of further slots
        self._surplus = 0  # slots that are discarded once free
        limit = sys.maxsize if capacity is None else capacity
        self.slots = Slots(self._make, limit // count // mmap.PAGESIZE * mmap.PAGESIZE)
        self._free: deque[int] = deque(range(count))
        self._leases: dict[int, _Lease] = {}
        self._ended: deque[_Lease] = deque()  # their slots are free
        self._forked: set[int] = set()  # slots that were leased at a fork
        prepare_for_forks(self)

    def _make(self) -> Path:
        if self._closed:
            raise StorageError("the staging ring is closed", page="iteration-over")
        if self._folder is None:
            sweep(default_root())  # folders left by killed processes
            self._folder = SharedFolder(f"ring-{os.getpid()}-{secrets.token_hex(6)}", initialize=lambda _: None)
        return self._folder.path

    def take(self) -> int:
        """Return the free slot that was used last (CPU caches may still hold it), or `NO_SLOT`."""
        _ = self.slots.folder  # created before workers are forked
        self._end_leases()
        if not self._free:
            return NO_SLOT
        slot = self._free.pop()
        if slot not in self._forked:
            return slot
        self.slots.discard(slot, free=False)
        self._forked.discard(slot)
        return next(self._numbers)

    def give(self, slot: int) -> None:
        """Mark a slot as free; `NO_SLOT` is ignored. Thread-safe, also in finalisers."""
        if slot == NO_SLOT:
            return
        if self._surplus:
            self._surplus -= 1
            self.slots.discard(slot, free=True)
        else:
            self._free.append(slot)

    def retire(self, slot: int) -> None:
        """Mark a slot as free, and replace it by a new one: another process may keep reading its memory."""
        if slot != NO_SLOT:
            self.slots.discard(slot, free=False)
            self.give(next(self._numbers))

    def resize(self, count: int) -> None:
        """Set the number of slots; surplus slots are discarded once free. Not for rings with `lease` or `pin`."""
        while self.count < count:
            self.count += 1
            if self._surplus:
                self._surplus -= 1
            else:
                self._free.append(next(self._numbers))
        while self.count > count:
            self.count -= 1
            if self._free:
                self.slots.discard(self._free.popleft(), free=True)
            else:
                self._surplus += 1

    @property
    def free(self) -> int:
        """Number of free slots."""
        self._end_leases()
        return len(self._free)

    def lease(self, slot: int, size: int, most: int) -> Bytes | None:
        """Return the memory of `slot`, which is free again when this array and its views are freed.

        That happens in any thread. No Python code runs there: an interrupt during it would be lost. Returns None if
        `most` slots are leased already.
        """
        self._end_leases()
        if len(self._leases) >= most:
            return None
        memory = self.slots.view(slot, size)
        lease = self._leases[slot] = _Lease(memory, self._ended.append)
        lease.slot = slot
        return memory

    def _end_leases(self) -> None:
        while self._ended:
            with contextlib.suppress(IndexError):  # another thread took it
                slot = self._ended.popleft().slot
                del self._leases[slot]
                self._free.append(slot)

    def before_fork(self) -> None:
        """See `Lender`."""
        self._end_leases()
        self._forked.update(list(self._leases))

    @property
    def bytes(self) -> int:
        """Memory of all slots in bytes."""
        return 0 if self._folder is None else slot_bytes(self._folder.path)

    def close(self) -> None:
        """Remove the files; no slot can be taken afterwards. Batches that are still held stay valid. Idempotent."""
        self._closed = True
        self.slots.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()


def slot_bytes(folder: Path) -> int:
    """Return the memory of the slots in `folder` in bytes; 0 if the folder cannot be read."""
    with contextlib.suppress(OSError):
        return sum(512 * entry.stat().st_blocks for entry in os.scandir(folder) if entry.name.startswith("slot-"))
    return 0
