"""The batches of a group: built ahead of what members ask for, and kept in the ring while one needs or holds them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stallfree.batches.messages import EMPTY, FAILED, NO_SLOT, UNDONE, Ids, Result, Task
from stallfree.ipc.remote import pack_plain_error, unpack_error
from stallfree.sampling.order import Order
from stallfree.shared.schedule import Answer, Schedule
from stallfree.workers.worker_pool import Options, WorkerPool, new_counts

SLOTS_PER_MEMBER = 4
"""Slots for each member beyond those under way: batches that it may hold, and one on its way to it."""

KEPT = SLOTS_PER_MEMBER - 1


@dataclass
class Setup:
    """What a coordinator is started with.

    Attributes:
        folder: of the group.
        options: how batches are made.
        base_seed: of the workers' own generators.
        order: of the chunks.
        detach: leave laggards behind at once.
        lag_seconds: else, how long they may hold up the others.
    """

    folder: Path
    options: Options
    base_seed: int
    order: Order
    detach: bool
    lag_seconds: float


@dataclass
class _Made:
    """A batch that is ready: its slot, and the result as members receive it."""

    slot: int
    message: bytes


class Preparation:
    """See the module.

    Args:
        setup: of the group.
        leave_behind: called with each member that is left behind.

    Attributes:
        pool: builds.
        schedule: says what to build next, and what is free.
    """

    def __init__(self, setup: Setup, leave_behind: Callable[[Any], object]) -> None:
        self._setup, self._leave_behind = setup, leave_behind
        self._counts = {**new_counts(), "num_workers": setup.options.workers}
        self.pool = WorkerPool(
            setup.options, setup.base_seed, self._counts, slots=setup.options.ahead + SLOTS_PER_MEMBER
        )
        self.schedule = Schedule(len(setup.order), setup.options.ahead)
        self._made: dict[int, _Made] = {}
        self._tasks: dict[int, Task] = {}
        self._largest = 0
        self._epoch = -1
        self._plan: list[Ids] = []  # of that epoch
        self._blocked: float | None = None

    def begin(self) -> None:
        """Start with the epoch after the last one of the group, or with what its members need."""
        self.schedule.begin(_next_epoch(self._setup.folder))

    @property
    def patience(self) -> float:
        """Seconds that laggards may go on to hold up the others."""
        if self._blocked is None:
            return float("inf")
        limit = 0.0 if self._setup.detach else self._setup.lag_seconds
        return max(0.001, self._blocked + limit - time.monotonic())

    def explain(self, batch: int) -> str:
        """What is done about a batch; "" if it is not being built."""
        task = self._tasks.get(batch)
        return "" if task is None else f"it is with {self.pool.describe(task)}; its samples are {task.ids.tolist()}"

    def message(self, number: int) -> bytes:
        """The result that is batch `number`."""
        return self._made[number].message

    def start_more(self) -> None:
        """Start what can be started."""
        while True:
            number = self.schedule.next_to_start()
            if number is None or len(self._tasks) >= self._setup.options.ahead:
                self._blocked = None
                return
            if self.pool.room:
                self._blocked = None
                self._start(number)
            elif not self._make_room():
                return

    def _make_room(self) -> bool:
        """No slot is free: whether something has been done about it. If nobody waits, nothing need be done."""
        if self._tasks or not self.schedule.hungry:
            self._blocked = None
            return False
        now = time.monotonic()
        self._blocked = now if self._blocked is None else self._blocked
        if not self._setup.detach and now - self._blocked < self._setup.lag_seconds:
            return False
        laggards = self.schedule.laggards()
        for member in laggards:
            self._leave_behind(member)
            self.free(self.schedule.leave_behind(member))
        coming = self.schedule.next_to_start()
        if not laggards and coming is not None:  # all slots are held for good: go on without them
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
        # The token tells epochs apart: two may be under way at once.
        task = self._tasks[number] = Task(epoch + 1, batch, NO_SLOT, epoch, ids)
        self.pool.submit(task, gather=self.pool.builder.can_gather(ids))

    def collect(self) -> list[Answer]:
        """Take the batches that are ready; what to send of them to the members that wait."""
        answers = []
        for result in self.pool.poll():
            number = (result.token - 1) * self.schedule.batches + result.number
            task = self._tasks[number]
            if result.status == UNDONE:
                self._counts["retries"] += 1
                task.slot = result.slot
                self.pool.submit(task, gather=False)
            else:
                del self._tasks[number]
                answers += self._finish(number, result)
        return answers

    def _finish(self, number: int, result: Result) -> list[Answer]:
        counts = self._counts
        counts["batches"] += 1
        counts["samples"] += len(result.ids)
        for name in ("hits", "misses", "storage_bytes", "fetch_seconds", "prep_seconds"):
            counts[name] += getattr(result, name)
        counts["skips"] += result.skipped
        if result.status == FAILED:
            error, trace = (result.value, "") if result.value is not None else unpack_error(result.note)
            result = replace(result, note=pack_plain_error(error, trace), value=None)
        if result.size > self._largest:
            self._largest = result.size
            self.resize()
        slot = result.slot
        if result.status in (FAILED, EMPTY):
            self.pool.ring.give(slot)
            slot = NO_SLOT
        self._made[number] = _Made(slot, b"".join(result.pack()))
        grants, freed = self.schedule.finish(number)
        self.free(freed)
        return grants

    def free(self, numbers: list[int]) -> None:
        """These batches are not needed any more."""
        for number in numbers:
            self.pool.ring.give(self._made.pop(number).slot)

    # -- memory -------------------------------------------------------------------------------------------------------

    def resize(self) -> None:
        """As many slots as the members need, or as their bytes allow."""
        members = len(self.schedule.members)
        count = self._setup.options.ahead + SLOTS_PER_MEMBER * max(1, members)
        staging = self._setup.options.staging
        if staging is not None:
            count = min(count, max(2, staging * 8 // 9 // max(self._largest, 1)))
        self.pool.ring.resize(count)

    @property
    def keep(self) -> int:
        """How many batches a member may hold, so that slots are left to go on with."""
        members, count = len(self.schedule.members), self.pool.ring.count
        spare = count - max(1, min(self._setup.options.ahead, count // 2)) - members
        return max(0, min(KEPT, spare // max(1, members)))

    def publish(self) -> None:
        """Show what the group does, now and then."""
        now = time.monotonic()
        if now >= self.pool.status.due:
            self.pool.status.publish(now, max(0, self.schedule.epoch), self._counts)


def _next_epoch(folder: Path) -> int:
    """The epoch after the last one of which a batch was prepared here."""
    try:
        return int((folder / "epoch").read_text()) + 1
    except (OSError, ValueError):
        return 0


def _note_epoch(folder: Path, epoch: int) -> None:
    """A batch of this epoch was prepared: the next coordinator goes on after it."""
    with contextlib.suppress(OSError):
        new = folder / f"epoch-{os.getpid()}"
        new.write_text(str(epoch))
        new.rename(folder / "epoch")
