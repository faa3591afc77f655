"""Builds a group's batches ahead of requests, and keeps them while a member needs or holds them.

The `Schedule` selects the next batch, the worker pool builds it, and `collect` returns the answers to waiting members.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stallfree.ipc.remote import pack_error
from stallfree.loader.messages import EMPTY, FAILED, NO_SLOT, UNDONE, Ids, Result, Task
from stallfree.loader.order import Order
from stallfree.loader.pool import Options, WorkerPool, new_counts
from stallfree.shared.schedule import Answer, Schedule

SLOTS_PER_MEMBER = 4
"""Slots per member beyond the batches in flight: the batches that it may hold, and one being sent to it."""

MAX_HELD = SLOTS_PER_MEMBER - 1


@dataclass
class Setup:
    """The configuration of a coordinator.

    Attributes:
        folder: the group's folder.
        options: options of the worker pool.
        base_seed: seed of the workers' own generators.
        order: order of the chunks.
        detach: detach laggards at once.
        lag_seconds: otherwise, seconds that laggards may hold up the other members.
    """

    folder: Path
    options: Options
    base_seed: int
    order: Order
    detach: bool
    lag_seconds: float


@dataclass
class _ReadyBatch:
    """A ready batch: its slot, and the packed result for the members."""

    slot: int
    message: bytes


class Preparation:
    """Builds a group's batches and keeps them in the ring. See the module.

    Args:
        setup: configuration of the group.
        detach: called with each member that is detached.

    Attributes:
        pool: worker pool that builds the batches.
        schedule: selects the next batch, and the batches to free.
    """

    def __init__(self, setup: Setup, detach: Callable[[Any], object]) -> None:
        self._setup, self._on_detach = setup, detach
        ahead = setup.options.ahead
        self.pool = WorkerPool(setup.options, setup.base_seed, new_counts(), slots=ahead + SLOTS_PER_MEMBER)
        self.schedule = Schedule(len(setup.order), setup.options.ahead)
        self._made: dict[int, _ReadyBatch] = {}
        self._tasks: dict[int, Task] = {}
        self._largest = 0
        self._epoch = -1
        self._plan: list[Ids] = []  # of `_epoch`
        self._blocked: float | None = None

    def begin(self) -> None:
        """Start with the epoch after the group's last one, or with the batches that its members need."""
        self.schedule.begin(_next_epoch(self._setup.folder))

    @property
    def lag_seconds_left(self) -> float:
        """Seconds that laggards may still hold up the other members."""
        if self._blocked is None:
            return float("inf")
        limit = 0.0 if self._setup.detach else self._setup.lag_seconds
        return max(0.001, self._blocked + limit - time.monotonic())

    def explain(self, batch: int) -> str:
        """Return the state of a batch as text, or "" if it is not being built."""
        task = self._tasks.get(batch)
        return "" if task is None else f"it is with {self.pool.describe(task)}; its samples are {task.ids.tolist()}"

    def message(self, number: int) -> bytes:
        """Return the packed result of batch `number`."""
        return self._made[number].message

    def start_more(self) -> None:
        """Start as many batches as the slots and the limit in flight allow."""
        if self.schedule.ahead != self.pool.ahead:  # Ray workers have come or gone
            self.schedule.ahead = self.pool.ahead
            self.resize()
        while True:
            number = self.schedule.next_to_start()
            if number is None or len(self._tasks) >= self.schedule.ahead:
                self._blocked = None
                return
            if self.pool.room:
                self._blocked = None
                self._start(number)
            elif not self._make_room():
                return

    def _make_room(self) -> bool:
        """Try to free a slot; returns whether anything changed. Does nothing if no member is waiting."""
        if self._tasks or not self.schedule.has_waiting:
            self._blocked = None
            return False
        now = time.monotonic()
        self._blocked = now if self._blocked is None else self._blocked
        if not self._setup.detach and now - self._blocked < self._setup.lag_seconds:
            return False
        laggards = self.schedule.laggards()
        for member in laggards:
            self._on_detach(member)
            self.free(self.schedule.detach(member))
        coming = self.schedule.next_to_start()
        if not laggards and coming is not None:  # all slots are held indefinitely: build without one
            self._start(coming)
        return True

    def _start(self, number: int) -> None:
        self.schedule.start(number)
        epoch, batch = divmod(number, self.schedule.batches)
        if epoch != self._epoch:
            self._epoch = epoch
            self._plan = list(self._setup.order.batches(epoch, 0))
            _note_epoch(self._setup.folder, epoch)
        ids = self._plan[batch]
        # Tokens distinguish epochs, since two may be in flight at once.
        task = self._tasks[number] = Task(epoch + 1, batch, NO_SLOT, epoch, ids)
        self.pool.submit(task, gather=self.pool.builder.can_gather(ids))

    def collect(self) -> list[Answer]:
        """Collect finished batches; returns the answers to the members that wait for them."""
        answers = []
        for result in self.pool.poll():
            number = (result.token - 1) * self.schedule.batches + result.number
            task = self._tasks[number]
            if result.status == UNDONE:
                task.slot = result.slot
                self.pool.submit(task, gather=False)
            else:
                del self._tasks[number]
                answers += self._finish(number, result)
        return answers

    def _finish(self, number: int, result: Result) -> list[Answer]:
        self.pool.counts["batches"] += 1  # from which follows how many Ray workers are needed
        if result.status == FAILED and result.value is not None:
            result = replace(result, note=pack_error(result.value), value=None)
        if result.size > self._largest:
            self._largest = result.size
            self.resize()
        slot = result.slot
        if result.status in (FAILED, EMPTY):
            self.pool.ring.give(slot)
            slot = NO_SLOT
        self._made[number] = _ReadyBatch(slot, b"".join(result.pack()))
        grants, freed = self.schedule.finish(number)
        self.free(freed)
        return grants

    def free(self, numbers: list[int]) -> None:
        """Free the slots of batches that are no longer needed."""
        for number in numbers:
            self.pool.ring.give(self._made.pop(number).slot)

    # -- memory -------------------------------------------------------------------------------------------------------

    def resize(self) -> None:
        """Resize the ring to the slots that the members need, within the limit of bytes."""
        members = len(self.schedule.members)
        count = self.schedule.ahead + SLOTS_PER_MEMBER * max(1, members)
        staging = self._setup.options.staging
        if staging is not None:
            count = min(count, max(2, staging * 8 // 9 // max(self._largest, 1)))
        self.pool.ring.resize(count)

    @property
    def keep(self) -> int:
        """Number of batches a member may hold, so that enough slots remain for new batches."""
        members, count = len(self.schedule.members), self.pool.ring.count
        spare = count - max(1, min(self.schedule.ahead, count // 2)) - members
        return max(0, min(MAX_HELD, spare // max(1, members)))


def _next_epoch(folder: Path) -> int:
    """Return the epoch after the last one of which a batch was prepared."""
    try:
        return int((folder / "epoch").read_text()) + 1
    except (OSError, ValueError):
        return 0


def _note_epoch(folder: Path, epoch: int) -> None:
    """Record that a batch of this epoch was prepared; the next coordinator resumes after it."""
    with contextlib.suppress(OSError):
        new = folder / f"epoch-{os.getpid()}"
        new.write_text(str(epoch))
        new.rename(folder / "epoch")
