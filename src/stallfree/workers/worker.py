"""A worker process: fetches ahead while it prepares, and builds batches in slots."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import select
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from stallfree.batches.batch_builder import BatchBuilder, failure
from stallfree.batches.messages import FORGET, NO_SLOT, STARTED, STOP, UNDONE, Result, Task, unpack_task
from stallfree.batches.reader import Pending
from stallfree.ipc.channel import receive_message, send_message
from stallfree.ipc.generator_lock import check_generator
from stallfree.platform import begin_child

_TRAINER_CHECK_MILLISECONDS = 1000

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
        trainer: process id of the iterating process.
        child: whether the worker is its direct child.
    """

    worker: int
    workers: int
    builder: BatchBuilder
    dataset: Any
    seed: int
    worker_init: Callable[[int], None] | None
    trainer: int = 0
    child: bool = False


def worker_main(connection: Connection, setup: WorkerSetup, foreign: list[Connection]) -> None:
    """The life of a worker. `foreign` are the trainer's ends of connections that a fork brought along."""
    begin_child()  # the trainer decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the trainer is none of ours
    for other in foreign:
        other.close()
    inbox = _Inbox(connection.fileno(), setup)
    inbox.start()
    setup.builder.reader.split.quiet = True  # the trainer warns
    _prepare_process(setup)
    try:
        send_message(connection.fileno(), Result(STARTED, 0, 0, NO_SLOT).pack())
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
            send_message(connection.fileno(), result.pack())
        except OSError:
            break  # the trainer is gone
    setup.builder.reader.close()


def _prepare_process(setup: WorkerSetup) -> None:
    """Make the process what torch's workers are. This is where a fork hangs that copied a lock in use."""
    check_generator()
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
    """Reads tasks as they come and starts their fetches at once, while the worker prepares an earlier one.

    It also ends the worker when the trainer dies, whatever the main thread is in the midst of.
    """

    def __init__(self, fd: int, setup: WorkerSetup) -> None:
        self._fd = fd
        self._setup = setup
        self._tasks: queue.SimpleQueue[tuple[Task, Pending | None] | None] = queue.SimpleQueue()
        self.ahead = False
        """Whether to start fetches: not before the user's `worker_init_fn` has run."""
        self.wanted = 0
        """Batches of iterations before this one are no longer wanted."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="stallfree-inbox", daemon=True).start()

    def get(self) -> tuple[Task, Pending | None] | None:
        """The next task, with its fetches if they are under way; None at the end."""
        return self._tasks.get()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        trainer = -1
        with contextlib.suppress(OSError, AttributeError):  # not in every kernel and sandbox
            trainer = os.pidfd_open(self._setup.trainer)
            poller.register(trainer, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll(_TRAINER_CHECK_MILLISECONDS)]
            if trainer in ready or orphaned(self._setup.trainer, self._setup.child):
                os._exit(1)
            if self._fd not in ready:
                continue
            try:
                kind, task = unpack_task(receive_message(self._fd))
            except (EOFError, OSError):
                os._exit(1)
            if kind == STOP:
                self._tasks.put(None)
                continue
            if kind == FORGET:
                self.wanted = max(self.wanted, task.token)
            else:
                self._tasks.put((task, self._setup.builder.start(task) if self.ahead else None))


def orphaned(parent: int, child: bool) -> bool:
    """Whether the process `parent` is gone; `child` says that this process is its direct child."""
    if child:
        return os.getppid() != parent
    try:
        os.kill(parent, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
