"""The executor of worker processes: each is started with its first task, and replaced when it dies."""

from __future__ import annotations

import select
import time
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext

from stallfree.errors import WorkerError
from stallfree.ipc.process import Child, end_all, start_method
from stallfree.loader.batch import failure
from stallfree.loader.messages import UNDONE, Result, Task, forget_message, unpack_result
from stallfree.loader.worker import WorkerSetup, worker_main
from stallfree.platform import how_it_ended

LIVES = 3
"""Number of workers that may die on one batch before an error."""

_STOP_SECONDS = 5.0
_NO_MORE = 1 << 62


@dataclass
class _Worker:
    child: Child
    tasks: list[Task] = field(default_factory=list)
    dead: bool = False

    @property
    def busy(self) -> bool:
        """Whether it may have a message to send or to receive."""
        return bool(self.tasks) or self.dead or bool(self.child.pending)


class WorkerProcesses:
    """Worker processes, each started with its first task. A worker that dies is replaced, and its batches are repeated.

    A forked worker that does not report in hangs, because it copied a lock held by another thread: it is replaced too.
    The result of a batch that has killed three workers is a `WorkerError`. `submit` and `poll` raise `InputError` if an
    object cannot be sent to a worker.

    Args:
        setup: of the workers, with the number of the first one.
        context: starts them.
        count: number of workers.

    Attributes:
        count: as given.
        replaced: number of workers that died.
        hung: forked workers that did not report in since the last one that did.
    """

    needs_slot = True

    def __init__(self, setup: WorkerSetup, context: BaseContext, count: int) -> None:
        start_method(context)  # before anything is created in a process that may start none
        self._context = context
        self._setup = setup
        self.count = count
        self._deaths: dict[tuple[int, int], int] = {}
        self._wanted = 0
        self._workers: list[_Worker | None] = [None] * count
        self.replaced = 0
        self.hung = 0

    @property
    def stuck(self) -> bool:
        """Whether all forked workers hang, so that further ones probably would too."""
        return self.hung > len(self._workers)

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """The descriptors to wait for, with events of `poll`: results, deaths of workers, space for tasks."""
        return [
            (worker.child.fileno(), worker.child.events)
            for worker in self._workers
            if worker is not None and worker.busy
        ]

    def describe(self, task: Task) -> str:
        """The worker that has the task; "" if none has."""
        for worker in self._workers:
            if worker is not None and any(mine is task for mine in worker.tasks):
                alive = "alive" if worker.child.alive else "dead"
                return f"worker process {worker.child.pid}, {alive}, with {len(worker.tasks)} batches to do"
        return ""

    def submit(self, task: Task) -> None:
        """Send a task to the worker with the fewest tasks."""
        loads = [0 if worker is None else len(worker.tasks) for worker in self._workers]
        number = loads.index(min(loads))
        worker = self._workers[number]
        if worker is None:
            worker = self._workers[number] = self._start(number)
        worker.tasks.append(task)
        worker.child.send(task.pack())  # `poll` detects and replaces a dead worker

    def forget(self, token: int) -> None:
        """Drop batches of iterations before `token`."""
        self._wanted = token
        for worker in self._workers:
            if worker is not None:
                worker.child.send(forget_message(token))

    def poll(self, number: int | None) -> list[Result]:
        """The available results. Replaces workers that died; idle ones when they get a task."""
        results: list[Result] = []
        for place, worker in enumerate(self._workers):
            if worker is None or not worker.busy:
                continue
            worker.child.flush()
            try:
                while (message := worker.child.receive()) is not None:
                    result = unpack_result(message)
                    result.worker = place
                    results.append(result)
                    worker.tasks = [t for t in worker.tasks if (t.token, t.number) != (result.token, result.number)]
                    self._deaths.pop((result.token, result.number), None)
            except EOFError:
                worker.dead = True
            if worker.child.reported:
                self.hung = 0
            if worker.dead:
                self._replace(place, worker, results)
        return results

    def prepare_wait(self) -> bool:
        """See `Executor`: results are always signalled."""
        return False

    def check(self) -> None:
        """Check for workers that hang, or died while another process keeps their end of the connection open."""
        for worker in self._workers:
            if worker is not None and (worker.child.overdue or not worker.child.alive):
                worker.dead = True

    def _replace(self, number: int, dead: _Worker, results: list[Result]) -> None:
        """Kill a worker if it is still alive, and send its tasks to a new one."""
        self._workers[number] = None
        self.replaced += 1
        hung = dead.child.overdue
        self.hung += hung
        dead.child.end(time.monotonic() + _STOP_SECONDS)
        tasks = []
        for task in dead.tasks:
            if task.token < self._wanted:
                results.append(Result(UNDONE, task.token, task.number, task.slot))
            else:
                tasks.append(task)
        if tasks and not hung and self._lives_left(tasks[0]) <= 0:
            results.append(failure(tasks[0], _killer(tasks.pop(0), dead.child.exit_code), here=True))
        if tasks:
            fresh = self._workers[number] = self._start(number)
            for task in tasks:
                fresh.tasks.append(task)
                fresh.child.send(task.pack())

    def _lives_left(self, task: Task) -> int:
        key = (task.token, task.number)
        deaths = self._deaths[key] = self._deaths.get(key, 0) + 1
        if deaths >= LIVES:
            del self._deaths[key]
        return LIVES - deaths

    def _start(self, number: int) -> _Worker:
        setup = self._setup
        child = Child(
            worker_main,
            replace(setup, worker=number, seed=setup.seed + number),
            context=self._context,
            name=f"stallfree-worker-{number}",
            parts=setup.parts,
            attempt=self.hung // len(self._workers),
        )
        return _Worker(child)

    def close(self) -> None:
        """Stop the workers; kill those that do not exit in 5 s."""
        workers = [worker for worker in self._workers if worker is not None]
        self._workers = [None] * self.count
        for worker in workers:
            worker.child.send(forget_message(_NO_MORE))
        end_all([worker.child for worker in workers], _STOP_SECONDS)


def _killer(task: Task, exit_code: int | None) -> WorkerError:
    ids = task.ids.tolist()
    return WorkerError(
        f"{LIVES} worker processes died one after the other on batch {task.number} of epoch {task.epoch}, which holds "
        f"the samples {ids}; the last: {how_it_ended(exit_code)}. Prepare these samples with num_workers=0 to see "
        "why",
        ids=ids,
    )


def wait(descriptors: list[tuple[int, int]], seconds: float) -> bool:
    """Wait up to `seconds` for an event on a descriptor; return whether there was one."""
    poller = select.poll()
    for descriptor, events in descriptors:
        poller.register(descriptor, events)
    return bool(poller.poll(max(0.0, seconds) * 1000))
