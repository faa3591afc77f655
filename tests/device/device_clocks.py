"""The order of actions: vector clocks of threads, streams, events and the queues between threads."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stallfree.device.ahead import Item, Items

if TYPE_CHECKING:
    from fakes import World

Clock = dict[int, int]
Stamp = tuple[Clock, float]
"""What an agent knew at some moment, and when that was."""


class Agent:
    """A thread, or a stream. `clock` holds, of each agent, the last thing that it did that came before now."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number, self.time = name, number, 0.0
        self.clock: Clock = {number: 0}

    def tick(self) -> None:
        self.clock[self.number] += 1

    def stamp(self) -> Stamp:
        return dict(self.clock), self.time

    def meet(self, stamp: Stamp) -> None:
        """Continue after the actions of the stamp."""
        clock, time = stamp
        for number, tick in clock.items():
            if tick > self.clock.get(number, 0):
                self.clock[number] = tick
        self.time = max(self.time, time)


class Stream(Agent):
    """Executes its work in order, at some later time."""

    def __init__(self, world: World, name: str, number: int) -> None:
        super().__init__(name, number)
        self.world = world
        self.work: deque[Callable[[], object]] = deque()
        self.given = self.done = 0

    def wait_event(self, event: Event) -> None:
        """Make later work wait for the event."""
        with self.world.lock:
            self.meet(self.world.here.stamp())
            if event.stamp is not None:
                self.meet(event.stamp)
                self.world.queue(self, partial(self.world.run_behind, *event.behind))


class Event:
    """A mark in a stream; without a stamp, it was never recorded."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stamp: Stamp | None = None
        self.behind: Any = None

    def record(self, stream: Stream) -> None:
        with self.world.lock:
            stream.meet(self.world.here.stamp())
            self.stamp, self.behind = stream.stamp(), (stream, stream.given)

    def synchronize(self) -> None:
        with self.world.lock:
            if self.stamp is not None:
                self.world.run_behind(*self.behind)
                self.world.here.meet(self.stamp)

    def query(self) -> bool:
        if self.stamp is not None and self.stamp[1] > self.world.here.time:
            return False
        self.synchronize()
        return True


@dataclass
class Access:
    """An access to the bytes from `begin` to `end`, as action `tick` of the agent."""

    agent: Agent
    tick: int
    begin: int
    end: int
    write: bool
    what: str

    def __str__(self) -> str:
        return f"the {'write' if self.write else 'read'} of {self.begin}..{self.end} by {self.agent.name} ({self.what})"


@dataclass
class Piece:
    """A piece of memory: "device", "pinned", "lent" (pinned memory of a loader), or "registered" (pinned in place).

    The owner is the stream for which device memory was made; `accesses` lacks those that a later write has covered.
    """

    name: str
    kind: str
    block: torch.Tensor
    owner: Stream | None
    keepers: list[Stream] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)


class ClockedQueue:
    """A queue between threads: a `get` comes after the corresponding `put`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: queue.SimpleQueue[tuple[Any, Stamp]] = queue.SimpleQueue()

    def put(self, item: Any) -> None:
        self._items.put((item, self._world.stamp()))

    def get(self) -> Any:
        item, stamp = self._items.get()
        self._world.meet(stamp)
        return item

    def empty(self) -> bool:
        return self._items.empty()


class ClockedItems(Items):
    """Items between threads: one is taken after its `put`, and the one that needs its place comes after its removal."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._stamps: dict[int, Stamp] = {}
        self._puts = 0
        self._removals: list[Stamp] = []

    def put(self, item: Item) -> None:
        self._stamps[id(item)] = self._world.stamp()
        self._puts += 1
        super().put(item)

    def remove(self, item: Item) -> None:
        self._removals.append(self._world.stamp())
        super().remove(item)

    def has_capacity(self, limit: int) -> bool:
        found = super().has_capacity(limit)
        if found and self._puts >= limit:
            self._world.meet(self._removals[self._puts - limit])
        return found

    def first(self) -> Item:
        item = super().first()
        self._world.meet(self._stamps[id(item)])
        return item


class ClockedThread(threading.Thread):
    """A thread ordered after its start and before its join."""

    def __init__(self, world: World, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._world = world

    def start(self) -> None:
        self._began = self._world.stamp()
        super().start()

    def run(self) -> None:
        self._world.enter(self.name, self._began)
        try:
            super().run()
        finally:
            self._ended = self._world.stamp()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if not self.is_alive():
            self._world.meet(self._ended)


class ClockedThreading:
    """The module `threading` whose `Thread` is a `ClockedThread`."""

    def __init__(self, world: World) -> None:
        self.Thread = partial(ClockedThread, world)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)
