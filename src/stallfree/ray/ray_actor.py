"""A Ray worker: an actor that builds the batches of tasks."""

from __future__ import annotations

import io
import pickle
import threading
import time
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.sample_cache import SampleCache, attach_or_create
from stallfree.errors import not_picklable, text_of
from stallfree.ipc.process import find_unpicklable
from stallfree.loader.batch import failure
from stallfree.loader.messages import PRIVATE, unpack_task
from stallfree.loader.processes import WorkerSetup, prepare_process, problem_of_init

Bytes = npt.NDArray[np.uint8]

CONCURRENCY = 2
"""Threads of an actor: one fetches its batch while the other one prepares."""


def pack_setup(setup: WorkerSetup) -> bytes:
    """Pickle the setup of workers, with functions and classes of `__main__` by value.

    Unpickled on another host, a sample cache in memory is one of that host with the same layout. Raises `InputError`
    if it cannot be pickled, which names the part that is the cause.
    """
    try:
        return _dumps(setup)
    except Exception as error:
        what, problem = find_unpicklable(setup.parts, _dumps) or ("the data set", text_of(error))
        raise not_picklable(
            f"{what} cannot be sent to Ray workers: {problem}. Give something that can be pickled: create locks, open "
            "files and connections on first use in the worker, or leave them out in __getstate__"
        ) from error


def _dumps(value: object) -> bytes:
    cloudpickle: Any = import_module("ray.cloudpickle")

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc,name-defined,unused-ignore]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, SampleCache):
                return attach_or_create, (*obj.address, obj.meta)
            return super().reducer_override(obj)

    out = io.BytesIO()
    Pickler(out, protocol=5).dump(value)
    return out.getvalue()


class RayWorker:
    """The actor.

    Args:
        packed: the result of `pack_setup`.
        worker: number of this worker.
    """

    def __init__(self, packed: bytes, worker: int) -> None:
        setup: WorkerSetup = pickle.loads(packed)
        setup = replace(setup, worker=worker, seed=setup.seed + worker)
        self._builder = setup.builder
        self._builder.slots = None  # type: ignore[assignment]  # batches go to reused memory
        self._builder.reader.split.quiet = True
        prepare_process(setup)
        self._problem = problem_of_init(setup)
        self._prep = threading.Lock()

    def ready(self) -> None:
        """Return when the worker can take tasks."""

    def run(self, packed: bytes) -> tuple[tuple[bytes, float], Bytes | None]:
        """Build a batch. Its fetches are started at once, its prep begins when that of the previous one has ended.

        Returns:
            The packed result without memory and the seconds that it took; and the memory of the batch.
        """
        _, task = unpack_task(packed)
        pending = self._builder.start(task)
        with self._prep:
            begun = time.monotonic()
            if self._problem is None:
                result = self._builder.finish(task, pending, here=False)
            else:
                result = failure(task, self._problem, here=False)
            seconds = time.monotonic() - begun
        memory = None
        if result.status == PRIVATE and result.memory is not None:
            memory, result.memory = result.memory[: result.size], None
        return (b"".join(result.pack()), seconds), memory
