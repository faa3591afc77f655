"""A simulated device with virtual time that detects unordered accesses to the same bytes.

Threads and streams are agents. Each has a vector clock, which also holds a time. Clocks are joined by the same
operations as on a device:

    submission of work to a stream      the stream begins the work after the submission
    `record`, then `wait` or `finish`   the stream or the thread continues after the event
    an item, and its removal            as between any threads; also the start of a thread
    a piece of memory that is freed     the last agent that drops it continues after all others that held it

Two accesses to the same bytes, of which one is a write, are a fault if they are not ordered. The bytes are real, and
streams execute their work as late as allowed, at random, so that faulty code also yields wrong data.
"""

import contextlib
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from stallfree.device import ahead, copies, prefetcher
from stallfree.device.ahead import Item, Items
from stallfree.device.copies import Cuda

FRESH, FREED = 0xA5, 0x5A
TIME = 0  # its number in clocks
Work = Callable[[], object]
Tensors = Sequence[torch.Tensor]
Clock = dict[int, float]  # of each agent, the number of its last action that came before now; and the time


class Agent:
    def __init__(self, name: str, number: int, after: Clock) -> None:
        self.name, self.number = name, number
        self.clock: Clock = {TIME: 0.0, **after, number: 0}

    def tick(self) -> None:
        self.clock[self.number] += 1

    def meet(self, clock: Clock) -> None:
        for number, tick in clock.items():
            if tick > self.clock.get(number, 0):
                self.clock[number] = tick


class Stream(Agent):
    """Executes its work in order, at some later time."""

    def __init__(self, world: "World", number: int) -> None:
        super().__init__(f"stream {number}", number, {})
        self.world, self.given, self.done = world, 0, 0  # how much work was submitted, and executed
        self.work: deque[Work] = deque()

    def wait_event(self, event: "Event") -> None:
        with self.world.lock:
            self.meet(self.world.here.clock)
            if event.clock is not None:
                self.meet(event.clock)
                self.world.queue(self, partial(self.world.run, *event.position))


class Event:
    """A mark in a stream; without a clock, it was never recorded."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.clock: Clock | None = None
        self.position: Any = None

    def record(self, stream: Stream) -> None:
        with self.world.lock:
            stream.meet(self.world.here.clock)
            self.clock, self.position = dict(stream.clock), (stream, stream.given)

    def synchronize(self) -> None:
        with self.world.lock:
            if self.clock is not None:
                self.world.run(*self.position)
                self.world.here.meet(self.clock)

    def query(self) -> bool:
        if self.clock is not None and self.clock[TIME] > self.world.here.clock[TIME]:
            return False
        self.synchronize()
        return True


@dataclass
class Access:
    """An access to the bytes from `begin` to `end`, as action `tick` of the agent."""

    agent: Agent
    tick: float
    begin: int
    end: int
    write: bool
    what: str

    def __str__(self) -> str:
        return f"the {'write' if self.write else 'read'} of {self.begin}..{self.end} by {self.agent.name} ({self.what})"


@dataclass
class Piece:
    """A piece of memory."""

    kind: str  # "device", "pinned", "lent" (pinned memory of a loader), or "registered" (pinned in place)
    block: torch.Tensor
    owner: Stream | None  # the stream for which device memory was made, and is made again once it is freed
    keepers: list[Stream] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)  # but for those that a later write has covered
    time: float = 0.0  # when it can be made again
    behind: list[tuple[Stream, int]] = field(default_factory=list)  # work of the keepers, which comes before

    def __str__(self) -> str:
        return f"{self.kind} memory of {self.block.numel()} bytes"


class ClockedItems(Items):
    """Items between threads: one is taken after its `put`, and the one that needs its place comes after its removal."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world = world
        self._puts: dict[int, Clock] = {}
        self._removals: list[Clock] = []

    def put(self, item: Item) -> None:
        self._puts[id(item)] = self._world.stamp()
        super().put(item)

    def remove(self, item: Item) -> None:
        self._removals.append(self._world.stamp())
        super().remove(item)

    def has_capacity(self, limit: int) -> bool:
        found = super().has_capacity(limit)
        if found and len(self._puts) >= limit:
            self._world.meet(self._removals[len(self._puts) - limit])
        return found

    def first(self) -> Item:
        item = super().first()
        self._world.meet(self._puts[id(item)])
        return item


class World(Cuda):
    """The device, its threads, and the observed faults. torch treats its memory as that of a CPU.

    `seed` decides how late streams are. A copy takes `copy_seconds`.
    """

    def __init__(self, seed: int = 0, copy_seconds: float = 0.0) -> None:
        self.device = torch.device("cpu")
        self.lock = threading.RLock()
        self.copy_seconds = copy_seconds
        self.faults: list[str] = []
        self.reserved = 0  # bytes of device memory that were ever needed at once
        self.pins = 0  # how often memory was pinned where it was
        self.copies: list[Stream] = []  # in which stream each copy was made
        self.streams: list[Stream] = []
        self._chance = random.Random(seed)
        self._local = threading.local()
        self._hosts: list[Agent] = []
        self._pieces: dict[int, Piece] = {}
        self._freed: list[Piece] = []
        self.main = self.new_stream()
        self.bind()

    def new_stream(self) -> Stream:
        with self.lock:
            self.streams.append(Stream(self, self._next_number()))
            return self.streams[-1]

    def _next_number(self) -> int:
        return 1 + len(self.streams) + len(self._hosts)

    @property
    def here(self) -> Agent:
        if not hasattr(self._local, "agent"):
            self._enter({})
        return self._local.agent  # type: ignore[no-any-return]

    def _enter(self, after: Clock) -> None:
        with self.lock:
            self._local.agent = Agent(threading.current_thread().name, self._next_number(), after)
            self._hosts.append(self._local.agent)

    def stamp(self) -> Clock:
        with self.lock:
            return dict(self.here.clock)

    def meet(self, clock: Clock) -> None:
        with self.lock:
            self.here.meet(clock)

    def thread(self, target: Callable[..., Any], **arguments: Any) -> threading.Thread:
        after = self.stamp()

        def run(*given: Any) -> None:
            self._enter(after)
            target(*given)

        return threading.Thread(target=run, **arguments)

    def bind(self) -> None:
        self._local.bound = True

    def current_stream(self) -> Stream:
        return getattr(self._local, "stream", self.main)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def new_event(self) -> Event:
        return Event(self)

    def empty(self, size: int) -> torch.Tensor:
        return self._allocate("device", size, self.current_stream())

    def empty_pinned(self, size: int) -> torch.Tensor:
        return self._allocate("pinned", size)

    def lend(self, value: torch.Tensor) -> torch.Tensor:
        """Return `value` in pinned memory of a loader, which overwrites it once it is unreferenced."""
        lent = as_type_of(value, self._allocate("lent", value.nbytes))
        self.touch(lent, self.here, True, "the loader")
        return lent.copy_(value)

    def _allocate(self, kind: str, size: int, owner: Stream | None = None) -> torch.Tensor:
        with self.lock:
            piece = Piece(kind, self._block(kind, size, owner), owner)
            self._pieces[piece.block.data_ptr()] = piece
            memory: Any = piece.block.numpy()
            weakref.finalize(memory, self._free, piece).atexit = False
            return torch.from_numpy(memory)

    def _block(self, kind: str, size: int, owner: Stream | None) -> torch.Tensor:
        for at, freed in enumerate(self._freed):
            fits = freed.kind == kind and freed.owner is owner and freed.block.numel() == size
            if fits and freed.time <= self.here.clock[TIME]:
                del self._freed[at]
                for stream, number in freed.behind:
                    self.run(stream, number)
                return freed.block
        self.reserved += size if kind == "device" else 0
        return torch.from_numpy(np.full(size, FRESH, np.uint8))

    def _free(self, piece: Piece) -> None:
        with self.lock:
            del self._pieces[piece.block.data_ptr()]
            self._expect_unused(piece, "freed", "whoever is given this memory next")
            if piece.kind != "device":
                piece.block.fill_(FREED)
            piece.behind = [(stream, stream.given) for stream in piece.keepers]
            piece.time = max((stream.clock[TIME] for stream in piece.keepers), default=0.0)
            self._freed.append(piece)

    def _expect_unused(self, piece: Piece, done: str, by: str) -> None:
        """Add a fault for each access to a piece that neither a thread, its owner nor a keeper is ordered after."""
        after = Agent(by, TIME, {})
        for agent in [*self._hosts, *piece.keepers, *([piece.owner] if piece.owner else [])]:
            after.meet(agent.clock)
        for access in piece.accesses:
            if after.clock.get(access.agent.number, 0) < access.tick:
                self.faults.append(f"{piece} is {done} too early: nothing orders {access} and {by}")
        piece.accesses = []

    def find(self, tensor: torch.Tensor) -> Piece | None:
        if tensor.layout is not torch.strided:
            return None
        at = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize  # also of an empty one
        pieces = list(self._pieces.items())
        return next((piece for begin, piece in pieces if 0 <= at - begin < piece.block.numel()), None)

    def on_device(self, tensor: torch.Tensor) -> bool:
        return getattr(self.find(tensor), "kind", None) == "device"

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return getattr(self.find(tensor), "kind", None) not in (None, "device")

    def keep(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            tensor.record_stream(self.current_stream())
            return
        piece = self.find(tensor)
        if piece is not None and self.current_stream() not in (piece.owner, *piece.keepers):
            piece.keepers.append(self.current_stream())

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
        address = memory.ctypes.data

        def undo() -> None:
            with self.lock:
                self._expect_unused(self._pieces.pop(address), "unpinned", "that")

        with self.lock:
            self.pins += 1
            assert address not in self._pieces, "pinned twice"
            self._pieces[address] = Piece("registered", torch.from_numpy(memory), None)
        return undo

    def refill(self, address: int) -> None:
        """Record that a process fills the registered memory at an address, from now on."""
        with self.lock:
            if address in self._pieces:
                self._expect_unused(self._pieces[address], "filled", "that")

    def in_use(self, *kinds: str) -> int:
        return sum(piece.kind in kinds for piece in self._pieces.values())

    def _raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same bytes without a reference to the piece, since work of a device holds none."""
        piece = self.find(tensor)
        if piece is None or not tensor.numel():
            return tensor.clone()
        return as_type_of(tensor, piece.block, tensor.data_ptr() - piece.block.data_ptr(), tensor.stride())

    def touch(self, tensor: torch.Tensor, agent: Agent, write: bool, what: str) -> None:
        """Record that `agent` reads or writes the bytes of `tensor` as its next action."""
        with self.lock:
            piece = self.find(tensor)
            if piece is None or not tensor.numel():
                return
            if not isinstance(agent, Stream):
                agent.tick()
            elif piece.kind == "device" and not write and not piece.accesses:
                self.faults.append(f"{what} in {agent.name} reads {piece}, to which nothing was written")
            begin = tensor.data_ptr() - piece.block.data_ptr()
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            end = begin + (sum((length - 1) * step for length, step in steps) + 1) * tensor.itemsize
            new = Access(agent, agent.clock[agent.number], begin, end, write, what)
            for old in piece.accesses:
                ordered = agent.clock.get(old.agent.number, 0) >= old.tick
                if (write or old.write) and old.begin < end and begin < old.end and not ordered:
                    self.faults.append(f"{piece}: nothing orders {old} and {new}")
            if write:
                piece.accesses = [old for old in piece.accesses if old.begin < begin or end < old.end]
            piece.accesses.append(new)

    def submit(self, what: str, seconds: float, work: Work, reads: Tensors = (), writes: Tensors = ()) -> None:
        with self.lock:
            if not getattr(self._local, "bound", False):
                self.faults.append(f"{what}: {self.here.name} is not bound to the device")
            stream = self.current_stream()
            stream.meet(self.here.clock)
            stream.tick()
            stream.clock[TIME] += seconds
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self.touch(tensor, stream, write, what)
            self.queue(stream, work)

    def queue(self, stream: Stream, work: Work) -> None:
        stream.work.append(work)
        stream.given += 1
        while self._chance.random() < 0.5:
            late = self._chance.choice(self.streams)
            self.run(late, min(late.given, late.done + 1))

    def run(self, stream: Stream, number: int) -> None:
        """Execute the work of the stream up to `number`, and the work of others that it waits for."""
        with self.lock:
            while stream.done < number:
                stream.done += 1
                stream.work.popleft()()

    def stage(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for tensors, write in ((sources, False), (targets, True)):
            for tensor in tensors:
                self.touch(tensor, self.here, write, "staging")
        super().stage(targets, sources)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.is_pinned(source), "only out of pinned memory can be copied without waiting"
        self.copies.append(self.current_stream())
        work = partial(self._raw(target).copy_, self._raw(source))
        self.submit("a copy", self.copy_seconds, work, reads=[source], writes=[target])

    def use(self, tensor: torch.Tensor, expected: torch.Tensor | None = None, seconds: float = 0.0) -> None:
        """Run a training step: reads a tensor in the current stream; unexpected values are a fault."""
        raw, stream = self._raw(tensor), self.current_stream()

        def look() -> None:
            if expected is not None and not torch.equal(raw, expected):
                self.faults.append(f"wrong data: {stream.name} found {raw} where {expected} should be")

        self.submit("a step", seconds, look, reads=[tensor])

    def compute(self, tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Apply `function`, which keeps the dtype, to a tensor in the current stream, in new memory of the device."""
        result = as_type_of(tensor, self.empty(tensor.nbytes))
        source, target = self._raw(tensor), self._raw(result)
        self.submit("a transform", 0.0, lambda: target.copy_(function(source)), reads=[tensor], writes=[result])
        return result

    def synchronize(self) -> None:
        event = Event(self)
        event.record(self.current_stream())
        event.synchronize()

    def check(self) -> None:
        for stream in self.streams:
            self.run(stream, stream.given)
        if self.faults:
            raise AssertionError(f"{len(self.faults)} faults: " + "\n".join(self.faults[:5]))

    @contextlib.contextmanager
    def installed(self) -> Iterator[pytest.MonkeyPatch]:
        plain = copies.is_plain
        copies._warn_of_slow.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefetcher, "find_device", lambda device: (self.device, self))
            patch.setattr(ahead, "Items", partial(ClockedItems, self))
            patch.setattr(ahead, "threading", SimpleNamespace(Thread=self.thread))
            patch.setattr(copies, "is_plain", lambda leaf: plain(leaf) and not self.on_device(leaf))
            patch.setattr(copies, "SMALL", 1024)
            yield patch


def as_type_of(like: torch.Tensor, memory: torch.Tensor, begin: int = 0, stride: Any = None) -> torch.Tensor:
    stride = stride or torch.empty(like.shape, device="meta").stride()
    return torch.empty(0, dtype=like.dtype).set_(memory.untyped_storage(), begin // like.itemsize, like.shape, stride)


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stallfree-prefetch"]


def join_prefetchers() -> None:
    for thread in prefetching():
        thread.join()
