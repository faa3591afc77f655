"""Do one task: fill a slot with a batch. The same code in worker processes, in the gathering thread and inline."""

from __future__ import annotations

import pickle
import time
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stallfree.loader.collate import Bytes, Collate, batch_structure, compose, write_batch
from stallfree.loader.messages import EMPTY, FAILED, INLINE, READY, UNDONE, Result, Task
from stallfree.loader.reader import Pending, Reader
from stallfree.loader.ring import Slots


@dataclass
class Filler:
    """What it takes to fill slots.

    Attributes:
        reader: gives samples.
        slots: where batches go.
        collate: the user's function, or None for torch's default.
        seed: of the randomness.
        skip: leave samples out that cannot be had.
    """

    reader: Reader
    slots: Slots
    collate: Collate | None
    seed: int
    skip: bool

    def can_gather(self, ids: Any) -> bool:
        """Whether the batch is nothing but a gather out of the cache at this moment."""
        cache = self.reader.cache
        return (
            self.collate is None
            and cache is not None
            and self.reader.plain
            and cache.structure is not None
            and batch_structure(cache.structure, len(ids)) is not None
            and bool(cache.resident(ids).all())
        )

    def gather(self, task: Task) -> Result:
        """Fill the slot straight from the cache. `UNDONE` when a sample has vanished or the slot is too small."""
        started = time.perf_counter()
        cache, undone = self.reader.cache, Result(UNDONE, task.token, task.number, task.slot)
        if cache is None or cache.structure is None:
            return undone
        count = len(task.ids)
        room = compose(cache.structure, count, partial(self.slots.reserve, task.slot))
        if room is None or not cache.gather(task.ids, room[0]).all():
            return undone
        spent = time.perf_counter() - started
        return Result(
            READY, task.token, task.number, task.slot, room[1], hits=count, prep_seconds=spent, ids=task.ids
        )

    def start(self, task: Task) -> Pending:
        """Start the fetches of a task."""
        return self.reader.start(task.ids)

    def finish(self, task: Task, pending: Pending) -> Result:
        """Prepare and collate a task that was started. Errors are in the result."""
        started = time.perf_counter()
        try:
            if not pending.fetches and self.can_gather(task.ids):
                done = self.gather(task)
                if done.status == READY:
                    return done
            samples = self.reader.finish(pending, self.seed, task.epoch, skip=self.skip)
            status, size, payload = EMPTY, 0, b""
            if samples.values:
                used = write_batch(samples.values, self.collate, partial(self.slots.reserve, task.slot))
                status, size, payload = _placed(used)
        except Exception as error:
            return Result(FAILED, task.token, task.number, task.slot, payload=pack_error(error))
        return Result(
            status,
            task.token,
            task.number,
            task.slot,
            size,
            hits=samples.hits,
            misses=samples.misses,
            storage_bytes=samples.storage_bytes,
            fetch_seconds=samples.fetch_seconds,
            prep_seconds=time.perf_counter() - started - samples.fetch_seconds,
            ids=np.asarray(samples.ids, np.int64),
            skipped=len(samples.skipped),
            payload=payload or "\n".join(map(str, samples.skipped)).encode(),
        )


def _placed(used: int | Bytes) -> tuple[int, int, bytes]:
    if isinstance(used, int):
        return READY, used, b""
    return INLINE, used.size, used.tobytes()


def pack_error(error: Exception) -> bytes:
    """The error and its traceback, as text where it cannot be pickled."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        data = pickle.dumps((error, trace))
        pickle.loads(data)
    except Exception:
        return pickle.dumps((None, trace))
    return data
