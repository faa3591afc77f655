"""What the iterating process and those that fill slots say to each other. Fixed layouts, no pickle."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_TASK = struct.Struct("<BIqiq")
_RESULT = struct.Struct("<BIqiqqqqddII")

WORK, STOP, FORGET = 1, 2, 3
NO_SLOT = -1
"""The slot of a task that gets one only when it is its turn."""

READY, FAILED, INLINE, EMPTY, UNDONE = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Task:
    """Fill `slot` with the batch `number` of an epoch.

    Attributes:
        token: which iteration asked; results of others are thrown away.
        number: position of the batch in the epoch.
        slot: where to put it.
        epoch: of the randomness.
        ids: the samples.
    """

    token: int
    number: int
    slot: int
    epoch: int
    ids: npt.NDArray[np.int64]

    def pack(self, kind: int = WORK) -> bytes:
        """As bytes."""
        return _TASK.pack(kind, self.token, self.number, self.slot, self.epoch) + self.ids.tobytes()


def unpack_task(data: bytes) -> tuple[int, Task]:
    """Kind and task of a message."""
    kind, token, number, slot, epoch = _TASK.unpack_from(data)
    return kind, Task(token, number, slot, epoch, np.frombuffer(data, np.int64, offset=_TASK.size))


NOTHING = np.empty(0, np.int64)
STOP_MESSAGE = Task(0, 0, 0, 0, NOTHING).pack(STOP)


def forget_message(token: int) -> bytes:
    """Tell a worker that batches of iterations before `token` are no longer wanted."""
    return Task(token, 0, 0, 0, NOTHING).pack(FORGET)


@dataclass(frozen=True)
class Result:
    """What became of a task.

    Attributes:
        status: READY (the slot holds `size` bytes), INLINE (the batch is in `payload`), FAILED (`payload` is a pickled error
            and its traceback), EMPTY (all samples were skipped), UNDONE (not wanted, or a cached sample vanished).
        ids: those really served.
        skipped: number of samples left out; unless INLINE, `payload` says why, a line each.
    """

    status: int
    token: int
    number: int
    slot: int
    size: int = 0
    hits: int = 0
    misses: int = 0
    storage_bytes: int = 0
    fetch_seconds: float = 0.0
    prep_seconds: float = 0.0
    ids: npt.NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    skipped: int = 0
    payload: bytes = b""

    def pack(self) -> bytes:
        """As bytes."""
        head = _RESULT.pack(
            self.status,
            self.token,
            self.number,
            self.slot,
            self.size,
            self.hits,
            self.misses,
            self.storage_bytes,
            self.fetch_seconds,
            self.prep_seconds,
            len(self.ids),
            self.skipped,
        )
        return b"".join((head, self.ids.tobytes(), self.payload))


def unpack_result(data: bytes) -> Result:
    """The result in a message."""
    status, token, number, slot, size, hits, misses, read, fetch, prep, count, skipped = _RESULT.unpack_from(data)
    ids = np.frombuffer(data, np.int64, count, _RESULT.size)
    payload = data[_RESULT.size + 8 * count :]
    return Result(status, token, number, slot, size, hits, misses, read, fetch, prep, ids, skipped, payload)
