"""Tasks and results: the messages between the training process and its workers. Fixed layouts, no pickle."""

import struct
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from stallfree.ipc.channel import pack_error, unpack_error

Ids = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_TASK = struct.Struct("<iiqqqq")
_NUMBERS = (
    *("status", "slot", "token", "number", "size", "hits", "misses", "storage_bytes"),
    *("fetch_seconds", "prep_seconds", "started", "skipped"),
)
"""Attributes of a `Result` in the head of its message."""

_RESULT = struct.Struct("<iiqqqqqqdddqqqq")  # these attributes, then the lengths of ids, note and memory
_numbers_of = attrgetter(*_NUMBERS)
_ALIGNMENT = 64

GATHERER = -1
"""Worker number of a gathering thread."""

NO_SLOT = -1
"""Slot of a task that has no slot, or not yet."""

WORK, FORGET = 1, 2
READY, PRIVATE, WHOLE, FAILED, EMPTY, UNDONE = 1, 2, 3, 4, 5, 6

NOTHING: Ids = np.empty(0, np.int64)


@dataclass(slots=True)
class Task:
    """A request to build one batch of an epoch.

    Attributes:
        token: number of the iteration that needs the batch; results of other iterations are discarded.
        number: position of the batch in the epoch.
        slot: slot for the batch, or `NO_SLOT`.
        epoch: epoch of the batch.
        ids: ids of the samples.
        repeat: how often the samples have come before in this epoch.
        deaths: number of workers that died on this batch; not part of the message.
    """

    token: int
    number: int
    slot: int
    epoch: int
    ids: Ids
    repeat: int = 0
    deaths: int = 0

    @property
    def draws(self) -> int | list[int]:
        """The epoch of the random draws, or one for each sample: another one for a sample that comes again."""
        first, ids = self.epoch + (self.repeat << 32), self.ids.tolist()
        if len(set(ids)) == len(ids):
            return first
        times = dict.fromkeys(ids, 0)
        epochs = []
        for id in ids:
            epochs.append(first + (times[id] << 32))
            times[id] += 1
        return epochs

    def pack(self, kind: int = WORK) -> bytes:
        """Return the message as bytes."""
        return _TASK.pack(kind, self.slot, self.token, self.number, self.epoch, self.repeat) + self.ids.tobytes()


def unpack_task(data: bytes | bytearray) -> tuple[int, Task]:
    """Return the kind and the task of a message."""
    kind, slot, token, number, epoch, repeat = _TASK.unpack_from(data)
    return kind, Task(token, number, slot, epoch, np.frombuffer(data, np.int64, offset=_TASK.size), repeat)


def forget_message(token: int) -> bytes:
    """Return the message that cancels the batches of iterations before `token`."""
    return Task(token, 0, 0, 0, NOTHING).pack(FORGET)


@dataclass(slots=True)
class Result:
    """The result of a task.

    Attributes:
        status: one of
            READY: the slot holds `size` bytes.
            PRIVATE: the batch is in `memory`, because the slot is too small.
            WHOLE: `value` is the batch; within one process only.
            FAILED: the error is `value`; in a message, it is packed in `note`.
            EMPTY: all samples were skipped.
            UNDONE: the task was cancelled, or a cached sample was evicted.
        token, number, slot: those of the task.
        ids: ids of the samples in the batch.
        skipped: number of skipped samples; `note` then has one line per error.
        started: start of the work (`time.monotonic`); 0 if the task failed or was not done.
        worker: number of the worker process, or `GATHERER`. Set by the receiver; not part of the message.
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

    def add_to(self, counts: dict[str, Any]) -> None:
        """Add the hits, misses, bytes, seconds and skips of the batch to `counts`."""
        for name in ("hits", "misses", "storage_bytes", "fetch_seconds", "prep_seconds"):
            counts[name] += getattr(self, name)
        counts["skips"] += self.skipped

    @property
    def error(self) -> BaseException:
        """The error of a failed task."""
        return unpack_error(self.note) if self.value is None else self.value

    def pack(self) -> list[bytes | memoryview]:
        """Return the message as pieces of bytes, to be sent one after the other."""
        if self.status == FAILED and self.value is not None:
            self.note = pack_error(self.value)
        memory = b"" if self.memory is None else memoryview(self.memory[: self.size])  # type: ignore[arg-type]
        head = _RESULT.pack(*_numbers_of(self), len(self.ids), len(self.note), len(memory))
        start = head + self.ids.tobytes() + self.note
        return [start + bytes(-len(start) % _ALIGNMENT), memory] if len(memory) else [start]


def unpack_result(data: bytes | bytearray | memoryview) -> Result:
    """Return the result in a message; it refers to the memory of `data`."""
    *numbers, count, noted, private = _RESULT.unpack_from(data)
    ids = np.frombuffer(data, np.int64, count, _RESULT.size)
    at = _RESULT.size + 8 * count
    note = bytes(data[at : at + noted])
    memory = None if not private else np.frombuffer(data, np.uint8, private, len(data) - private)
    return Result(**dict(zip(_NUMBERS, numbers, strict=True)), ids=ids, note=note, memory=memory)
