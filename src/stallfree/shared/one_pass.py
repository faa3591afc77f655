"""One epoch of one job: what the group serves of it, and what the job has to prepare by itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch

from stallfree.frames import short_traceback
from stallfree.loader.crew import Counts, Crew, Options, new_counts
from stallfree.loader.epoch import Epoch, Progress
from stallfree.loader.iteration import Batch, pinned
from stallfree.loader.messages import NOTHING, Ids
from stallfree.loader.order import Order
from stallfree.pipeline.randomness import Randomness
from stallfree.shared.member import Chunk, Elsewhere, Member, Onward
from stallfree.shared.portions import Portions


@dataclass
class Seat:
    """What a job's passes have in common.

    Attributes:
        member: the job's part in its group.
        order: of the chunks.
        portions: divides the chunks of an epoch.
        options: how this job prepares what the group does not serve to it.
        transform: of this job, or None.
        pin: hand out pinned memory.
        with_ids: hand out `Batch`.
        counts: of what the group served.
        alone_counts: of what was prepared here.
        alone: chunks that were prepared here.
        next_epoch: the one that the next pass begins with.
    """

    member: Member
    order: Order
    portions: Callable[[int], Portions]
    options: Options
    transform: Callable[[Any], Any] | None
    pin: bool
    with_ids: bool
    counts: Counts = field(default_factory=new_counts)
    alone_counts: Counts = field(default_factory=new_counts)
    alone: int = 0
    next_epoch: int = 0

    def __post_init__(self) -> None:
        self.drawing = Randomness(self.transform)


class Pass:
    """Yields the batches: first what the group serves, then what it does not.

    Args:
        seat: of the job.
        epoch: to begin with; another one, if the group is further on.
        done: numbers of the batches that were handed out before, in an epoch that is resumed.

    Attributes:
        done: numbers of the batches that were handed out.
        through: whether it has ended.
        epoch: the group's.
    """

    def __init__(self, seat: Seat, epoch: int, done: frozenset[int]) -> None:
        self.done = set(done)
        self._seat = seat
        self._batches = len(seat.order)
        self._ready: deque[tuple[int, Any, Ids]] = deque()
        self._gaps: deque[tuple[int, int]] = deque()  # numbers in the epoch
        self._crew: Crew | None = None
        self._own: tuple[Epoch, Progress, int] | None = None
        self.through = False
        self._skipped = False
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._portions = self._seat.portions(epoch)
        self._first = epoch * self._batches
        self._at = self._first + self._portions.first_chunk(self.done)
        self._end = self._first + self._portions.chunks

    def __iter__(self) -> Pass:
        return self

    def __len__(self) -> int:
        return len(self._portions)

    @short_traceback
    def __next__(self) -> Any:
        while not self._ready:
            if self.through:
                raise StopIteration
            try:
                self._next_chunk()
            except StopIteration:
                self.close()
                raise
        return self._hand_out(*self._ready.popleft())

    def _hand_out(self, number: int, data: Any, ids: Ids) -> Any:
        seat = self._seat
        self.done.add(number)
        if seat.transform is not None:
            with seat.drawing as drawing:
                drawing.seed(seat.options.seed, self.epoch, -1 - number)
                data = seat.transform(data)
        if seat.pin and torch.cuda.is_available():
            data = pinned(data)
        seat.counts["batches"] += 1
        seat.counts["samples"] += len(ids)
        return Batch(data, torch.from_numpy(np.array(ids)), None) if seat.with_ids else data

    def _next_chunk(self) -> None:
        """Bring one more chunk, and the batches that are complete with it. Raises `StopIteration` at the end."""
        while self._at < self._end:
            started = time.monotonic()
            try:
                got = self._seat.member.take(self._at, self._end)
            finally:
                self._seat.counts["wait_seconds"] += time.monotonic() - started
            if isinstance(got, Onward) and not self.done:
                self._begin(got.epoch)
            elif isinstance(got, Onward):  # of an epoch that was begun, the rest has to come
                self._gaps.append((self._at - self._first, self._end - self._first))
                self._at = self._end
            elif isinstance(got, Elsewhere):
                start = min(got.start, self._end)
                self._gaps.append((self._at - self._first, start - self._first))
                self._at = start
            else:
                self._at += 1
                self._take_in(got)
                return
        self._leave_rest()
        self._next_alone()

    def _take_in(self, chunk: Chunk) -> None:
        counts, result = self._seat.counts, chunk.result
        for name in ("hits", "misses", "storage_bytes", "fetch_seconds", "prep_seconds"):
            counts[name] += getattr(result, name)
        counts["skips"] += result.skipped
        there = chunk.data is not None
        ids = result.ids if there else NOTHING
        self._feed(chunk.number - self._first, chunk.data, ids)
        if chunk.error is not None:
            raise chunk.error

    def _leave_rest(self) -> None:
        """Nothing more of this epoch is needed from the group."""
        if not self._skipped:
            self._skipped = True
            self._seat.member.skip(self._first + self._batches)

    def _next_alone(self) -> None:
        """One chunk that the group does not serve to this job, prepared here."""
        while True:
            if self._own is None:
                if not self._gaps:
                    raise StopIteration
                self._own = self._start_alone(*self._gaps.popleft())
            epoch, progress, at = self._own
            try:
                data, ids = next(epoch)
            except StopIteration:
                self._feed_empty(at, progress.handed_out)
                self._own = None
                if self._ready:
                    return
                continue
            except Exception:
                self._feed_empty(at, progress.handed_out)
                self._own = epoch, progress, progress.handed_out
                raise
            self._feed_empty(at, progress.handed_out - 1)
            self._own = epoch, progress, progress.handed_out
            self._seat.alone += 1
            self._feed(progress.handed_out - 1, data, ids)
            return

    def _feed_empty(self, start: int, stop: int) -> None:
        for number in range(start, stop):
            self._feed(number, None, NOTHING)

    def _feed(self, number: int, data: Any, ids: Ids) -> None:
        made = self._portions.feed(number, data, ids)
        self._ready.extend(batch for batch in made if batch[0] not in self.done)

    def _start_alone(self, start: int, stop: int) -> tuple[Epoch, Progress, int]:
        seat = self._seat
        if self._crew is None:
            self._crew = Crew(seat.options, seat.options.seed & 0x7FFFFFFF, seat.alone_counts)
        batches = islice(seat.order.batches(self.epoch, start), stop - start)
        progress = Progress(batches, self.epoch, start)
        return Epoch(self._crew, progress), progress, start

    def close(self) -> None:
        """End this pass. May be called twice."""
        if self.through:
            return
        self.through = True
        self._ready.clear()
        self._leave_rest()
        self._seat.next_epoch = self.epoch + 1
        if self._own is not None:
            self._own[0].close()
        if self._crew is not None:
            self._crew.close()

    def __del__(self) -> None:
        if hasattr(self, "_at"):
            self.close()
