"""Executors: what builds the batches of tasks. Threads that gather, worker processes, the training process itself.

An executor takes tasks with `submit` and gives results from `poll`, in any order; neither waits. It wakes the loop that
waits through descriptors, so that one wait covers all executors.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
from collections import deque
from typing import Protocol

from stallfree.batches.batch_builder import BatchBuilder, failure
from stallfree.batches.messages import GATHERER, NO_SLOT, UNDONE, Result, Task
from stallfree.batches.reader import Pending
from stallfree.batches.ring import Ring
from stallfree.cache import stay_alone


class Executor(Protocol):
    """Builds batches."""

    @property
    def needs_slot(self) -> bool:
        """Whether `submit` takes tasks with a slot."""

    @property
    def slots_to_take(self) -> int:
        """Free slots that the tasks under way will take."""

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """What to wait for, as descriptors and events of `poll`."""

    def submit(self, task: Task) -> None:
        """Take a task."""

    def poll(self, number: int | None) -> list[Result]:
        """The results that are there. `number` is the batch that is waited for, if there is one."""

    def prepare_wait(self) -> bool:
        """Announce results from now on. Returns whether one is there already, so that there is nothing to wait for."""

    def forget(self, token: int) -> None:
        """Do not build batches of iterations before `token`."""

    def check(self) -> None:
        """Look for workers that died or hang."""

    def describe(self, task: Task) -> str:
        """What has that task, for messages; "" if this executor has not."""

    def close(self) -> None:
        """End threads and processes."""


class TrainingProcess:
    """Builds batches in the process that iterates, each when it is waited for. Fetches are started before.

    Args:
        builder: builds.
    """

    slots_to_take = 0
    descriptors: list[tuple[int, int]] = []  # noqa: RUF012  (never anything to wait for)

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder
        self._tasks: dict[int, tuple[Task, Pending]] = {}

    @property
    def needs_slot(self) -> bool:
        """Only if slots are pinned, for copies to a device: objects of this process are as good otherwise."""
        return self._builder.slots.pin is not None

    def submit(self, task: Task) -> None:
        """Start the fetches of a task."""
        self._tasks[task.number] = task, self._builder.start(task)

    def poll(self, number: int | None) -> list[Result]:
        """Build the batch that is waited for."""
        found = None if number is None else self._tasks.pop(number, None)
        return [] if found is None else [self._builder.finish(*found, here=True)]

    def prepare_wait(self) -> bool:
        """Nothing is built while the process waits."""
        return False

    def forget(self, token: int) -> None:
        """Cancel what was started."""
        for _, pending in self._tasks.values():
            pending.cancel()
        self._tasks.clear()

    def check(self) -> None:
        """Does nothing."""

    def describe(self, task: Task) -> str:
        """This process."""
        return "this process" if task.number in self._tasks else ""

    def close(self) -> None:
        """Cancel what was started."""
        self.forget(0)


class GatherThreads:
    """Threads that fill slots straight from the cache. They take a slot only when they come to a task, not before.

    Args:
        builder: builds.
        ring: has the slots.
        threads: how many.
    """

    needs_slot = False

    def __init__(self, builder: BatchBuilder, ring: Ring, threads: int) -> None:
        self._builder = builder
        self._ring = ring
        self._submitted = 0
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()  # counts: one per task
        self._wanted = 0
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._done: deque[Result] = deque()
        self._awaited = False
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._threads = [
            threading.Thread(target=self._run, name=f"stallfree-gather-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """See `Executor`."""
        return [(self._read, select.POLLIN)]

    @property
    def slots_to_take(self) -> int:
        """Free slots that the tasks under way will take. Rather one too many than one too few."""
        return self._submitted - self._begun.qsize()

    def submit(self, task: Task) -> None:
        """Take a task that has no slot."""
        self._submitted += 1
        self._tasks.put(task)

    def forget(self, token: int) -> None:
        """See `Executor`."""
        self._wanted = token

    def prepare_wait(self) -> bool:
        """See `Executor`."""
        self._awaited = True
        return bool(self._done)

    def poll(self, number: int | None) -> list[Result]:
        """See `Executor`."""
        if self._awaited:
            self._awaited = False
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 4096)
        results = []
        while self._done:
            results.append(self._done.popleft())
        return results

    def check(self) -> None:
        """A thread does not die."""

    def describe(self, task: Task) -> str:
        """The last to be asked."""
        return "a thread that gathers"

    def _run(self) -> None:
        stay_alone()
        while (task := self._tasks.get()) is not None:
            self._done.append(self._do(task))
            if self._awaited:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write, b"x")

    def _do(self, task: Task) -> Result:
        wanted = task.token >= self._wanted
        try:
            slot = self._ring.take() if wanted else None
        except Exception as error:  # no folder can be made
            return failure(task, error, here=True)
        finally:
            self._begun.put(None)
        if not wanted:
            return Result(UNDONE, task.token, task.number, NO_SLOT)
        place = NO_SLOT if slot is None else slot
        result = self._builder.gather(Task(task.token, task.number, place, task.epoch, task.ids))
        result.worker = GATHERER
        return result

    def close(self) -> None:
        """End the threads."""
        self._awaited = False
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if threading.current_thread() is not thread:  # the garbage collector may come by here in any thread
                thread.join()
        os.close(self._read)
        os.close(self._write)
