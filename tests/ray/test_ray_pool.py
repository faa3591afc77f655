"""`ActorPool` with actors that do what a test says, at times that it sets. Ray is not needed."""

from __future__ import annotations

import queue
import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stallfree.loader.messages import FAILED, Task, unpack_result, unpack_task
from stallfree.loader.processes import LIVES
from stallfree.ray import ray_pool
from stallfree.ray.ray_pool import ActorPool, Built, Events
from stallfree.ray.ray_workers import RayWorkers

CONCURRENCY = ray_pool.CONCURRENCY


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class ObjectLostError(Exception):
    pass


class Ref:
    """A reference: of a call that a test answers."""

    def __init__(self) -> None:
        self.done: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.done


class Actor:
    """Its calls, in order: the numbers of the tasks with what they return."""

    def __init__(self) -> None:
        self.started = Ref()
        self.calls: list[tuple[int, Ref]] = []
        self.ready = SimpleNamespace(remote=lambda: self.started)
        self.run = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._run))

    def _run(self, packed: bytes) -> tuple[Ref, Ref]:
        _, task = unpack_task(packed)
        head = Ref()
        self.calls.append((task.number, head))
        return head, Ref()

    def begin(self) -> None:
        self.started.done.set_result(None)

    def answer(self, seconds: float = 0.1) -> int:
        """Finish the oldest call."""
        number, head = self.calls.pop(0)
        head.done.set_result((b"head", seconds))
        return number

    def die(self) -> None:
        """Fail all calls, also that of a start."""
        if not self.started.done.done():
            self.started.done.set_exception(RuntimeError("no room"))
        for _, head in self.calls:
            head.done.set_exception(RuntimeError("the actor died"))
        self.calls.clear()


class FakeRay:
    """What `ActorPool` uses of the module `ray`."""

    def __init__(self, cpus: int) -> None:
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self.cpus = cpus
        self.exceptions = SimpleNamespace(ObjectLostError=ObjectLostError)

    def put(self, value: object) -> object:
        return value

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self, packed: bytes, number: int) -> Actor:
        self.actors.append(Actor())
        return self.actors[-1]

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


class Owner:
    """Records what a pool reports."""

    def __init__(self) -> None:
        self.results: dict[int, Built] = {}
        self.returned: list[int] = []
        self.states: list[tuple[int, int]] = []
        self.problems: list[str] = []

    def built(self, task: Task, built: Built) -> None:
        assert task.number not in self.results, "a task has two results"
        self.results[task.number] = built

    def undone(self, task: Task) -> None:
        self.returned.append(task.number)

    def changed(self, capacity: int, lost: int) -> None:
        self.states.append((capacity, lost))

    def failed(self, reason: str) -> None:
        self.problems.append(reason)


class World:
    """A pool, its actors and its owner."""

    def __init__(self, clock: Clock, workers: int | str, ready: bool = True) -> None:
        self.clock, self.ray, self.owner = clock, FakeRay(cpus=16), Owner()
        self.events: Events = queue.SimpleQueue()
        spec = RayWorkers(workers)
        self.pool = ActorPool(self.ray, spec, b"", 0, self.owner, self.events)
        if ready:
            for actor in self.ray.actors:
                actor.begin()
        self.settle()

    def settle(self, seconds: float = 1.0) -> None:
        """Let time pass, and have the pool handle all that has come."""
        self.clock.now += seconds
        self.events.put(lambda: None)
        self.events.put(None)
        self.pool.run()

    def submit(self, *numbers: int) -> None:
        for number in numbers:
            task = Task(1, number, number, 0, np.array([number, number + 100], np.int64))
            self.events.put(lambda task=task: self.pool.submit(task))
        self.settle()

    def calls(self) -> list[list[int]]:
        """The numbers of the tasks of each actor."""
        return [[number for number, _ in actor.calls] for actor in self.ray.actors]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ray_pool, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr("stallfree.ray.ray_workers.find_spec", lambda name: object())
    return clock


def test_tasks_go_to_the_worker_with_the_fewest(clock: Clock) -> None:
    world = World(clock, 2)
    world.submit(0, 1, 2, 3, 4)

    assert sorted(map(len, world.calls())) == [CONCURRENCY, CONCURRENCY]
    assert world.owner.states[-1] == (2 * CONCURRENCY, 0)
    world.ray.actors[0].answer()
    world.settle()
    assert sorted(number for calls in world.calls() for number in calls) == [1, 2, 3, 4]
    assert list(world.owner.results) == [0]


def test_the_tasks_of_a_dead_worker_are_done_by_others(clock: Clock) -> None:
    world = World(clock, 2)
    world.submit(0, 1, 2, 3)
    world.ray.actors[0].die()
    world.settle()

    assert world.owner.states[-2:] == [(2 * CONCURRENCY, 1), (CONCURRENCY, 0)]
    while any(world.calls()):
        world.ray.actors[1].answer()
        world.settle(0.1)
    assert sorted(world.owner.results) == [0, 1, 2, 3]


def test_a_dead_worker_is_started_again_later_each_time(clock: Clock) -> None:
    world, times = World(clock, 1, ready=False), []
    for starts in range(2, 8):
        world.ray.actors[-1].die()
        died = clock.monotonic()
        for _ in range(100):
            if len(world.ray.actors) < starts:
                world.settle(0.5)
        times.append(clock.monotonic() - died)

    assert times == pytest.approx([2, 4, 8, 16, 30, 30], abs=1.0)


def test_a_batch_that_kills_three_workers_is_an_error_with_its_ids(clock: Clock) -> None:
    world = World(clock, LIVES)
    world.submit(7)
    for _ in range(LIVES):
        next(actor for actor in world.ray.actors if actor.calls).die()
        world.settle(0.0)

    result = unpack_result(world.owner.results[7].head)
    assert result.status == FAILED
    assert b"[7, 107]" in result.note


def test_an_overdue_batch_is_submitted_to_a_second_worker_and_the_first_result_counts(clock: Clock) -> None:
    world = World(clock, 2)
    world.submit(0, 1)
    late = next(actor for actor in world.ray.actors if [0] == [number for number, _ in actor.calls])
    other = next(actor for actor in world.ray.actors if actor is not late)
    other.answer()
    world.settle(1.0)
    world.settle(30.0)

    assert [number for number, _ in other.calls] == [0]
    assert other.answer() == late.answer() == 0
    world.settle()
    assert sorted(world.owner.results) == [0, 1]
    assert world.owner.states[-1] == (2 * CONCURRENCY, 0)  # the late worker takes tasks again


def test_overdue_batches_are_returned_if_no_other_worker_is_left(clock: Clock) -> None:
    world = World(clock, 1)
    world.submit(0)
    world.ray.actors[0].answer()
    world.settle(0.1)
    world.submit(1, 2)
    world.settle(60.0)

    assert world.owner.returned == [1, 2]
    assert world.owner.states[-1] == (0, 0)


def test_a_batch_whose_memory_is_lost_is_built_again(clock: Clock) -> None:
    world = World(clock, 1)
    world.submit(0)
    actor = world.ray.actors[0]
    actor.calls.pop()[1].done.set_exception(ObjectLostError())
    world.settle()

    assert world.calls() == [[0]]
    actor.answer()
    world.settle()
    assert list(world.owner.results) == [0]


def test_workers_that_are_not_needed_end_after_their_tasks(clock: Clock) -> None:
    world = World(clock, "auto")
    world.events.put(lambda: world.pool.resize(3))
    world.settle()
    for actor in world.ray.actors[1:]:
        actor.begin()
    world.settle()
    world.submit(*range(3 * CONCURRENCY))
    world.events.put(lambda: world.pool.resize(1))
    world.settle()

    assert world.ray.killed == []
    while any(world.calls()):
        for actor in world.ray.actors:
            if actor.calls:
                actor.answer()
        world.settle(0.1)
    assert world.ray.killed == world.ray.actors[1:]
    assert sorted(world.owner.results) == list(range(3 * CONCURRENCY))


def test_no_more_workers_than_the_cluster_holds(clock: Clock) -> None:
    world = World(clock, "auto")
    world.events.put(lambda: world.pool.resize(40))
    world.settle()

    assert len(world.ray.actors) == world.ray.cpus


def test_if_no_worker_can_be_started_the_reason_is_reported(clock: Clock) -> None:
    world = World(clock, 2, ready=False)
    for actor in world.ray.actors:
        actor.die()
    world.settle()

    assert world.owner.problems == ["no Ray worker could be started: no room"]


def test_tasks_of_earlier_iterations_are_returned(clock: Clock) -> None:
    world = World(clock, 1)
    world.submit(*range(5))
    world.events.put(lambda: world.pool.forget(2))
    world.settle()
    while any(world.calls()):
        world.ray.actors[0].answer()
        world.settle(0.1)

    assert sorted(world.owner.returned) == list(range(5))
    assert world.owner.results == {}


@pytest.mark.parametrize("seed", range(40))
def test_each_task_ends_once_whatever_happens(clock: Clock, seed: int) -> None:
    """Random answers, deaths, lost memory, pauses and sizes; at the end all workers answer."""
    chance = random.Random(seed)
    world, count = World(clock, 3), 60
    submitted = 0
    for _ in range(400):
        actors = [actor for actor in world.ray.actors if actor not in world.ray.killed]
        actor = chance.choice(actors)
        what = chance.random()
        if what < 0.35 and submitted < count:
            world.submit(submitted)
            submitted += 1
        elif what < 0.8 and actor.calls:
            actor.answer(chance.random())
        elif what < 0.83:
            actor.die()
        elif what < 0.86 and actor.calls:
            actor.calls.pop(chance.randrange(len(actor.calls)))[1].done.set_exception(ObjectLostError())
        elif what < 0.9:
            size = chance.randint(1, 4)
            world.events.put(lambda size=size: world.pool.resize(size))
        elif not actor.started.done.done():
            actor.begin()
        world.settle(chance.choice([0.0, 0.1, 1.0, 20.0]))
    for _ in range(2 * count):
        for actor in list(world.ray.actors):
            if not actor.started.done.done():
                actor.begin()
            while actor.calls:
                actor.answer()
        world.settle(5.0)

    ended = sorted([*world.owner.results, *world.owner.returned])
    assert ended == list(range(submitted))
