"""The bridge: the process that is connected to a Ray cluster for a loader.

It submits tasks to actors and copies their batches into slots. It ends with the training process, and the actors end
with it, since Ray ends the actors of a driver that has ended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from statistics import median
from typing import Any

from stallfree.batches.batch_builder import failure
from stallfree.batches.messages import FORGET, PRIVATE, READY, UNDONE, Result, Task, unpack_result, unpack_task
from stallfree.batches.ring import Slots
from stallfree.errors import WorkerError
from stallfree.ipc.process import Parent
from stallfree.workers.ray_actor import CONCURRENCY, RayWorker, pack_setup
from stallfree.workers.ray_workers import DEPTH, HEAD, PROBLEM, RESULT, STATE, RayWorkers
from stallfree.workers.worker import WorkerSetup
from stallfree.workers.worker_processes import LIVES

_LOOK_SECONDS = 0.5
_CONNECT_SECONDS = 3.0
_OVERDUE_SECONDS = 3.0
"""Least seconds until a batch is submitted to a second worker; else twice the longest recent time of a batch."""

_RETURN_SECONDS = 2.0
"""Seconds between the death of a worker and the start of the next one in its place, doubled up to 30."""

Key = tuple[int, int]


def bridge_main(
    parent: Parent, slots: Slots, setup: WorkerSetup | bytes, first: int, spec: RayWorkers, address: str | None
) -> None:
    """Run the bridge until its end.

    Args:
        parent: the training process.
        slots: of the ring.
        setup: of the workers, or the result of `pack_setup`.
        first: number of the first worker.
        spec: the workers.
        address: of the cluster.
    """
    events: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
    bridge = Bridge(parent, slots, first, spec, events)
    parent.listen(lambda message: events.put(None if message is None else lambda: bridge.receive(message)))
    with contextlib.suppress(OSError):
        parent.report()
        try:
            bridge.connect(address, setup)
        except Exception as error:
            bridge.send(PROBLEM, 0, 0, f"no Ray workers could be started: {type(error).__name__}: {error}".encode())
            os._exit(1)
        bridge.run()
        bridge.end()


@dataclass
class _Place:
    """A worker of the cluster.

    Attributes:
        number: of the worker.
        actor: its handle; None while it waits for its next start.
        ready: whether it takes tasks.
        sent: its tasks by key, with the time of submission; the oldest first.
        suspect: whether a batch of it is overdue.
        deaths: number of deaths since its last result.
        next_start: time of the next start.
    """

    number: int
    actor: Any = None
    ready: bool = False
    sent: dict[Key, float] = field(default_factory=dict)
    suspect: bool = False
    deaths: int = 0
    next_start: float = 0.0


class Bridge:
    """Submits tasks to actors. All methods but the callbacks of Ray run in one thread, through `events`."""

    def __init__(
        self,
        parent: Parent,
        slots: Slots,
        first: int,
        spec: RayWorkers,
        events: queue.SimpleQueue[Callable[[], object] | None],
    ) -> None:
        self._parent, self._slots, self._first, self._spec, self._events = parent, slots, first, spec, events
        self._places = [_Place(number) for number in range(spec.num_workers)]
        self._tasks: dict[Key, Task] = {}  # without a result
        self._waiting: deque[Key] = deque()
        self._deaths: dict[Key, int] = {}
        self._wanted = 0
        self._recent: deque[float] = deque(maxlen=32)  # seconds from submission to result
        self._trips: deque[float] = deque(maxlen=32)  # ratio of the round trip to the time of the batch
        self._depth = 2
        self._stated = -1
        self._first_problem = ""

    def send(self, kind: int, worker: int, capacity: int, *pieces: bytes | memoryview) -> None:
        """Send a message to the training process."""
        self._parent.send(HEAD.pack(kind, worker, capacity), *pieces)

    # -- the cluster --------------------------------------------------------------------------------------------------

    def connect(self, address: str | None, setup: WorkerSetup | bytes) -> None:
        """Connect to the cluster and start the actors."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if address is not None and (found := re.fullmatch(r"([\w.-]+):(\d+)", address)):
            socket.create_connection((found[1], int(found[2])), _CONNECT_SECONDS).close()  # Ray itself retries for long
        ray = self._ray = import_module("ray")
        ray.init(
            address=address,
            runtime_env=None if self._spec.runtime_env is None else dict(self._spec.runtime_env),
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
        self._packed = ray.put(setup if isinstance(setup, bytes) else pack_setup(setup))
        resources = {"CPU": 1.0, **(self._spec.resources or {})}
        options: dict[str, Any] = {"num_cpus": resources.pop("CPU"), "num_gpus": resources.pop("GPU", 0)}
        options["memory"] = resources.pop("memory", None)
        self._remote = ray.remote(RayWorker).options(
            **options,
            resources=resources or None,
            max_restarts=0,
            max_concurrency=CONCURRENCY,
            scheduling_strategy="SPREAD",
        )
        for place in self._places:
            self._start(place)

    def _start(self, place: _Place) -> None:
        place.actor = actor = self._remote.remote(self._packed, self._first + place.number)
        self._watch(actor.ready.remote(), lambda answer: self._is_ready(place, actor, answer))

    def end(self) -> None:
        """End the actors and disconnect."""
        self._ray.shutdown()
        os._exit(0)  # without waiting for threads of Ray

    def _watch(self, ref: Any, then: Callable[[Any], object]) -> None:
        """Call `then` with the future of `ref` in the thread of `run`."""
        ref.future().add_done_callback(lambda future: self._events.put(lambda: then(future)))

    def _is_ready(self, place: _Place, actor: Any, answer: Any) -> None:
        if place.actor is not actor:
            return
        if (error := answer.exception()) is None:
            place.ready = True
        else:
            self._lose(place, error)

    def _lose(self, place: _Place, error: BaseException) -> None:
        """The worker is lost: its tasks are submitted to others."""
        started, place.ready, place.suspect, place.actor = place.ready, False, False, None
        place.deaths += 1
        place.next_start = time.monotonic() + min(30.0, _RETURN_SECONDS * 2 ** min(place.deaths - 1, 4))
        if started:
            self.send(STATE, 1, self._stated)
        elif "creation task" in str(error) or not isinstance(error, self._ray.exceptions.ActorDiedError):
            self._first_problem = self._first_problem or str(error)
        keys, place.sent = list(place.sent), {}
        for at, key in enumerate(keys):
            if key not in self._tasks or self._elsewhere(key):
                continue
            if at == 0 and self._lives_left(key) <= 0:
                self._finish(key, failure(self._tasks[key], _killer(self._tasks[key], error), here=False), place.number)
            else:
                self._waiting.appendleft(key)

    def _elsewhere(self, key: Key) -> bool:
        return any(key in place.sent and not place.suspect for place in self._places)

    def _lives_left(self, key: Key) -> int:
        deaths = self._deaths[key] = self._deaths.get(key, 0) + 1
        return LIVES - deaths

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until the training process requests the end."""
        look = 0.0
        while True:
            try:
                event = self._events.get(timeout=max(0.01, look - time.monotonic()))
            except queue.Empty:
                pass
            else:
                if event is None:
                    return
                event()
            now = time.monotonic()
            if now >= look:
                look = now + _LOOK_SECONDS
                self._look(now)
            self._dispatch(now)
            self._state()

    def receive(self, message: bytearray) -> None:
        """Handle a message of the training process."""
        kind, task = unpack_task(message)
        key = task.token, task.number
        if kind == FORGET:
            self._wanted = max(self._wanted, task.token)
            for old in [old for old in self._tasks if old[0] < self._wanted]:
                self._undo(old)
        elif task.token < self._wanted:
            self._tasks[key] = task
            self._undo(key)
        else:
            self._tasks[key] = task
            self._waiting.append(key)

    def _undo(self, key: Key) -> None:
        """Return a task that is not wanted, or that no worker can do."""
        task = self._tasks[key]
        self._finish(key, Result(UNDONE, task.token, task.number, task.slot), 0)

    def _finish(self, key: Key, result: Result, worker: int) -> None:
        del self._tasks[key]
        self._deaths.pop(key, None)
        self.send(RESULT, worker, 0, *result.pack())

    @property
    def _usable(self) -> list[_Place]:
        return [place for place in self._places if place.ready and not place.suspect]

    def _dispatch(self, now: float) -> None:
        usable = self._usable
        while self._waiting and usable:
            key = self._waiting[0]
            if key not in self._tasks:
                self._waiting.popleft()
                continue
            place = min(usable, key=lambda place: len(place.sent))
            if len(place.sent) >= self._depth:
                return
            self._waiting.popleft()
            self._submit(place, key, now)

    def _submit(self, place: _Place, key: Key, now: float) -> None:
        actor, alone = place.actor, not place.sent
        place.sent[key] = now
        task = replace(self._tasks[key], slot=-1)
        try:
            ref = actor.run.remote(task.pack())
        except Exception as error:
            self._lose(place, error)
        else:
            self._watch(ref, lambda future: self._is_done(place, actor, key, alone, future))

    def _is_done(self, place: _Place, actor: Any, key: Key, alone: bool, future: Any) -> None:
        error = future.exception()
        if place.actor is not actor:
            return  # lost before
        if error is not None:
            if isinstance(error, (self._ray.exceptions.ActorError, self._ray.exceptions.RayTaskError)):
                self._lose(place, error)
            elif place.sent.pop(key, None) is not None and key in self._tasks:
                self._waiting.appendleft(key)  # the object was lost on its way
            return
        now, since = time.monotonic(), place.sent.pop(key)
        place.suspect, place.deaths = False, 0
        head, memory, seconds = future.result()
        self._recent.append(now - since)
        if alone:
            self._note_trip(now - since, seconds)
        if key in self._tasks:
            self._finish(key, self._copied(self._tasks[key], head, memory, now - seconds), place.number)

    def _note_trip(self, whole: float, seconds: float) -> None:
        """Adapt the batches in flight per worker to the round trip, as a multiple of the time of a batch."""
        self._trips.append(max(0.0, whole - seconds) / max(seconds, 1e-4))
        self._depth = max(CONCURRENCY, min(DEPTH, 1 + math.ceil(median(self._trips))))

    def _copied(self, task: Task, head: bytes, memory: Any, started: float) -> Result:
        """The result with its batch in the slot of the task."""
        result = unpack_result(head)
        result.slot, result.started = task.slot, started
        if memory is not None:
            there = self._slots.reserve(task.slot, result.size)
            if there is None:
                result.status, result.memory = PRIVATE, memory
            else:
                there[: result.size] = memory
                result.status = READY
        return result

    def _look(self, now: float) -> None:
        """Start workers again, and submit overdue batches to others."""
        for place in self._places:
            if place.actor is None and now >= place.next_start:
                self._start(place)
        limit = max(_OVERDUE_SECONDS, 2 * max(self._recent, default=math.inf))
        late: list[Key] = []
        for place in self._places:
            overdue = [key for key, since in place.sent.items() if now - since > limit]
            if overdue:
                place.suspect = True
                late += overdue
        usable = self._usable
        for key in late:
            if key not in self._tasks or key in self._waiting or self._elsewhere(key):
                continue
            if usable:
                self._waiting.appendleft(key)
            else:
                self._undo(key)

    def _state(self) -> None:
        """Send the number of batches that the workers take, if it has changed."""
        capacity = self._depth * len(self._usable)
        if capacity == 0 and self._stated <= 0 and self._first_problem:
            if any(place.ready or place.deaths == 0 for place in self._places):
                return
            self.send(PROBLEM, 0, 0, f"no Ray worker could be started: {self._first_problem}".encode())
            self._first_problem = ""
        elif capacity != self._stated:
            self._stated = capacity
            for key in list(self._waiting) if capacity == 0 else ():
                if key in self._tasks:
                    self._undo(key)
            self.send(STATE, 0, capacity)


def _killer(task: Task, error: BaseException) -> WorkerError:
    ids = task.ids.tolist()
    return WorkerError(
        f"{LIVES} Ray workers died one after the other on batch {task.number} of epoch {task.epoch}, which holds the "
        f"samples {ids}; the last: {error}. Prepare these samples with num_workers=0 to see why",
        ids=ids,
    )
