"""`Executor`, which builds batches, and the executors of this machine: the training process, threads, worker processes.

An executor receives tasks through `submit` and returns results from `poll`, in any order; neither waits. It wakes the
waiting loop through descriptors, so that one wait covers all executors.

Each worker process is started with its first task. It receives tasks in a thread, which starts their fetches while an
earlier batch is prepared; without such fetches it receives them between two batches. Tasks and results are messages
over one connection per worker (`messages`); batches are in slots of the ring.
"""

import contextlib
import os
import queue
import random
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from stallfree.cache.arena import stay_alone
from stallfree.datasets.samples import Pending
from stallfree.errors import WorkerError
from stallfree.ipc.process import Child, Parent, end_all, start_method
from stallfree.loader.batch import BatchBuilder, failure
from stallfree.loader.messages import FORGET, UNDONE, Result, Task, forget_message, unpack_result, unpack_task
from stallfree.platform import how_it_ended, shares_memory
from stallfree.raising import add_note

LIVES = 3
"""Number of workers that may die on one batch before an error."""

_STOP_SECONDS = 5.0
_NO_MORE = 1 << 62

_SWITCH_SECONDS = 0.001
"""Maximum time that pure Python prep delays the fetch threads; Python's default is 5 ms."""


class Executor:
    """Builds batches.

    Attributes:
        needs_slot: whether `submit` requires tasks with a slot.
        descriptors: the descriptors to wait for, with events of `select.poll`.
        replaced: number of workers that died since this was last set to 0.
        stuck: whether no worker gets started here, so that another process should try.
    """

    needs_slot, stuck, replaced = True, False, 0
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

    `poll` returns nothing for a batch whose fetches do not come in time; the batch may be awaited again.

    Args:
        builder: builds.
        seconds: maximum wait for the fetches of a batch.
    """

    made = 0  # batches that all of these executors have built in this process

    def __init__(self, builder: BatchBuilder, seconds: float) -> None:
        self._builder, self._seconds = builder, seconds
        self._tasks: dict[int, tuple[Task, Pending]] = {}

    @property
    def needs_slot(self) -> bool:  # type: ignore[override]
        """Only if slots are pinned, for copies to a device: otherwise objects of this process suffice."""
        return self._builder.slots.pin is not None and shares_memory()

    def submit(self, task: Task) -> None:
        self._tasks[task.number] = task, self._builder.start(task)

    def poll(self, number: int | None) -> list[Result]:
        if number is None or number not in self._tasks:
            return []
        started = time.monotonic()
        task, pending = self._tasks[number]
        pending.deadline = started + self._seconds
        if pending.fetches and futures.wait(list(pending.fetches.values()), self._seconds).not_done:
            return []
        waited = time.monotonic() - started
        del self._tasks[number]
        TrainingProcess.made += 1
        result = self._builder.finish(task, pending, here=True)
        result.fetch_seconds += waited
        result.started = started if result.started else 0.0
        return [result]

    def forget(self, token: int) -> None:
        for _, pending in self._tasks.values():
            pending.cancel()
        self._tasks.clear()

    def describe(self, task: Task) -> str:
        return "this process, which waits for storage" if task.number in self._tasks else ""

    def close(self) -> None:
        self.forget(0)


class ThreadExecutor(Executor):
    """An executor whose threads deliver the results. A pipe wakes the loop, but only while that waits."""

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
        return list(islice(iter(self._done.popleft, None), len(self._done)))

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
            if task.token < self._wanted:
                self.deliver(Result(UNDONE, task.token, task.number, task.slot))
            else:
                self.deliver(self._builder.gather(task))

    def close(self) -> None:
        self._awaited = False
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if threading.current_thread() is not thread:  # the garbage collector may run in any thread
                thread.join(_STOP_SECONDS)
        super().close()


# -- worker processes -------------------------------------------------------------------------------------------------


def deadly_batch(task: Task, workers: str, last: str) -> WorkerError:
    """Return the error of a batch during which `LIVES` workers ended; `last` describes the end of the last one."""
    ids = task.ids.tolist()
    return WorkerError(
        f"{LIVES} {workers} one after the other on batch {task.number} of epoch {task.epoch}, which holds the samples "
        f"{ids}; the last: {last}. Prepare these samples with num_workers=0 to see why",
        ids=ids,
    )


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
            *((f"the transform {step!r}", step) for step in (*reader.deterministic, *reader.later_steps)),
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

    def __init__(self, setup: WorkerSetup, context: BaseContext, count: int) -> None:
        start_method(context)  # before anything is created in a process that may start none
        self._context, self._setup, self.count = context, setup, count
        self._workers: dict[int, _Worker] = {}
        self._wanted = self.replaced = self.hung = 0

    @property
    def stuck(self) -> bool:  # type: ignore[override]
        """Whether all forked workers hang, so that further ones probably would too."""
        return self.hung > self.count

    @property
    def descriptors(self) -> list[tuple[int, int]]:  # type: ignore[override]
        """The descriptors to wait for, with events of `poll`: results, deaths of workers, space for tasks."""
        return [(worker.child.fileno(), worker.child.events) for worker in self._workers.values() if worker.busy]

    def describe(self, task: Task) -> str:
        """The worker that has the task; "" if none has."""
        for worker in self._workers.values():
            if any(mine is task for mine in worker.tasks):
                alive = "alive" if worker.child.alive else "dead"
                return f"worker process {worker.child.pid}, {alive}, with {len(worker.tasks)} batches to do"
        return ""

    def submit(self, task: Task) -> None:
        """Send a task to the worker with the fewest tasks."""
        loads = [len(self._workers[number].tasks) if number in self._workers else 0 for number in range(self.count)]
        number = loads.index(min(loads))
        if number not in self._workers:
            self._workers[number] = self._start(number)
        worker = self._workers[number]
        worker.tasks.append(task)
        worker.child.send(task.pack())  # `poll` detects and replaces a dead worker

    def forget(self, token: int) -> None:
        """Drop batches of iterations before `token`."""
        self._wanted = token
        for worker in self._workers.values():
            worker.child.send(forget_message(token))

    def poll(self, number: int | None) -> list[Result]:
        """The available results. Replaces workers that died; idle ones when they get a task."""
        results: list[Result] = []
        for number_of_worker, worker in [*self._workers.items()]:
            if not worker.busy:
                continue
            worker.child.flush()
            try:
                while (message := worker.child.receive()) is not None:
                    result = unpack_result(message)
                    result.worker = number_of_worker
                    results.append(result)
                    worker.tasks = [t for t in worker.tasks if (t.token, t.number) != (result.token, result.number)]
            except EOFError:
                worker.dead = True
            if worker.child.reported:
                self.hung = 0
            if worker.dead:
                self._replace(number_of_worker, worker, results)
        return results

    def check(self) -> None:
        """Check for workers that hang, or died while another process keeps their end of the connection open."""
        for worker in self._workers.values():
            worker.dead |= worker.child.overdue or not worker.child.alive

    def _replace(self, number: int, dead: _Worker, results: list[Result]) -> None:
        """Kill a worker if it is still alive, and submit its tasks again, for which a new one is started."""
        del self._workers[number]
        self.replaced += 1
        hung = dead.child.overdue
        self.hung += hung
        dead.child.end(time.monotonic() + _STOP_SECONDS)
        tasks = dead.tasks
        if tasks and not hung:
            tasks[0].deaths += 1
            if tasks[0].deaths >= LIVES:
                error = deadly_batch(tasks[0], "worker processes died", how_it_ended(dead.child.exit_code))
                results.append(failure(tasks.pop(0), error))
        for task in tasks:
            self.submit(task)

    def _start(self, number: int) -> _Worker:
        """Start a worker, to which batches of earlier iterations may be sent again."""
        setup = self._setup
        child = Child(
            worker_main,
            replace(setup, worker=number, seed=setup.seed + number),
            context=self._context,
            name=f"stallfree-worker-{number}",
            parts=setup.parts,
            attempt=-(-self.hung // self.count),
        )
        child.send(forget_message(self._wanted))
        return _Worker(child)

    def close(self) -> None:
        """Stop the workers; kill those that do not exit in 5 s."""
        children = [worker.child for worker in self._workers.values()]
        self._workers.clear()
        for child in children:
            child.send(forget_message(_NO_MORE))
        end_all(children, _STOP_SECONDS)


# -- in a worker -------------------------------------------------------------------------------------------------------


def worker_main(parent: Parent, setup: WorkerSetup) -> None:
    """Run a worker until its end."""
    builder = setup.builder
    inbox: queue.SimpleQueue[tuple[Task, Pending | None] | None] = queue.SimpleQueue()
    wanted, ahead = 0, False

    def take(message: bytearray | None) -> None:
        """Receive a message of the trainer and start the fetches of its task; None at the end."""
        nonlocal wanted
        if message is None:
            inbox.put(None)
            return
        kind, task = unpack_task(message)
        if kind == FORGET:
            wanted = max(wanted, task.token)
        else:
            inbox.put((task, builder.start(task) if ahead else None))

    def take_all() -> None:
        """Receive what has arrived, and wait for the first task: also one that is done may be cancelled by the next."""
        try:
            while (message := parent.receive(wait=inbox.empty())) is not None or inbox.empty():
                if message is not None:
                    take(message)
        except EOFError:
            take(None)

    listens = not builder.reader.direct  # a thread starts fetches while the batch before is prepared
    parent.listen(take if listens else None)
    builder.reader.split.quiet = True  # the trainer warns
    prepare_process(setup)
    try:
        parent.report()
    except OSError:
        return  # the trainer has exited
    problem = problem_of_init(setup)
    ahead = problem is None  # fetches start only after the user's `worker_init_fn`
    while True:
        if not listens:
            take_all()
        if (item := inbox.get()) is None:
            break
        task, pending = item
        if task.token < wanted:
            result = Result(UNDONE, task.token, task.number, task.slot)
        elif problem is not None:
            result = failure(task, problem)
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
