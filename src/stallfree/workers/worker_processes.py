"""The executor of worker processes: each is started with its first task, and replaced when it dies."""

from __future__ import annotations

import os
import select
import time
import weakref
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler

from stallfree.batches.batch_builder import failure
from stallfree.batches.messages import (
    STARTED,
    STOP_MESSAGE,
    UNDONE,
    Result,
    Task,
    forget_message,
    unpack_result,
)
from stallfree.errors import InputError, WorkerError
from stallfree.ipc.channel import Channel
from stallfree.platform import how_it_ended, interrupts_later
from stallfree.workers.worker import WorkerSetup, worker_main

LIVES = 3
"""Workers that may die on one batch before that is an error."""

_STOP_SECONDS = 5.0
_NO_MORE = 1 << 62
_REPORT_SECONDS = 2.0
_trainer_ends: weakref.WeakSet[Connection] = weakref.WeakSet()


def report_seconds(method: str, attempt: int) -> float:
    """How long a process may take to report in; longer after each attempt, should the machine be busy.

    One that is not forked has copied no lock, and imports as long as it takes.
    """
    return _REPORT_SECONDS * 2**attempt if method == "fork" else float("inf")


@dataclass
class _Worker:
    process: BaseProcess
    channel: Channel
    due: float  # when it must have reported in
    tasks: list[Task] = field(default_factory=list)
    dead: bool = False
    reported: bool = False

    @property
    def hangs(self) -> bool:
        """Whether it should have reported in, and has not: the fork copied a lock that another thread held."""
        return not self.reported and time.monotonic() > self.due

    @property
    def busy(self) -> bool:
        """Whether it may have something to say, or is to be told something."""
        return bool(self.tasks) or self.dead or self.channel.writing


class WorkerProcesses:
    """Worker processes, each started with its first task. One that dies is replaced, and its batches are done again.

    A forked worker that does not report in hangs, as it copied a lock that another thread held: it is replaced too. A
    batch that has killed three workers has a `WorkerError` for its result. `submit` and `poll` raise `InputError`
    when something cannot be sent to a worker.

    Attributes:
        replaced: how many workers died.
        hung: forked workers that did not report in, since one did.
    """

    needs_slot = True
    slots_to_take = 0

    def __init__(self, setup: WorkerSetup, context: BaseContext) -> None:
        self._context = context
        self._setup = setup
        self._deaths: dict[tuple[int, int], int] = {}
        self._wanted = 0
        self._workers: list[_Worker | None] = [None] * setup.workers
        self.replaced = 0
        self.hung = 0

    @property
    def stuck(self) -> bool:
        """Whether all its forks hang, each further one probably too."""
        return self.hung > len(self._workers)

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """What to wait for, as descriptors and events of `poll`: a result, the death of a worker, room for tasks."""
        return [
            (worker.channel.fileno(), select.POLLIN | (select.POLLOUT if worker.channel.writing else 0))
            for worker in self._workers
            if worker is not None and worker.busy
        ]

    def describe(self, task: Task) -> str:
        """The worker that has the task; "" if none has."""
        for worker in self._workers:
            if worker is not None and any(mine is task for mine in worker.tasks):
                alive = "alive" if worker.process.is_alive() else "dead"
                return f"worker process {worker.process.pid}, {alive}, with {len(worker.tasks)} batches to do"
        return ""

    def submit(self, task: Task) -> None:
        """Give a task to the worker with the fewest."""
        loads = [0 if worker is None else len(worker.tasks) for worker in self._workers]
        number = loads.index(min(loads))
        worker = self._workers[number]
        if worker is None:
            worker = self._workers[number] = self._start(number)
        worker.tasks.append(task)
        worker.channel.send(task.pack())  # to a dead worker: found out, and made good, by `poll`

    def forget(self, token: int) -> None:
        """Batches of iterations before `token` need not be prepared any more."""
        self._wanted = token
        for worker in self._workers:
            if worker is not None:
                worker.channel.send(forget_message(token))

    def poll(self, number: int | None) -> list[Result]:
        """The results that are there. Replaces workers that died; of those with nothing to do, when they get a task."""
        results: list[Result] = []
        for place, worker in enumerate(self._workers):
            if worker is None or not worker.busy:
                continue
            worker.channel.flush()
            try:
                while (message := worker.channel.receive()) is not None:
                    result = unpack_result(message)
                    if result.status == STARTED:
                        worker.reported = True
                        self.hung = 0
                        continue
                    result.worker = place
                    results.append(result)
                    worker.tasks = [t for t in worker.tasks if (t.token, t.number) != (result.token, result.number)]
                    self._deaths.pop((result.token, result.number), None)
            except EOFError:
                worker.dead = True
            if worker.dead:
                self._replace(place, worker, results)
        return results

    def prepare_wait(self) -> bool:
        """Results always announce themselves."""
        return False

    def check(self) -> None:
        """Look for workers that died while another process keeps their end of the connection open, or that hang."""
        for worker in self._workers:
            if worker is not None and (worker.hangs or not worker.process.is_alive()):
                worker.dead = True

    def _replace(self, number: int, dead: _Worker, results: list[Result]) -> None:
        """Make sure that it is dead, and give its tasks to a fresh one."""
        self._workers[number] = None
        self.replaced += 1
        hung = dead.hangs
        self.hung += hung
        exit_code = _end(dead, time.monotonic() + _STOP_SECONDS)
        tasks = []
        for task in dead.tasks:
            if task.token < self._wanted:
                results.append(Result(UNDONE, task.token, task.number, task.slot))
            else:
                tasks.append(task)
        if tasks and not hung and self._lives_left(tasks[0]) <= 0:
            results.append(failure(tasks[0], _killer(tasks.pop(0), exit_code), here=True))
        if tasks:
            fresh = self._workers[number] = self._start(number)
            for task in tasks:
                fresh.tasks.append(task)
                fresh.channel.send(task.pack())

    def _lives_left(self, task: Task) -> int:
        key = (task.token, task.number)
        deaths = self._deaths[key] = self._deaths.get(key, 0) + 1
        if deaths >= LIVES:
            del self._deaths[key]
        return LIVES - deaths

    def _start(self, number: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        _trainer_ends.add(ours)
        method = self._context.get_start_method()
        setup = replace(
            self._setup,
            worker=number,
            seed=self._setup.seed + number,
            trainer=os.getpid(),
            child=method != "forkserver",
        )
        foreign = list(_trainer_ends) if method == "fork" else []
        process = self._context.Process(  # type: ignore[attr-defined]
            target=worker_main, args=(theirs, setup, foreign), name=f"stallfree-worker-{number}", daemon=True
        )
        due = time.monotonic() + report_seconds(method, self.hung // len(self._workers))
        try:
            with interrupts_later(method):
                process.start()
        except Exception as error:
            ours.close()
            raise _cannot_send(setup, method, error) from error
        finally:
            theirs.close()
        return _Worker(process, Channel(ours), due)

    def close(self) -> None:
        """End the workers; those that do not end in 5 s are killed."""
        deadline = time.monotonic() + _STOP_SECONDS
        workers = [worker for worker in self._workers if worker is not None]
        self._workers = [None] * self._setup.workers
        for worker in workers:
            worker.channel.send(forget_message(_NO_MORE))
            worker.channel.send(STOP_MESSAGE)
        for worker in workers:
            _end(worker, deadline)


def _end(worker: _Worker, deadline: float) -> int | None:
    """Wait for the end of a worker, reading what it still sends so that it is not stuck; kill it at the deadline."""
    process, channel = worker.process, worker.channel
    open_end = True
    while process.is_alive() and time.monotonic() < deadline and not worker.hangs:
        try:
            while open_end and channel.receive() is not None:
                worker.reported = True
            channel.flush()
        except EOFError:
            open_end = False
        events = select.POLLIN | (select.POLLOUT if channel.writing else 0)
        wait([(process.sentinel, select.POLLIN), *([(channel.fileno(), events)] if open_end else [])], 0.1)
    if process.is_alive():
        process.kill()
    process.join()
    code = process.exitcode
    channel.close()
    process.close()
    return code


def _killer(task: Task, exit_code: int | None) -> WorkerError:
    ids = task.ids.tolist()
    return WorkerError(
        f"{LIVES} worker processes died one after the other on batch {task.number} of epoch {task.epoch}, which holds "
        f"the samples {ids}; the last: {how_it_ended(exit_code)}. Prepare these samples with num_workers=0 to see "
        "why",
        ids=ids,
    )


def _cannot_send(setup: WorkerSetup, method: str, error: Exception) -> Exception:
    """Find what cannot be pickled, and say so."""
    if method == "fork":
        return error
    reader = setup.builder.reader
    parts = [
        *((f"the transform {step!r}", step) for step in (*reader.deterministic, *reader.rest)),
        ("collate_fn", setup.builder.collate),
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


def wait(descriptors: list[tuple[int, int]], seconds: float) -> bool:
    """Wait until something happens to a descriptor, or for so many seconds. Whether something did."""
    poller = select.poll()
    for descriptor, events in descriptors:
        poller.register(descriptor, events)
    return bool(poller.poll(max(0.0, seconds) * 1000))
