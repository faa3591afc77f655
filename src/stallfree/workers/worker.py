"""A worker process: fetches ahead while it prepares, and builds batches in slots."""

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

from stallfree.batches.batch_builder import BatchBuilder, failure
from stallfree.batches.messages import FORGET, UNDONE, Result, Task, unpack_task
from stallfree.batches.reader import Pending
from stallfree.ipc.process import Parent

_SWITCH_SECONDS = 0.001
"""How long prep in pure Python may keep the threads that fetch waiting; Python's default is 5 ms."""


@dataclass
class WorkerSetup:
    """What a worker is given at its start.

    Attributes:
        worker: its number, from 0.
        workers: how many there are.
        builder: builds batches.
        dataset: as the user gave it, for `torch.utils.data.get_worker_info()`.
        seed: of this worker's own generators; samples do not depend on it.
        worker_init: the user's `worker_init_fn`, or None.
    """

    worker: int
    workers: int
    builder: BatchBuilder
    dataset: Any
    seed: int
    worker_init: Callable[[int], None] | None


def worker_main(parent: Parent, setup: WorkerSetup) -> None:
    """The life of a worker."""
    inbox = _Inbox(setup.builder)
    parent.listen(inbox.take)
    setup.builder.reader.split.quiet = True  # the trainer warns
    _prepare_process(setup)
    try:
        parent.report()
    except OSError:
        return  # the trainer is gone
    problem = _problem_of_init(setup)
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
            break  # the trainer is gone
    setup.builder.reader.close()


def _prepare_process(setup: WorkerSetup) -> None:
    """Make the process what torch's workers are."""
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH_SECONDS)
    random.seed(setup.seed)
    np.random.seed(setup.seed & 0xFFFFFFFF)
    torch.manual_seed(setup.seed)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=setup.worker, num_workers=setup.workers, seed=setup.seed, dataset=setup.dataset
    )


def _problem_of_init(setup: WorkerSetup) -> Exception | None:
    """Call the user's function; what it raised."""
    try:
        if setup.worker_init is not None:
            setup.worker_init(setup.worker)
    except Exception as error:
        return error
    return None


class _Inbox:
    """Takes tasks as they come and starts their fetches at once, while the worker prepares an earlier one."""

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder
        self._tasks: queue.SimpleQueue[tuple[Task, Pending | None] | None] = queue.SimpleQueue()
        self.ahead = False
        """Whether to start fetches: not before the user's `worker_init_fn` has run."""
        self.wanted = 0
        """Batches of iterations before this one are no longer wanted."""

    def get(self) -> tuple[Task, Pending | None] | None:
        """The next task, with its fetches if they are under way; None at the end."""
        return self._tasks.get()

    def take(self, message: bytearray | None) -> None:
        """Take a message of the trainer; None at the end."""
        if message is None:
            self._tasks.put(None)
            return
        kind, task = unpack_task(message)
        if kind == FORGET:
            self.wanted = max(self.wanted, task.token)
        else:
            self._tasks.put((task, self._builder.start(task) if self.ahead else None))
