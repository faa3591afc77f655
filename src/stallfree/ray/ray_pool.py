"""The actors of a cluster that build batches: submits tasks to them, and repeats the tasks of those that are lost."""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, Protocol

from stallfree.errors import InputError, WorkerError, text_of
from stallfree.loader.batch import failure
from stallfree.loader.messages import Task
from stallfree.loader.processes import LIVES
from stallfree.ray.ray_actor import CONCURRENCY, RayWorker
from stallfree.ray.ray_workers import DEPTH, RayWorkers

Key = tuple[int, int]
Events = queue.SimpleQueue[Callable[[], object] | None]

_LOOK_SECONDS = 0.5
_OVERDUE_SECONDS = 3.0
"""Least seconds until a batch is submitted to a second worker; else twice the longest recent time of a batch."""

_RETURN_SECONDS = 2.0
"""Seconds between the death of a worker and the start of the next one in its place, doubled up to 30."""


class Built(NamedTuple):
    """A finished task.

    Attributes:
        head: the packed result without memory.
        memory: reference of the memory of the batch, or of None; None if the task failed without a worker.
        worker: number of the worker.
        seconds: that it took.
        trip: round trip until now, in seconds, if the worker had no other task; else None.
    """

    head: bytes
    memory: Any
    worker: int
    seconds: float
    trip: float | None


class Owner(Protocol):
    """Has tasks done by an `ActorPool`. Called in the thread of `ActorPool.run`."""

    def built(self, task: Task, built: Built) -> None:
        """A task is finished."""

    def undone(self, task: Task) -> None:
        """No worker can do this task."""

    def changed(self, capacity: int, lost: int) -> None:
        """The number of tasks that the workers take has changed, or `lost` workers were lost."""

    def failed(self, reason: str | InputError) -> None:
        """No worker could be started."""


@dataclass
class _Place:
    """A worker of the cluster.

    Attributes:
        number: of the worker.
        actor: its handle; None while it waits for its next start.
        ready: whether it takes tasks.
        sent: its tasks, with the time of submission; the oldest first.
        suspect: whether a task of it is overdue.
        deaths: number of deaths since its last result.
        next_start: time of the next start.
        retired: whether it ends after its tasks.
    """

    number: int
    actor: Any = None
    ready: bool = False
    sent: dict[Key, float] = field(default_factory=dict)
    suspect: bool = False
    deaths: int = 0
    next_start: float = 0.0
    retired: bool = False


class ActorPool:
    """Submits tasks to actors. All methods run in one thread, through `events`.

    Args:
        ray: the module.
        spec: the workers.
        packed: the result of `pack_setup`.
        first: number of the first worker.
        owner: gets the results.
        events: calls to make in `run`; None ends it.
    """

    def __init__(self, ray: Any, spec: RayWorkers, packed: bytes, first: int, owner: Owner, events: Events) -> None:
        self._ray, self._owner, self._events, self._first = ray, owner, events, first
        self._packed = ray.put(packed)
        resources = {"CPU": 1.0, **(spec.resources or {})}
        required = resources["CPU"]
        self._remote = ray.remote(RayWorker).options(
            num_cpus=resources.pop("CPU"),
            num_gpus=resources.pop("GPU", 0),
            memory=resources.pop("memory", None),
            resources=resources or None,
            max_restarts=0,
            max_concurrency=CONCURRENCY,
            scheduling_strategy="SPREAD",
        )
        self._most = max(1, int(ray.cluster_resources().get("CPU", 0) / required)) if required else spec.most
        self._places = [_Place(number) for number in range(spec.first)]
        self._tasks: dict[Key, Task] = {}  # without a result
        self._waiting: deque[Key] = deque()
        self._deaths: dict[Key, int] = {}
        self._recent: deque[float] = deque(maxlen=32)  # seconds from submission to result
        self._trips: deque[float] = deque(maxlen=32)  # round trips, as multiples of the time of the batch
        self._depth = CONCURRENCY
        self._capacity = -1
        self._problem = ""
        for place in self._places:
            self._start(place)

    def run(self) -> None:
        """Run until the end."""
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
            self._publish()

    # -- tasks --------------------------------------------------------------------------------------------------------

    def submit(self, task: Task, lost: Built | None = None) -> None:
        """Receive a task; `lost`: its earlier result, whose memory is lost."""
        key = task.token, task.number
        self._tasks[key] = task
        self._waiting.append(key)

    def forget(self, token: int) -> None:
        """Return the tasks of iterations before `token`."""
        for key in [key for key in self._tasks if key[0] < token]:
            self._undo(key)

    def resize(self, workers: int) -> None:
        """Have that number of workers, or as many as the cluster holds."""
        places, count = self._places, min(workers, self._most)
        for place in places[count:]:
            place.retired, place.ready = True, False
            self._retire(place)
        del places[count:]
        for number in range(len(places), count):
            places.append(_Place(number))
            self._start(places[number])

    def _retire(self, place: _Place) -> None:
        """End a retired worker that has no tasks."""
        if not place.sent and place.actor is not None:
            actor, place.actor = place.actor, None
            self._ray.kill(actor)

    def note_trip(self, trip: float, seconds: float) -> None:
        """Adapt the tasks in flight per worker to the round trip of a task that took `seconds` itself."""
        self._trips.append(max(0.0, trip - seconds) / max(seconds, 1e-4))
        self._depth = max(CONCURRENCY, min(DEPTH, 1 + math.ceil(median(self._trips))))

    def _undo(self, key: Key) -> None:
        self._deaths.pop(key, None)
        self._owner.undone(self._tasks.pop(key))

    def _finish(self, key: Key, built: Built) -> None:
        self._deaths.pop(key, None)
        self._owner.built(self._tasks.pop(key), built)

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
            if len(place.sent) >= self._depth or not place.ready:
                return
            self._waiting.popleft()
            self._send(place, key, now)

    def _send(self, place: _Place, key: Key, now: float) -> None:
        actor, alone = place.actor, not place.sent
        place.sent[key] = now
        try:
            head, memory = actor.run.options(num_returns=2).remote(self._tasks[key].pack())
        except Exception as error:
            self._lose(place, error)
        else:
            self._watch(head, lambda future: self._receive(place, actor, key, alone, future, memory))

    def _watch(self, ref: Any, then: Callable[[Any], object]) -> None:
        """Call `then` with the future of `ref` in the thread of `run`."""
        ref.future().add_done_callback(lambda future: self._events.put(lambda: then(future)))

    def _receive(self, place: _Place, actor: Any, key: Key, alone: bool, future: Any, memory: Any) -> None:
        if place.actor is not actor:
            return  # lost before
        error = future.exception()
        if error is not None:
            if isinstance(error, self._ray.exceptions.ObjectLostError):
                place.sent.pop(key, None)
                if key in self._tasks:
                    self._waiting.appendleft(key)
            else:
                self._lose(place, error)
            return
        trip = time.monotonic() - place.sent.pop(key)
        if place.retired:
            self._retire(place)
        place.suspect, place.deaths = False, 0
        self._recent.append(trip)
        head, seconds = future.result()
        if key in self._tasks:
            self._finish(key, Built(head, memory, self._first + place.number, seconds, trip if alone else None))

    # -- workers ------------------------------------------------------------------------------------------------------

    def _start(self, place: _Place) -> None:
        place.actor = actor = self._remote.remote(self._packed, self._first + place.number)
        self._watch(actor.ready.remote(), lambda future: self._is_ready(place, actor, future))

    def _is_ready(self, place: _Place, actor: Any, future: Any) -> None:
        if place.actor is not actor:
            return
        if (error := future.exception()) is None:
            place.ready = not place.retired
        else:
            self._lose(place, error)

    def _lose(self, place: _Place, error: BaseException) -> None:
        """The worker is lost: its tasks are submitted to others."""
        was_ready, place.ready, place.suspect, place.actor = place.ready, False, False, None
        place.deaths += 1
        place.next_start = time.monotonic() + min(30.0, _RETURN_SECONDS * 2 ** min(place.deaths - 1, 4))
        if was_ready:
            self._owner.changed(max(0, self._capacity), 1)
        else:
            self._problem = self._problem or text_of(error)
        keys, place.sent = list(place.sent), {}
        for at, key in enumerate(keys):
            if key not in self._tasks or self._is_elsewhere(key):
                continue
            if at == 0 and self._lives_left(key) <= 0:
                task = self._tasks[key]
                head = b"".join(failure(task, _killer(task, error), here=False).pack())
                self._finish(key, Built(head, None, self._first + place.number, 0.0, None))
            else:
                self._waiting.appendleft(key)

    def _is_elsewhere(self, key: Key) -> bool:
        return any(key in place.sent and not place.suspect for place in self._places)

    def _lives_left(self, key: Key) -> int:
        deaths = self._deaths[key] = self._deaths.get(key, 0) + 1
        return LIVES - deaths

    def _look(self, now: float) -> None:
        """Start lost workers again, and submit overdue tasks to others."""
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
            if key in self._tasks and key not in self._waiting and not self._is_elsewhere(key):
                if usable:
                    self._waiting.appendleft(key)
                else:
                    self._undo(key)

    def _publish(self) -> None:
        """Report the tasks that the workers take, if that has changed."""
        capacity = self._depth * len(self._usable)
        if capacity == 0 and self._capacity <= 0 and self._problem:
            if not any(place.ready or place.deaths == 0 for place in self._places):
                self._owner.failed(f"no Ray worker could be started: {self._problem}")
                self._problem = ""
        elif capacity != self._capacity:
            self._capacity = capacity
            for key in list(self._tasks) if capacity == 0 else ():
                self._undo(key)
            self._owner.changed(capacity, 0)


def _killer(task: Task, error: BaseException) -> WorkerError:
    ids = task.ids.tolist()
    return WorkerError(
        f"{LIVES} Ray workers died one after the other on batch {task.number} of epoch {task.epoch}, which holds the "
        f"samples {ids}; the last: {error}. Prepare these samples with num_workers=0 to see why",
        ids=ids,
    )
