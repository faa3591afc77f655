"""Worker processes: the executor that starts and replaces them, and what runs in each.

Each worker is started with its first task, and receives tasks in a thread of its own, which starts their fetches while
an earlier batch is prepared. Tasks and results are messages over one connection per worker (`messages`); batches are
in slots of the ring.
"""

from __future__ import annotations

import queue
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from stallfree.datasets.samples import Pending
from stallfree.ipc.process import Child, Parent, end_all, start_method
from stallfree.loader.batch import BatchBuilder, failure
from stallfree.loader.executors import LIVES, Executor, deadly_batch
from stallfree.loader.messages import FORGET, UNDONE, Result, Task, forget_message, unpack_result, unpack_task
from stallfree.notes import add_note
from stallfree.platform import how_it_ended

_STOP_SECONDS = 5.0
_NO_MORE = 1 << 62

_SWITCH_SECONDS = 0.001
"""Maximum time that pure Python prep delays the fetch threads; Python's default is 5 ms."""


@dataclass
class WorkerSetup:
    """The arguments of a worker process.

    Attributes:
        worker: its number, from 0.
        workers: number of workers.
        builder: builds batches.
        dataset: as passed by the user, for `torch.utils.data.get_worker_info()`.
        seed: of this worker's generators, as under torch's loader; samples do not depend on it.
        worker_init: the user's `worker_init_fn`, or None.
    """

    worker: int
    workers: int
    builder: BatchBuilder
    dataset: Any
    seed: int
    worker_init: Callable[[int], None] | None

    @property
    def parts(self) -> list[tuple[str, object]]:
        """What may be impossible to pickle, with its description for a message."""
        reader = self.builder.reader
        return [
            *((f"the transform {step!r}", step) for step in (*reader.deterministic, *reader.rest)),
            ("collate_fn", self.builder.collate),
            ("worker_init_fn", self.worker_init),
            ("the data set", self.dataset),
        ]


@dataclass
class _Worker:
    child: Child
    tasks: list[Task] = field(default_factory=list)
    dead: bool = False

    @property
    def busy(self) -> bool:
        """Whether it may have a message to send or to receive."""
        return bool(self.tasks) or self.dead or bool(self.child.pending)


class WorkerProcesses(Executor):
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
    def stuck(self) -> bool:  # type: ignore[override]
        """Whether all forked workers hang, so that further ones probably would too."""
        return self.hung > len(self._workers)

    @property
    def descriptors(self) -> list[tuple[int, int]]:  # type: ignore[override]
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
        if tasks and not hung:
            key = (tasks[0].token, tasks[0].number)
            self._deaths[key] = self._deaths.get(key, 0) + 1
            if self._deaths[key] >= LIVES:
                del self._deaths[key]
                error = deadly_batch(tasks[0], "worker processes died", how_it_ended(dead.child.exit_code))
                results.append(failure(tasks.pop(0), error, here=True))
        if tasks:
            fresh = self._workers[number] = self._start(number)
            for task in tasks:
                fresh.tasks.append(task)
                fresh.child.send(task.pack())

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


# -- in a worker -------------------------------------------------------------------------------------------------------


def worker_main(parent: Parent, setup: WorkerSetup) -> None:
    """Run a worker until its end."""
    builder = setup.builder
    inbox: queue.SimpleQueue[tuple[Task, Pending | None] | None] = queue.SimpleQueue()
    wanted, ahead = 0, False

    def take(message: bytearray | None) -> None:
        """Receive a message of the trainer and start the fetches of its task; None at the end. Runs in a thread."""
        nonlocal wanted
        if message is None:
            inbox.put(None)
            return
        kind, task = unpack_task(message)
        if kind == FORGET:
            wanted = max(wanted, task.token)
        else:
            inbox.put((task, builder.start(task) if ahead else None))

    parent.listen(take)
    builder.reader.split.quiet = True  # the trainer warns
    prepare_process(setup)
    try:
        parent.report()
    except OSError:
        return  # the trainer has exited
    problem = problem_of_init(setup)
    ahead = problem is None  # fetches start only after the user's `worker_init_fn`
    while (item := inbox.get()) is not None:
        task, pending = item
        if task.token < wanted:
            result = Result(UNDONE, task.token, task.number, task.slot)
        elif problem is not None:
            result = failure(task, problem, here=False)
        else:
            result = builder.finish(task, pending or builder.start(task), here=False)
        try:
            parent.send(*result.pack())
        except OSError:
            break  # the trainer has exited
    builder.reader.close()


def prepare_process(setup: WorkerSetup) -> None:
    """Configure the process like torch's workers."""
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH_SECONDS)
    random.seed(setup.seed)
    state = torch_worker._generate_state(setup.seed - setup.worker, setup.worker)
    np.random.seed(state)
    torch.manual_seed(setup.seed)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=setup.worker, num_workers=setup.workers, seed=setup.seed, dataset=setup.dataset
    )


def problem_of_init(setup: WorkerSetup) -> Exception | None:
    """Call the user's function; return its exception, if any."""
    try:
        if setup.worker_init is not None:
            setup.worker_init(setup.worker)
    except Exception as error:
        add_note(error, "calling worker_init_fn")
        return error
    return None
