"""`RayWorkers`: prep on other machines, by actors of a Ray cluster.

    submit ─▶ actor.run ─▶ (head, memory) in Ray's object store ─▶ the thread of the executor ─▶ slot, `poll`

Several tasks are under way per actor. A task stays with its actor until its batch has arrived: if the actor or its node
is lost before, another actor gets the task, so each batch arrives once. One thread copies the batches into slots.
"""

import contextlib
import importlib.util
import io
import pickle
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stallfree.cache.sample_cache import SampleCache, attach_or_create
from stallfree.errors import InputError, missing_extra, not_picklable, text_of
from stallfree.ipc.process import find_unpicklable
from stallfree.loader import executors
from stallfree.loader.batch import failure
from stallfree.loader.messages import PRIVATE, READY, UNDONE, Result, Task, unpack_result, unpack_task
from stallfree.loader.ring import Slots
from stallfree.platform import need_linux
from stallfree.units import parse_number, parse_whole

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_STOP_SECONDS = 5.0

AHEAD = 2
"""Batches in flight per worker: one is fetched while the other is prepared."""

_STARTS = 10
"""Actors lost one after the other before they ran, from which on their batches may be the reason."""


@dataclass(frozen=True)
class RayWorkers:
    """Workers on a Ray cluster, as `workers=` of a `DataLoader`.

    They prepare batches in place of local worker processes, and yield the same batches bit for bit: a batch is a
    function of (seed, epoch, ids). A worker or node that is lost is replaced, and its batches are prepared again.

    The cluster is that of this process: call `ray.init` before, with the address of the cluster and the environment of
    the workers. Otherwise Ray itself starts one on this machine. stallfree and the modules of the data set must be
    importable on the nodes. The workers of a node share a sample cache of the data set's capacity there.

    Args:
        num_workers: number of workers, 1 or more. Each is a Ray actor.
        resources: what each worker requires, by Ray's names, such as `{"CPU": 2, "memory": 2**30}`; None: one CPU.

    Raises `InputError` for invalid arguments, and `MissingExtraError` if Ray is not installed.

    Example:
        ```python
        # needs Ray
        ray.init("auto")
        loader = sf.DataLoader(dataset, batch_size=64, workers=sf.RayWorkers(16))
        for images, labels in loader:
            train(images, labels)
        ```
    """

    num_workers: int
    resources: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        parse_whole(self.num_workers, "num_workers", 1)
        resources = {} if self.resources is None else self.resources
        if not isinstance(resources, Mapping) or not all(isinstance(name, str) for name in resources):
            raise InputError(f"resources={resources!r} of RayWorkers: give amounts by name, such as {{'CPU': 2}}")
        for name, amount in resources.items():
            parse_number(amount, f"resources[{name!r}]", zero=True)
        need_linux("RayWorkers", "use num_workers=0")
        if importlib.util.find_spec("ray") is None:
            raise missing_extra("ray", "ray", "RayWorkers")

    @property
    def ahead(self) -> int:
        """Batches in flight."""
        return AHEAD * self.num_workers

    def executor(self, setup: executors.WorkerSetup, slots: Slots) -> "RayExecutor":
        """Return the executor of these workers. Called by loaders."""
        return RayExecutor(self.num_workers, self.resources or {}, setup, slots)


# -- the executor -----------------------------------------------------------------------------------------------------


@dataclass
class _Actor:
    """An actor, its tasks that have no result yet, how many before it were lost unstarted, and whether it runs."""

    handle: Any
    unstarted: int = 0
    ready: bool = False
    tasks: dict[tuple[int, int], Task] = field(default_factory=dict)


class RayExecutor(executors.ThreadExecutor):
    """Executor of Ray actors. A lost one is replaced, and its batches are repeated.

    The result of a batch during which three actors were lost is a `WorkerError`. Those that were lost before they ran
    do not count, unless ten are in a row.

    Args:
        count: number of actors.
        resources: what each requires, by Ray's names.
        setup: of the workers.
        slots: of the ring.

    Attributes:
        replaced: number of actors that were lost.
    """

    def __init__(self, count: int, resources: Mapping[str, float], setup: executors.WorkerSetup, slots: Slots) -> None:
        self._ray, self.replaced = importlib.import_module("ray"), 0
        self._packed = self._ray.put(pack_setup(setup))
        named = {"CPU": 1.0, **resources}
        amounts = {"num_cpus": named.pop("CPU"), "num_gpus": named.pop("GPU", 0), "memory": named.pop("memory", None)}
        self._class = self._ray.remote(RayWorker).options(
            **amounts, resources=named, max_concurrency=AHEAD, max_restarts=0
        )
        self._slots = slots
        super().__init__()
        self._lock = threading.Lock()  # of `_actors`
        self._actors = [self._start(number) for number in range(count)]
        self._arrived: queue.SimpleQueue[tuple[_Actor, int, Task, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stallfree-ray", daemon=True)
        self._thread.start()

    def _start(self, number: int, unstarted: int = 0) -> _Actor:
        actor = _Actor(self._class.remote(self._packed, number), unstarted)

        def started(future: Any) -> None:
            actor.ready = future.exception() is None

        actor.handle.__ray_ready__.remote().future().add_done_callback(started)
        return actor

    def submit(self, task: Task) -> None:
        with self._lock:
            loads = [len(actor.tasks) for actor in self._actors]
            self._send(loads.index(min(loads)), task)

    def _send(self, number: int, task: Task) -> None:
        actor = self._actors[number]
        actor.tasks[task.token, task.number] = task
        head, memory = actor.handle.run.options(num_returns=2).remote(task.pack())

        def arrived(future: Any) -> None:
            self._arrived.put((actor, number, task, (future, memory)))

        head.future().add_done_callback(arrived)

    def _run(self) -> None:
        """Receive batches until the end."""
        while (item := self._arrived.get()) is not None:
            actor, number, task, (future, memory) = item
            try:
                result = unpack_result(future.result())
                batch = None if result.status != PRIVATE or task.token < self._wanted else self._ray.get(memory)
            except Exception as error:  # the actor or its node is lost
                self._lost(number, actor, error)
                continue
            with self._lock:
                if actor.tasks.pop((task.token, task.number), None) is None:
                    continue  # it was sent to another actor
            self.deliver(self._copied(task, number, result, batch))
            del item, future, memory, batch, result

    def _copied(self, task: Task, number: int, result: Result, batch: Bytes | None) -> Result:
        """Copy a batch into its slot; return its result."""
        result.slot, result.worker = task.slot, number
        if task.token < self._wanted:
            return Result(UNDONE, task.token, task.number, task.slot)
        if batch is not None:
            try:
                slot = self._slots.reserve(task.slot, len(batch))
            except Exception as error:
                return failure(task, error)
            if slot is None:
                result.status, result.memory, result.size = PRIVATE, batch.copy(), len(batch)
            else:
                slot[: len(batch)] = batch
                result.status, result.size = READY, len(batch)
        return result

    def _lost(self, number: int, actor: _Actor, error: Exception) -> None:
        """Replace an actor, and send its tasks to the new one."""
        failed: list[Result] = []
        with self._lock:
            if self._actors[number] is not actor:
                return  # by an earlier task
            self.replaced += 1
            with contextlib.suppress(Exception):
                self._ray.kill(actor.handle)
            unstarted = 0 if actor.ready or getattr(error, "actor_init_failed", False) else actor.unstarted + 1
            self._actors[number] = self._start(number, unstarted)
            for at, task in enumerate(list(actor.tasks.values())):
                task.deaths += at < AHEAD and not 0 < unstarted < _STARTS  # the others had not begun
                if task.deaths >= executors.LIVES:
                    failed.append(failure(task, executors.deadly_batch(task, "Ray workers were lost", text_of(error))))
                else:
                    self._send(number, task)
            actor.tasks.clear()
        for result in failed:
            self.deliver(result)

    def describe(self, task: Task) -> str:
        with self._lock:
            for number, actor in enumerate(self._actors):
                if (task.token, task.number) in actor.tasks:
                    return f"Ray worker {number}, with {len(actor.tasks)} batches to do"
        return ""

    def close(self) -> None:
        """End the actors."""
        self._arrived.put(None)
        if threading.current_thread() is not self._thread:  # the garbage collector may run in any thread
            self._thread.join(_STOP_SECONDS)
        with self._lock, contextlib.suppress(Exception):  # Ray was shut down before
            for actor in self._actors:
                actor.handle.__ray_terminate__.remote()  # after its task; it leaves its cache
        if not self._thread.is_alive():
            super().close()


# -- what is sent to the nodes ----------------------------------------------------------------------------------------


def pack_setup(setup: executors.WorkerSetup) -> bytes:
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
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")

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
        setup: executors.WorkerSetup = pickle.loads(packed)
        setup = replace(setup, worker=worker, seed=setup.seed + worker)
        self._builder = setup.builder
        self._builder.slots = None  # type: ignore[assignment]  # batches go to reused memory
        self._builder.reader.split.quiet = True
        executors.prepare_process(setup)
        self._problem = executors.problem_of_init(setup)
        self._prep = threading.Lock()

    def run(self, packed: bytes) -> tuple[bytes, Bytes | None]:
        """Build a batch. Its fetches are started at once, its prep begins when that of the previous one has ended.

        Returns:
            The packed result without memory; and the memory of the batch.
        """
        _, task = unpack_task(packed)
        pending = self._builder.start(task)
        with self._prep:
            begun = time.monotonic()
            if self._problem is None:
                result = self._builder.finish(task, pending, here=False)
            else:
                result = failure(task, self._problem)
            result.prep_seconds = result.prep_seconds or time.monotonic() - begun
        memory = None
        if result.status == PRIVATE and result.memory is not None:
            memory, result.memory = result.memory[: result.size].copy(), None
        return b"".join(result.pack()), memory
