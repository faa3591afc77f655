"""`RayGroup` with hosts that come, lag and go as a random walk decides. Ray is not needed.

The model counts preparations. A batch is prepared again only for a reason: a worker returned it, its memory was lost,
or a host requests it that the group did not have to wait for.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stallfree.errors import InputError
from stallfree.loader.messages import Task
from stallfree.ray import ray_group
from stallfree.ray.ray_group import RayGroup
from stallfree.ray.ray_pool import Built
from stallfree.ray.ray_workers import GroupTerms, RayWorkers

SAME = {"seed": "1"}
BATCHES, EPOCHS = 30, 4
IN_FLIGHT = 4

Key = tuple[int, int]


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time a test sets. It never waits while a coroutine is ready."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Ended(Exception):
    """The actor has ended."""


@dataclass
class Host:
    """A host, which requests the batches of all epochs in order and checks what it receives."""

    name: str
    late: bool  # the group has prepared batches before it joined
    silent: bool = False
    excused: bool = False  # the group did not have to wait for it at some time
    next: int = 0
    got: list[Key] = field(default_factory=list)
    open: dict[Key, asyncio.Task[Any]] = field(default_factory=dict)
    results: dict[Key, Built] = field(default_factory=dict)
    lost: dict[Key, Built] = field(default_factory=dict)


class World:
    """A group, the tasks that its pool has, and its hosts."""

    def __init__(self, seed: int, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chance, self.loop = random.Random(seed), loop
        monkeypatch.setattr(ray_group, "time", SimpleNamespace(monotonic=loop.time))
        monkeypatch.setattr(ray_group, "os", SimpleNamespace(_exit=self._exit))
        monkeypatch.setattr(ray_group.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
        monkeypatch.setattr("stallfree.ray.ray_workers.find_spec", lambda name: object())
        self.group = RayGroup(b"", RayWorkers(1), GroupTerms("walk", SAME))
        self.group._pool = self  # type: ignore[assignment]
        self.tasks: list[Task] = []
        self.prepared: Counter[Key] = Counter()
        self.allowed: Counter[Key] = Counter()  # repeated preparations that have a reason
        self.hosts: dict[str, Host] = {}
        self.joined = 0

    def _exit(self, code: int) -> None:
        raise Ended

    # -- the pool -----------------------------------------------------------------------------------------------------

    def submit(self, task: Task) -> None:
        key = task.token, task.number
        self.prepared[key] += 1
        self.tasks.append(task)

    def work(self, *, undone: bool = False) -> None:
        """Finish a random task; `undone`: as one that no worker can do."""
        if not self.tasks:
            return
        task = self.tasks.pop(self.chance.randrange(len(self.tasks)))
        key = task.token, task.number
        if undone:
            self.allowed[key] += 1
            self.group.undone(task)
        else:
            self.group.built(task, Built(repr(key).encode(), "memory", 0, float(self.prepared[key]), None))

    async def turn(self) -> None:
        """Have the group handle all that is ready, and the hosts what they receive."""
        for _ in range(6):
            await asyncio.sleep(0)
            while not self.group._events.empty():
                event = self.group._events.get()
                assert event is not None
                event()
        for host in self.hosts.values():
            for key in [key for key, request in host.open.items() if request.done()]:
                built, memory = host.open.pop(key).result()
                if built is None:
                    self.ask(host, key)  # the executor would have a local worker do it
                    continue
                assert built != host.lost.pop(key, None), "a host has received memory that it has reported as lost"
                assert (built.head, memory) == (repr(key).encode(), ["memory"])
                host.results[key] = built
                host.got.append(key)

    # -- the hosts ----------------------------------------------------------------------------------------------------

    async def join(self) -> Host:
        host = self.hosts[name] = Host(name := f"host{self.joined}", late=bool(self.prepared))
        self.joined += 1
        await self.group.contact(host.name, SAME)
        return host

    def ask(self, host: Host, key: Key, lost: Built | None = None) -> None:
        task = Task(key[0], key[1], 0, key[0], np.array([key[1], key[1] + 100], np.int64))
        if lost is not None or host.late or host.excused:
            self.allowed[key] += 1
        host.open[key] = self.loop.create_task(self.group.request(host.name, task.pack(), lost))

    def step(self, host: Host) -> None:
        """Request the next batch, like an executor with a limit of batches in flight."""
        if host.next < BATCHES * EPOCHS and len(host.open) < IN_FLIGHT:
            epoch, number = divmod(host.next, BATCHES)
            host.next += 1
            self.ask(host, (epoch + 1, number))

    async def advance(self, seconds: float) -> None:
        """Let time pass, with contacts of the hosts that are not silent."""
        while seconds > 0:
            self.loop.now += min(1.0, seconds)
            seconds -= 1.0
            for host in self.hosts.values():
                if not host.silent:
                    await self.group.contact(host.name, SAME)
            await self.turn()
        # The group stops waiting for hosts that lag behind, or that are silent: from then on they may need repeats.
        for host in self.hosts.values():
            member = self.group._hosts.get(host.name)
            gone = member is None or self.loop.now - member.seen >= ray_group._GONE_SECONDS
            host.excused = host.excused or gone or member.behind  # type: ignore[union-attr]

    async def finish(self, seconds: float) -> None:
        """Have all hosts that are left receive all batches, then compare with the model."""
        for host in self.hosts.values():
            host.silent = False
        for _ in range(40 * BATCHES * EPOCHS):
            if all(host.next == BATCHES * EPOCHS and not host.open for host in self.hosts.values()):
                break
            for host in self.hosts.values():
                self.step(host)
            await self.turn()
            while self.tasks:
                self.work()
            await self.advance(seconds)
        everything = [(epoch + 1, number) for epoch in range(EPOCHS) for number in range(BATCHES)]
        for host in self.hosts.values():
            assert sorted(host.got) == everything, "a host has lost a batch, or received one twice"
        for key, times in self.prepared.items():
            assert times <= 1 + self.allowed[key], f"batch {key} was prepared {times} times"


@pytest.fixture
def loop() -> Any:
    loop = Loop()
    yield loop
    loop.run_until_complete(_cancel_all())
    loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _walk(world: World, *, faults: bool) -> None:
    chance = world.chance
    for _ in range(chance.randint(1, 3)):
        await world.join()
    for _ in range(1000):
        hosts = list(world.hosts.values())
        host, what = chance.choice(hosts), chance.random()
        if what < 0.5:
            world.step(chance.choice(hosts[:1] * 6 + hosts))  # the first host leads by far
        elif what < 0.9:
            world.work()
        elif not faults:
            await world.advance(0.01)
        elif what < 0.92:
            world.work(undone=True)
        elif what < 0.94 and host.results:
            key = chance.choice(list(host.results))
            if key not in host.open:
                host.got.remove(key)
                host.lost[key] = host.results.pop(key)
                world.ask(host, key, lost=host.lost[key])
        elif what < 0.95 and len(hosts) < 4:
            await world.join()
        elif what < 0.96 and len(hosts) > 1:  # it leaves or dies; its calls in the actor go on or are cancelled
            del world.hosts[host.name]
            for request in host.open.values() if chance.random() < 0.5 else ():
                request.cancel()
            if chance.random() < 0.5:
                await world.group.leave(host.name)
        elif what < 0.97:
            host.silent = not host.silent
        else:
            await world.advance(chance.choice([0.5, 1.0, 3.0, 25.0]))
        await world.turn()
    await world.finish(1.0 if faults else 0.01)


@pytest.mark.parametrize("seed", range(20))
def test_each_batch_is_prepared_once_and_received_once_by_each_host(
    seed: int, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(seed, loop, monkeypatch)
    loop.run_until_complete(_walk(world, faults=False))
    assert set(world.prepared.values()) == {1}


@pytest.mark.parametrize("seed", range(40))
def test_each_host_receives_each_batch_once_whatever_happens(
    seed: int, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts join, leave, die, lag and are silent; workers return batches; memory is lost."""
    loop.run_until_complete(_walk(World(seed, loop, monkeypatch), faults=True))


def test_the_group_ends_with_its_last_host(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def walk() -> None:
        world = World(0, loop, monkeypatch)
        first, second = await world.join(), await world.join()
        await world.group.leave(first.name)
        await world.group.leave("never joined")
        with pytest.raises(Ended):
            await world.group.leave(second.name)

    loop.run_until_complete(walk())


def test_a_host_with_other_terms_is_refused(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def walk() -> None:
        world = World(0, loop, monkeypatch)
        await world.join()
        with pytest.raises(InputError, match="it has seed=1, this host gives 2"):
            await world.group.contact("other", {"seed": "2"})
        assert list(world.group._hosts) == ["host0"]

    loop.run_until_complete(walk())


async def _request(world: World, host: Host, numbers: range) -> list[int]:
    """Request batches; return the numbers of those that come at once."""
    for number in numbers:
        world.ask(host, (1, number))
    for _ in range(4):
        await world.turn()
        while world.tasks:
            world.work()
    await world.turn()
    return sorted(number for _, number in host.got)


LEAST = ray_group._LEAST


def test_a_host_that_lags_holds_up_others_for_a_limited_time(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def walk() -> None:
        world = World(0, loop, monkeypatch)
        first, second = await world.join(), await world.join()
        assert await _request(world, first, range(LEAST + 1)) == list(range(LEAST))
        await world.advance(ray_group._LAG_SECONDS - 1)
        assert await _request(world, first, range(0)) == list(range(LEAST))
        await world.advance(2)
        assert await _request(world, first, range(LEAST + 1, LEAST + 9)) == list(range(LEAST + 9))
        assert await _request(world, second, range(LEAST, LEAST + 9)) == list(range(LEAST, LEAST + 9))
        assert set(world.prepared.values()) == {1}
        assert len(world.group._entries) == LEAST

    loop.run_until_complete(walk())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_host_that_is_silent_or_has_left_is_not_waited_for(
    leaves: bool, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def walk() -> None:
        world = World(0, loop, monkeypatch)
        first, second = await world.join(), await world.join()
        assert await _request(world, first, range(LEAST + 1)) == list(range(LEAST))
        second.silent = True
        if leaves:
            del world.hosts[second.name]
            await world.group.leave(second.name)
        await world.advance(0 if leaves else ray_group._GONE_SECONDS + 1)
        assert await _request(world, first, range(LEAST + 1, 2 * LEAST)) == list(range(2 * LEAST))

    loop.run_until_complete(walk())


def test_memory_that_several_hosts_have_lost_is_prepared_again_once(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def walk() -> None:
        world = World(0, loop, monkeypatch)
        hosts = [await world.join() for _ in range(3)]
        for host in hosts:
            await _request(world, host, range(1))
        for host in hosts:
            world.ask(host, (1, 0), lost=host.results[1, 0])
            await _request(world, host, range(0))
        assert world.prepared == {(1, 0): 2}
        assert [len(host.got) for host in hosts] == [2, 2, 2]

    loop.run_until_complete(walk())
