"""A worker process: fetches ahead while it prepares, and fills slots."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker

from stallfree.loader.fill import Filler, pack_error
from stallfree.loader.messages import FAILED, FORGET, STOP, UNDONE, Result, Task, unpack_task
from stallfree.loader.reader import Pending

_PARENT_CHECK_SECONDS = 1.0


@dataclass
class WorkerSetup:
    """What a worker is given at its start.

    Attributes:
        worker: its number, from 0.
        workers: how many there are.
        filler: what it takes to fill slots.
        dataset: as the user gave it, for `torch.utils.data.get_worker_info()`.
        seed: of this worker's own generators; samples do not depend on it.
        worker_init: the user's `worker_init_fn`, or None.
        parent: process id of the trainer if the worker is its direct child, else 0.
    """

    worker: int
    workers: int
    filler: Filler
    dataset: Any
    seed: int
    worker_init: Callable[[int], None] | None
    parent: int


def worker_main(connection: Connection, setup: WorkerSetup, foreign: list[Connection]) -> None:
    """The life of a worker. `foreign` are the trainer's ends of pipes that a fork brought along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop
    for other in foreign:
        other.close()
    torch.set_num_threads(1)
    torch.manual_seed(setup.seed)
    torch_worker._worker_info = torch_worker.WorkerInfo(  # type: ignore[assignment]
        id=setup.worker, num_workers=setup.workers, seed=setup.seed, dataset=setup.dataset
    )
    failure: Exception | None = None
    if setup.worker_init is not None:
        try:
            setup.worker_init(setup.worker)
        except Exception as error:
            failure = error
    inbox = _Inbox(connection, setup)
    inbox.start()
    while (item := inbox.get()) is not None:
        task, pending = item
        if task.token < inbox.wanted:
            result = Result(UNDONE, task.token, task.number, task.slot)
        elif failure is not None:
            result = Result(FAILED, task.token, task.number, task.slot, payload=pack_error(failure))
        else:
            result = setup.filler.finish(task, pending)
        try:
            connection.send_bytes(result.pack())
        except OSError:
            break  # the trainer is gone
    setup.filler.reader.close()


class _Inbox:
    """Reads tasks as they come and starts their fetches at once, while the worker prepares an earlier one."""

    def __init__(self, connection: Connection, setup: WorkerSetup) -> None:
        self._connection = connection
        self._setup = setup
        self._tasks: queue.SimpleQueue[tuple[Task, Pending] | None] = queue.SimpleQueue()
        self.wanted = 0
        """Batches of iterations before this one are no longer wanted."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="stallfree-inbox", daemon=True).start()

    def get(self) -> tuple[Task, Pending] | None:
        """The next task with its fetches under way; None at the end."""
        return self._tasks.get()

    def _run(self) -> None:
        while True:
            try:
                while not self._connection.poll(_PARENT_CHECK_SECONDS):
                    if self._setup.parent and os.getppid() != self._setup.parent:
                        os._exit(1)
                kind, task = unpack_task(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)  # the trainer died; the main thread may be deep in the user's code
            if kind == STOP:
                self._tasks.put(None)
                return
            self.wanted = max(self.wanted, task.token)
            if kind != FORGET:
                self._tasks.put((task, self._start(task)))

    def _start(self, task: Task) -> Pending:
        try:
            return self._setup.filler.start(task)
        except Exception:  # it will come again, and be reported, when the task is done
            return Pending(task.ids, {})
