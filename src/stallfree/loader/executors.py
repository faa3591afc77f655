"""The `Executor` protocol, and the executors that use gather threads or the training process.

An executor receives tasks through `submit` and returns results from `poll`, in any order; neither waits. It wakes the
waiting loop through descriptors, so that one wait covers all executors.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from typing import Protocol

from stallfree.cache.serial import stay_alone
from stallfree.datasets.sample_access import Pending
from stallfree.errors import batch_timeout
from stallfree.loader.batch import BatchBuilder, failure
from stallfree.loader.messages import GATHERER, NO_SLOT, UNDONE, Result, Task
from stallfree.loader.ring import Ring


class Executor(Protocol):
    """Builds batches."""

    @property
    def needs_slot(self) -> bool:
        """Whether `submit` requires tasks with a slot."""

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """The descriptors to wait for, with events of `poll`."""

    def submit(self, task: Task) -> None:
        """Receive a task."""

    def poll(self, number: int | None) -> list[Result]:
        """The available results. `number` is the awaited batch, if there is one."""

    def prepare_wait(self) -> bool:
        """Signal results from now on. Returns whether one is already available, so that no wait is needed."""

    def forget(self, token: int) -> None:
        """Drop batches of iterations before `token`."""

    def check(self) -> None:
        """Check for workers that died or hang."""

    def describe(self, task: Task) -> str:
        """The process or thread that has this task, for messages; "" if this executor does not have it."""

    def close(self) -> None:
        """Stop threads and processes."""


class TrainingProcess:
    """Builds each batch in the iterating process when it is awaited. Fetches are started earlier.

    `poll` raises `WaitError` for a batch whose fetches do not come in time; the batch may be awaited again.

    Args:
        builder: builds.
        seconds: maximum wait for the fetches of a batch.
    """

    descriptors: list[tuple[int, int]] = []  # noqa: RUF012  (never anything to wait for)

    def __init__(self, builder: BatchBuilder, seconds: float) -> None:
        self._builder, self._seconds = builder, seconds
        self._tasks: dict[int, tuple[Task, Pending]] = {}

    @property
    def needs_slot(self) -> bool:
        """Only if slots are pinned, for copies to a device: otherwise objects of this process suffice."""
        return self._builder.slots.pin is not None

    def submit(self, task: Task) -> None:
        """Start the fetches of a task."""
        self._tasks[task.number] = task, self._builder.start(task)

    def poll(self, number: int | None) -> list[Result]:
        """Build the awaited batch."""
        if number is None or number not in self._tasks:
            return []
        started = time.monotonic()
        self._wait_for_fetches(*self._tasks[number])
        waited = time.monotonic() - started
        result = self._builder.finish(*self._tasks.pop(number), here=True)
        result.fetch_seconds += waited
        result.started = started if result.started else 0.0
        return [result]

    def _wait_for_fetches(self, task: Task, pending: Pending) -> None:
        deadline = time.monotonic() + self._seconds
        for future in list(pending.fetches.values()):
            if not future.done():
                with contextlib.suppress(TimeoutError, CancelledError):
                    future.exception(max(0.0, deadline - time.monotonic()))
                if not future.done():
                    raise batch_timeout(
                        f"batch {task.number} of epoch {task.epoch} did not come within {self._seconds:g} s; its "
                        f"samples are {task.ids.tolist()}, and storage does not give them. Give a larger timeout if "
                        "it takes so long"
                    )

    def prepare_wait(self) -> bool:
        """See `Executor`: no batch is built during a wait."""
        return False

    def forget(self, token: int) -> None:
        """Cancel the started fetches."""
        for _, pending in self._tasks.values():
            pending.cancel()
        self._tasks.clear()

    def check(self) -> None:
        """Do nothing."""

    def describe(self, task: Task) -> str:
        """This process."""
        return "this process" if task.number in self._tasks else ""

    def close(self) -> None:
        """Cancel the started fetches."""
        self.forget(0)


class GatherThreads:
    """Threads that fill slots directly from the cache. A thread takes a slot only when it starts a task.

    Args:
        builder: builds.
        ring: has the slots.
        threads: number of threads.
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
        """Free slots that the tasks in flight will take; an upper bound."""
        return self._submitted - self._begun.qsize()

    def submit(self, task: Task) -> None:
        """Receive a task without a slot."""
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
        """Do nothing: threads do not die."""

    def describe(self, task: Task) -> str:
        """See `Executor`. Called after all other executors."""
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
        except Exception as error:  # the folder cannot be created
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
        """Stop the threads."""
        self._awaited = False
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if threading.current_thread() is not thread:  # the garbage collector may run in any thread
                thread.join()
        os.close(self._read)
        os.close(self._write)
