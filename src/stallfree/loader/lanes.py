"""Lanes: the ways in which a task gets done. Worker processes, a gathering thread, or the training loop itself.

Every lane takes tasks with `submit` and gives results from `poll`, in any order. A lane wakes the waiting loop through a
descriptor, so that one wait covers all lanes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import select
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from stallfree.errors import InputError, WorkerError
from stallfree.loader.fill import Filler
from stallfree.loader.messages import NO_SLOT, STOP_MESSAGE, UNDONE, Result, Task, forget_message, unpack_result
from stallfree.loader.ring import Ring
from stallfree.loader.worker import WorkerSetup, worker_main

LIVES = 3
"""Workers that may die on one batch before that is an error."""

_STOP_SECONDS = 5.0
_trainer_ends: weakref.WeakSet[Any] = weakref.WeakSet()


class GatherLane:
    """A thread that fills slots straight from the cache. It takes a slot only when it comes to a task, not before."""

    def __init__(self, filler: Filler, ring: Ring) -> None:
        self._filler = filler
        self._ring = ring
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._done: deque[Result] = deque()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="stallfree-gather", daemon=True)
        self._thread.start()

    @property
    def descriptors(self) -> list[int]:
        """Readable when there is a result."""
        return [self._read]

    def submit(self, task: Task) -> None:
        """Take a task."""
        self._tasks.put(task)

    def poll(self) -> list[Result]:
        """The results that are there."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        results = []
        while self._done:
            results.append(self._done.popleft())
        return results

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            slot = self._ring.take()
            if slot is None:  # never, as long as no more tasks are under way than there are slots for
                self._done.append(Result(UNDONE, task.token, task.number, NO_SLOT))
            else:
                self._done.append(self._filler.gather(replace(task, slot=slot)))
            with contextlib.suppress(BlockingIOError):
                os.write(self._write, b"x")

    def close(self) -> None:
        """End the thread."""
        self._tasks.put(None)
        self._thread.join()
        os.close(self._read)
        os.close(self._write)


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    tasks: list[Task] = field(default_factory=list)


class WorkerLane:
    """Worker processes. One that dies is replaced, and its batches are done again.

    Raises `InputError` when something cannot be sent to a worker, `WorkerError` when a batch has killed three workers.
    """

    def __init__(self, setup: WorkerSetup, context: BaseContext | None) -> None:
        self._context = context or multiprocessing.get_context()
        self._setup = setup
        self._deaths: dict[tuple[int, int], int] = {}
        self.replaced = 0
        self._workers: list[_Worker] = []
        try:
            for number in range(setup.workers):
                self._workers.append(self._start(number))
        except BaseException:
            self.close()
            raise

    @property
    def descriptors(self) -> list[int]:
        """Readable when there is a result or a worker has died."""
        return [worker.connection.fileno() for worker in self._workers]

    def describe(self, task_number: int) -> str:
        """Who works on the batch of that number, for messages."""
        for worker in self._workers:
            if any(task.number == task_number for task in worker.tasks):
                alive = "alive" if worker.process.is_alive() else "dead"
                return f"worker process {worker.process.pid}, {alive}, with {len(worker.tasks)} batches to do"
        return "nobody"

    def submit(self, task: Task) -> None:
        """Give a task to the worker with the fewest."""
        worker = min(self._workers, key=lambda worker: len(worker.tasks))
        worker.tasks.append(task)
        with contextlib.suppress(OSError):  # a dead worker: found out, and made good, by `poll`
            worker.connection.send_bytes(task.pack())

    def forget(self, token: int) -> None:
        """Batches of iterations before `token` need not be prepared any more."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.send_bytes(forget_message(token))

    def poll(self) -> list[Result]:
        """The results that are there. Replaces workers that died."""
        results: list[Result] = []
        for number, worker in enumerate(self._workers):
            try:
                while worker.connection.poll():
                    result = unpack_result(worker.connection.recv_bytes())
                    results.append(result)
                    worker.tasks = [t for t in worker.tasks if (t.token, t.number) != (result.token, result.number)]
                    self._deaths.pop((result.token, result.number), None)
            except (EOFError, OSError):
                self._replace(number, worker)
        return results

    def _replace(self, number: int, dead: _Worker) -> None:
        dead.connection.close()
        dead.process.join(_STOP_SECONDS)
        self.replaced += 1
        if dead.tasks:
            first = dead.tasks[0]
            key = (first.token, first.number)
            deaths = self._deaths[key] = self._deaths.get(key, 0) + 1
            if deaths >= LIVES:
                ids = first.ids.tolist()
                raise WorkerError(
                    f"{deaths} worker processes died one after the other (the last with exit code {dead.process.exitcode}) "
                    f"on batch {first.number}, which holds the samples {ids}. -9 often means out of memory. "
                    "Prepare these samples with num_workers=0 to see why",
                    ids=ids,
                )
        fresh = self._workers[number] = self._start(number)
        for task in dead.tasks:
            fresh.tasks.append(task)
            with contextlib.suppress(OSError):
                fresh.connection.send_bytes(task.pack())

    def _start(self, number: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        _trainer_ends.add(ours)
        method = self._context.get_start_method()
        direct = os.getpid() if method in ("fork", "spawn") else 0
        setup = replace(self._setup, worker=number, seed=self._setup.seed + number, parent=direct)
        foreign = list(_trainer_ends) if method == "fork" else []
        process = self._context.Process(  # type: ignore[attr-defined]
            target=worker_main, args=(theirs, setup, foreign), name=f"stallfree-worker-{number}", daemon=True
        )
        try:
            process.start()
        except Exception as error:
            ours.close()
            raise _cannot_send(setup, method, error) from error
        finally:
            theirs.close()
        return _Worker(process, ours)

    def close(self) -> None:
        """End the workers; those that do not end in 5 s are killed."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.send_bytes(STOP_MESSAGE)
        deadline = time.monotonic() + _STOP_SECONDS
        for worker in self._workers:
            self._drain(worker, deadline)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.connection.close()
            worker.process.close()
        self._workers = []

    def _drain(self, worker: _Worker, deadline: float) -> None:
        """Read what a worker still sends, so that it is not stuck in a full pipe, until it has ended."""
        while worker.process.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(EOFError, OSError):
                if worker.connection.poll(0.01):
                    worker.connection.recv_bytes()
                    continue
            worker.process.join(0.01)


def _cannot_send(setup: WorkerSetup, method: str, error: Exception) -> Exception:
    """Find what cannot be pickled, and say so."""
    reader = setup.filler.reader
    parts: list[tuple[str, Any]] = [
        *((f"the transform {step!r}", step) for step in (*reader.deterministic, *reader.rest)),
        ("collate_fn", setup.filler.collate),
        ("worker_init_fn", setup.worker_init),
        ("the data set", setup.dataset),
    ]
    for what, part in parts:
        try:
            ForkingPickler.dumps(part)
        except Exception as reason:
            return InputError(
                f"{what} cannot be sent to a worker process started by {method!r}: {reason}. "
                "Define it at the top level of a module (no lambda, no function within a function), or use "
                "multiprocessing_context='fork'"
            )
    return error


def wait(descriptors: list[int], seconds: float) -> None:
    """Return when one of `descriptors` is readable or closed, or after `seconds`."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    poller.poll(max(0.0, seconds) * 1000)

