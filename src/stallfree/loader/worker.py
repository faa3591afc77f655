"""A worker process: fetches ahead during prep, and builds batches in slots."""

from __future__ import annotations

import queue
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from stallfree.datasets.sample_access import Pending
from stallfree.ipc.process import Parent
from stallfree.loader.batch import BatchBuilder, failure
from stallfree.loader.messages import FORGET, UNDONE, Result, Task, unpack_task
from stallfree.notes import add_note

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


def worker_main(parent: Parent, setup: WorkerSetup) -> None:
    """Run a worker until its end."""
    inbox = _Inbox(setup.builder)
    parent.listen(inbox.take)
    setup.builder.reader.split.quiet = True  # the trainer warns
    prepare_process(setup)
    try:
        parent.report()
    except OSError:
        return  # the trainer has exited
    problem = problem_of_init(setup)
    inbox.ahead = problem is None
    while (item := inbox.get()) is not None:
        task, pending = item
        if task.token < inbox.wanted:
            result = Result(UNDONE, task.token, task.number, task.slot)
        elif problem is not None:
            result = failure(task, problem, here=False)
        else:
            result = setup.builder.finish(task, pending or setup.builder.start(task), here=False)
        try:
            parent.send(*result.pack())
        except OSError:
            break  # the trainer has exited
    setup.builder.reader.close()


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


class _Inbox:
    """Receives tasks and starts their fetches immediately, while the worker prepares an earlier task."""

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder
        self._tasks: queue.SimpleQueue[tuple[Task, Pending | None] | None] = queue.SimpleQueue()
        self.ahead = False
        """Whether to start fetches: only after the user's `worker_init_fn` has run."""
        self.wanted = 0
        """Batches of iterations before this one are dropped."""

    def get(self) -> tuple[Task, Pending | None] | None:
        """The next task, with its fetches in flight, if any; None at the end."""
        return self._tasks.get()

    def take(self, message: bytearray | None) -> None:
        """Receive a message of the trainer; None at the end."""
        if message is None:
            self._tasks.put(None)
            return
        kind, task = unpack_task(message)
        if kind == FORGET:
            self.wanted = max(self.wanted, task.token)
        else:
            self._tasks.put((task, self._builder.start(task) if self.ahead else None))
