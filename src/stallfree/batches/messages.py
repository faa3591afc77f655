"""What the iterating process and those that fill slots say to each other. Fixed layouts, no pickle."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_TASK = struct.Struct("<iiqqq")
_NUMBERS = (
    *("status", "slot", "token", "number", "size", "hits", "misses", "storage_bytes"),
    *("fetch_seconds", "prep_seconds", "started", "skipped", "ended"),
)
"""Attributes of a `Result` at the head of its message."""

_RESULT = struct.Struct("<iiqqqqqqdddqqqqq")  # these, and the lengths of ids, note and memory
_numbers_of = attrgetter(*_NUMBERS)
_ALIGNMENT = 64

GATHERER = -1
"""In the place of a worker's number: a gathering thread."""

NO_SLOT = -1
"""The slot of a task that gets one only when it is its turn, or none at all."""

WORK, FORGET, RESIZE = 1, 2, 3
READY, PRIVATE, WHOLE, FAILED, EMPTY, UNDONE = 1, 2, 3, 4, 5, 6

NOTHING: Ids = np.empty(0, np.int64)


@dataclass(slots=True)
class Task:
    """Fill `slot` with the batch `number` of an epoch.

    Attributes:
        token: which iteration asked; results of others are thrown away.
        number: position of the batch in the epoch.
        slot: where to put it, or `NO_SLOT`.
        epoch: of the randomness.
        ids: the samples.
    """

    token: int
    number: int
    slot: int
    epoch: int
    ids: Ids

    def pack(self, kind: int = WORK) -> bytes:
        """As bytes."""
        return _TASK.pack(kind, self.slot, self.token, self.number, self.epoch) + self.ids.tobytes()


def unpack_task(data: bytes | bytearray) -> tuple[int, Task]:
    """Kind and task of a message."""
    kind, slot, token, number, epoch = _TASK.unpack_from(data)
    return kind, Task(token, number, slot, epoch, np.frombuffer(data, np.int64, offset=_TASK.size))


def forget_message(token: int) -> bytes:
    """The message that batches of iterations before `token` are no longer wanted."""
    return Task(token, 0, 0, 0, NOTHING).pack(FORGET)


def resize_message(workers: int) -> bytes:
    """The message that sets the number of workers."""
    return Task(workers, 0, 0, 0, NOTHING).pack(RESIZE)


@dataclass(slots=True)
class Result:
    """What became of a task.

    Attributes:
        status: READY (the slot holds `size` bytes), PRIVATE (the batch is in `memory`, because the slot has no room for
            it), WHOLE (`value` is the batch; within one process only), FAILED (`value` is the error, or `note`
            holds it), EMPTY (all samples were skipped), UNDONE (not wanted any more, or a cached sample vanished).
        token, number, slot: of the task.
        ids: those really served.
        skipped: number of samples left out; then `note` says why, a line each.
        started: when the work on it began, in seconds of `time.monotonic`; 0 if it failed or was not done.
        worker: number of the worker process, or `GATHERER`. Not in the message: who reads it knows.
        ended: whether the stream of the task has no more batches; 0 for data sets that are indexed.
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
    skipped: int = 0
    ids: Ids = field(default_factory=lambda: NOTHING)
    note: bytes = b""
    memory: Bytes | None = None
    value: Any = None
    started: float = 0.0
    worker: int = 0
    ended: int = 0

    def pack(self) -> list[bytes | memoryview]:
        """As pieces of bytes, one after the other."""
        memory = b"" if self.memory is None else memoryview(self.memory[: self.size])  # type: ignore[arg-type]
        head = _RESULT.pack(*_numbers_of(self), len(self.ids), len(self.note), len(memory))
        start = head + self.ids.tobytes() + self.note
        return [start + bytes(-len(start) % _ALIGNMENT), memory] if len(memory) else [start]


def unpack_result(data: bytes | bytearray | memoryview) -> Result:
    """The result in a message, whose memory it keeps."""
    *numbers, count, noted, private = _RESULT.unpack_from(data)
    ids = np.frombuffer(data, np.int64, count, _RESULT.size)
    at = _RESULT.size + 8 * count
    note = bytes(data[at : at + noted])
    memory = None if not private else np.frombuffer(data, np.uint8, private, len(data) - private)
    return Result(**dict(zip(_NUMBERS, numbers, strict=True)), ids=ids, note=note, memory=memory)
