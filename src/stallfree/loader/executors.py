"""`Executor`, which builds batches, and the executors that use threads or the training process.

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
from collections.abc import Sequence
from concurrent import futures

from stallfree.cache.serial import stay_alone
from stallfree.datasets.samples import Pending
from stallfree.errors import WorkerError, batch_timeout
from stallfree.loader.batch import BatchBuilder
from stallfree.loader.messages import GATHERER, UNDONE, Result, Task

LIVES = 3
"""Number of workers that may die on one batch before an error."""


class Executor:
    """Builds batches.

    Attributes:
        needs_slot: whether `submit` requires tasks with a slot.
        descriptors: the descriptors to wait for, with events of `select.poll`.
        replaced: number of workers that died since this was last set to 0.
        stuck: whether no worker gets started here, so that another process should try.
    """

    needs_slot = stuck = False
    replaced = 0
    descriptors: Sequence[tuple[int, int]] = ()

    def submit(self, task: Task) -> None:
        """Receive a task."""
        raise NotImplementedError

    def poll(self, number: int | None) -> list[Result]:
        """Return the available results. `number` is the awaited batch, if there is one."""
        raise NotImplementedError

    def prepare_wait(self) -> bool:
        """Signal results from now on. Returns whether one is already available, so that no wait is needed."""
        return False

    def forget(self, token: int) -> None:
        """Drop batches of iterations before `token`."""

    def check(self) -> None:
        """Check for workers that died or hang."""

    def describe(self, task: Task) -> str:
        """Return the process or thread that has this task, for messages; "" if this executor does not have it."""
        return ""

    def close(self) -> None:
        """Stop threads and processes."""


class TrainingProcess(Executor):
    """Builds each batch in the iterating process when it is awaited. Fetches are started earlier.

    `poll` raises `WaitError` for a batch whose fetches do not come in time; the batch may be awaited again.

    Args:
        builder: builds.
        seconds: maximum wait for the fetches of a batch.
    """

    def __init__(self, builder: BatchBuilder, seconds: float) -> None:
        self._builder, self._seconds = builder, seconds
        self._tasks: dict[int, tuple[Task, Pending]] = {}

    @property
    def needs_slot(self) -> bool:  # type: ignore[override]
        """Only if slots are pinned, for copies to a device: otherwise objects of this process suffice."""
        return self._builder.slots.pin is not None

    def submit(self, task: Task) -> None:
        self._tasks[task.number] = task, self._builder.start(task)

    def poll(self, number: int | None) -> list[Result]:
        if number is None or number not in self._tasks:
            return []
        started = time.monotonic()
        task, pending = self._tasks[number]
        pending.deadline = started + self._seconds
        if pending.fetches and futures.wait(list(pending.fetches.values()), self._seconds).not_done:
            raise batch_timeout(
                f"batch {task.number} of epoch {task.epoch} did not come within {self._seconds:g} s; its samples are "
                f"{task.ids.tolist()}, and storage does not give them. Give a larger timeout if it takes so long"
            )
        waited = time.monotonic() - started
        del self._tasks[number]
        result = self._builder.finish(task, pending, here=True)
        result.fetch_seconds += waited
        result.started = started if result.started else 0.0
        return [result]

    def forget(self, token: int) -> None:
        for _, pending in self._tasks.values():
            pending.cancel()
        self._tasks.clear()

    def describe(self, task: Task) -> str:
        return "this process" if task.number in self._tasks else ""

    def close(self) -> None:
        self.forget(0)


class ThreadExecutor(Executor):
    """An executor whose threads deliver the results. A pipe wakes the loop, but only while that waits."""

    needs_slot = True

    def __init__(self) -> None:
        self._done: deque[Result] = deque()
        self._wanted, self._awaited = 0, False
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.descriptors = [(self._read, select.POLLIN)]

    def deliver(self, result: Result) -> None:
        """Make a result available. Called by the threads."""
        self._done.append(result)
        if self._awaited:
            with contextlib.suppress(BlockingIOError):
                os.write(self._write, b"x")

    def prepare_wait(self) -> bool:
        self._awaited = True
        return bool(self._done)

    def poll(self, number: int | None) -> list[Result]:
        if self._awaited:
            self._awaited = False
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 4096)
        results = []
        while self._done:
            results.append(self._done.popleft())
        return results

    def forget(self, token: int) -> None:
        self._wanted = token

    def close(self) -> None:
        """Close the pipe, after the threads have ended."""
        os.close(self._read)
        os.close(self._write)


class GatherThreads(ThreadExecutor):
    """Threads that fill slots directly from the cache.

    Args:
        builder: builds.
        threads: number of threads.
    """

    def __init__(self, builder: BatchBuilder, threads: int) -> None:
        super().__init__()
        self._builder = builder
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"stallfree-gather-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        self._tasks.put(task)

    def describe(self, task: Task) -> str:
        return "a thread that gathers"  # called after all other executors

    def _run(self) -> None:
        stay_alone()
        while (task := self._tasks.get()) is not None:
            self.deliver(self._build(task))

    def _build(self, task: Task) -> Result:
        if task.token < self._wanted:
            return Result(UNDONE, task.token, task.number, task.slot)
        result = self._builder.gather(task)
        result.worker = GATHERER
        return result

    def close(self) -> None:
        self._awaited = False
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if threading.current_thread() is not thread:  # the garbage collector may run in any thread
                thread.join()
        super().close()


def deadly_batch(task: Task, workers: str, last: str) -> WorkerError:
    """Return the error of a batch during which `LIVES` workers ended; `last` describes the end of the last one."""
    ids = task.ids.tolist()
    return WorkerError(
        f"{LIVES} {workers} one after the other on batch {task.number} of epoch {task.epoch}, which holds the samples "
        f"{ids}; the last: {last}. Prepare these samples with num_workers=0 to see why",
        ids=ids,
    )
