"""A simulated device with virtual time that detects unordered accesses to the same bytes.

Threads and streams are agents. Each has a vector clock and a time, which are joined by the same operations as on a
device:

    submission of work to a stream      the stream begins the work after the submission
    `record`, then `wait` or `finish`   the stream or the thread continues after the event
    a queue, a thread's start and end   as between any threads
    a piece of memory that is freed     the last agent that drops it continues after all others that held it

Two accesses to the same bytes, of which one is a write, are a fault if they are not ordered. The bytes are real, and
streams execute their work as late as allowed, at random, so that faulty code also yields wrong data.
"""

import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from device_clocks import Access, Agent, ClockedItems, ClockedQueue, ClockedThreading, Event, Piece, Stamp, Stream

from stallfree.device import ahead, copies, prefetcher
from stallfree.device.copies import Cuda

FRESH, FREED = 0xA5, 0x5A


class World:
    """The device, its threads, and the observed faults. `seed` decides how late streams are.

    Attributes:
        reserved: bytes of device memory that were ever needed at once.
        registrations: 1 for each time that memory was pinned where it was, -1 for each time that this was undone.
        copies: in which stream each copy was made.
    """

    def __init__(self, seed: int = 0, copy_seconds: float = 0.0) -> None:
        self.lock = threading.RLock()
        self.copy_seconds = copy_seconds
        self.faults: list[str] = []
        self.reserved = 0
        self.copies: list[str] = []
        self.registrations: list[int] = []
        self.streams: list[Stream] = []
        self._chance = random.Random(seed)
        self._agents = 0
        self._local = threading.local()
        self._hosts: list[Agent] = []
        self._pieces: dict[int, Piece] = {}
        self._registered: dict[int, Piece] = {}
        self._blocks: list[tuple[str, Stream | None, torch.Tensor, float, list[tuple[Stream, int]]]] = []
        self.main = self.stream("the main stream")
        self.backend = FakeBackend(self)
        self.backend.bind()

    # -- agents -------------------------------------------------------------------------------------------------------

    def stream(self, name: str) -> Stream:
        with self.lock:
            self._agents += 1
            self.streams.append(Stream(self, name, self._agents))
            return self.streams[-1]

    @property
    def here(self) -> Agent:
        """The agent of the calling thread."""
        if not hasattr(self._local, "agent"):
            self.enter(threading.current_thread().name, ({}, 0.0))
        agent: Agent = self._local.agent
        return agent

    def enter(self, name: str, stamp: Stamp) -> None:
        """Begin this thread after the actions of the stamp."""
        with self.lock:
            self._agents += 1
            agent = self._local.agent = Agent(name, self._agents)
            self._hosts.append(agent)
            agent.meet(stamp)

    def meet(self, stamp: Stamp) -> None:
        """Continue this thread after the actions of the stamp."""
        with self.lock:
            self.here.meet(stamp)

    def stamp(self) -> Stamp:
        with self.lock:
            return self.here.stamp()

    def sleep_until(self, time: float) -> None:
        """Advance the time of this thread to at least the given one."""
        self.meet(({}, time))

    @property
    def current(self) -> Stream:
        """The stream that receives this thread's work."""
        stream: Stream = getattr(self._local, "stream", self.main)
        return stream

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    def bind(self) -> None:
        self._local.bound = True

    # -- memory -------------------------------------------------------------------------------------------------------

    def hand_out(self, kind: str, size: int) -> torch.Tensor:
        """Allocate memory for this thread's current stream, or for the host, until it is unreferenced."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        with self.lock:
            owner = self.current if kind == "device" else None
            block = self._block(kind, owner, size)
            held: Any = block.numpy()[:size]
            piece = Piece(f"{kind} memory of {size} bytes", kind, block, owner)
            self._pieces[block.data_ptr()] = piece
            weakref.finalize(held, self._free, piece).atexit = False
            return torch.from_numpy(held)

    def lend(self, value: torch.Tensor) -> torch.Tensor:
        """Return `value` in pinned memory of a loader, which overwrites it once it is unreferenced."""
        memory = self.hand_out("lent", value.nbytes)
        lent: Any = torch.empty(0, dtype=value.dtype)
        lent.set_(memory.untyped_storage(), 0, value.shape, value.stride())
        self.touch(lent, self.here, True, "the loader")
        return lent.copy_(value)  # type: ignore[no-any-return]

    def _block(self, kind: str, owner: Stream | None, size: int) -> torch.Tensor:
        for at, (of, stream, block, time, behind) in enumerate(self._blocks):
            fits = size <= block.numel() <= 2 * size + 512
            if of == kind and stream is owner and fits and time <= self.here.time:
                del self._blocks[at]
                for other, number in behind:
                    self._run(other, number)
                return block
        self.reserved += size if kind == "device" else 0
        return torch.from_numpy(np.full(size, FRESH, np.uint8))

    def _free(self, piece: Piece) -> None:
        with self.lock:
            del self._pieces[piece.block.data_ptr()]
            self._expect_unused(piece, "freed", "whoever is given this memory next")
            if piece.kind != "device":
                piece.block.fill_(FREED)
            behind = [(stream, stream.given) for stream in piece.keepers]
            time = max((stream.time for stream in piece.keepers), default=0.0)
            self._blocks.append((piece.kind, piece.owner, piece.block, time, behind))

    def _expect_unused(self, piece: Piece, done: str, by: str) -> None:
        """Add a fault for each access to a piece that neither a thread, its owner nor a keeper is ordered after."""
        after = Agent(by, 0)
        for agent in [*self._hosts, *piece.keepers, *([piece.owner] if piece.owner else [])]:
            after.meet((agent.clock, 0.0))
        for access in piece.accesses:
            if after.clock.get(access.agent.number, 0) < access.tick:
                self.faults.append(f"{piece.name} is {done} too early: nothing orders {access} and {by}")
        piece.accesses = []

    def find(self, tensor: torch.Tensor) -> Piece | None:
        """Return the piece that a tensor lies in, if it was allocated here."""
        if tensor.layout is not torch.strided:
            return None
        piece = self._pieces.get(tensor.untyped_storage().data_ptr())
        if piece is None:
            at = tensor.data_ptr()
            within = (piece for begin, piece in self._registered.items() if 0 <= at - begin < piece.block.numel())
            piece = next(within, None)
        return piece

    def register(self, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
        """Pin existing memory; returns the function that unpins it."""
        address = memory.ctypes.data

        def undo() -> None:
            with self.lock:
                self.registrations.append(-1)
                self._expect_unused(self._registered.pop(address), "unpinned", "that")

        with self.lock:
            self.registrations.append(1)
            assert address not in self._registered, "pinned twice"
            name = f"registered memory of {memory.nbytes} bytes"
            self._registered[address] = Piece(name, "registered", torch.from_numpy(memory), None)
        return undo

    def refill(self, address: int) -> None:
        """Record that a process fills the registered memory at an address, from now on."""
        with self.lock:
            if address in self._registered:
                self._expect_unused(self._registered[address], "filled", "that")

    def in_use(self, kind: str) -> int:
        """Return how many pieces of a kind are referenced."""
        return sum(piece.kind == kind for piece in self._pieces.values())

    def _raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same bytes without a reference to the piece, since work of a device holds none."""
        piece = self.find(tensor)
        if piece is None or not tensor.numel():
            return tensor.clone()
        raw: Any = torch.empty(0, dtype=tensor.dtype)
        begin = (tensor.data_ptr() - piece.block.data_ptr()) // tensor.itemsize
        return raw.set_(piece.block.untyped_storage(), begin, tensor.shape, tensor.stride())  # type: ignore[no-any-return]

    # -- work ---------------------------------------------------------------------------------------------------------

    def touch(self, tensor: torch.Tensor, agent: Agent, write: bool, what: str) -> None:
        """Record that `agent` reads or writes the bytes of `tensor` as its next action."""
        with self.lock:
            piece = self.find(tensor)
            if piece is None or not tensor.numel():
                return
            if not isinstance(agent, Stream):
                agent.tick()
            elif piece.kind == "device" and not write and not piece.accesses:
                self.faults.append(f"{what} in {agent.name} reads {piece.name}, to which nothing was written")
            begin = tensor.data_ptr() - piece.block.data_ptr()
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            end = begin + (sum((length - 1) * step for length, step in steps) + 1) * tensor.itemsize
            new = Access(agent, agent.clock[agent.number], begin, end, write, what)
            for old in piece.accesses:
                ordered = agent.clock.get(old.agent.number, 0) >= old.tick
                if (write or old.write) and old.begin < end and begin < old.end and not ordered:
                    self.faults.append(f"{piece.name}: nothing orders {old} and {new}")
            if write:
                piece.accesses = [old for old in piece.accesses if old.begin < begin or end < old.end]
            piece.accesses.append(new)

    def give(
        self,
        what: str,
        seconds: float,
        work: Callable[[], object],
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Submit work to the current stream, which executes it later."""
        with self.lock:
            if not getattr(self._local, "bound", False):
                self.faults.append(f"{what}: {self.here.name} is not bound to the device")
            stream = self.current
            stream.meet(self.here.stamp())
            stream.tick()
            stream.time += seconds
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self.touch(tensor, stream, write, what)
            self.queue(stream, work)

    def queue(self, stream: Stream, work: Callable[[], object]) -> None:
        stream.work.append(work)
        stream.given += 1
        while self._chance.random() < 0.5:
            late = self._chance.choice(self.streams)
            self._run(late, min(late.given, late.done + 1))

    def _run(self, stream: Stream, number: int) -> None:
        """Execute the work of the stream up to `number`, and the work of others that it waits for."""
        with self.lock:
            while stream.done < number:
                stream.done += 1
                stream.work.popleft()()

    def run_behind(self, stream: Stream, number: int) -> None:
        self._run(stream, number)

    # -- what a training loop does ------------------------------------------------------------------------------------

    def use(self, tensor: torch.Tensor, expected: torch.Tensor | None = None, seconds: float = 0.0) -> None:
        """Run a training step: reads a tensor in the current stream; unexpected values are a fault."""
        raw, stream = self._raw(tensor), self.current

        def look() -> None:
            if expected is not None and not torch.equal(as_bytes(raw), as_bytes(expected)):
                self.faults.append(f"wrong data: {stream.name} found {raw} where {expected} should be")

        self.give("a step", seconds, look, reads=[tensor])

    def compute(self, tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Apply `function` to a tensor in the current stream, in new memory of the device."""
        example = function(torch.zeros(tensor.shape, dtype=tensor.dtype))
        memory = self.backend.empty(max(256, example.nbytes))
        result: Any = torch.empty(0, dtype=example.dtype)
        result.set_(memory.untyped_storage(), 0, example.shape, example.stride())
        source, target = self._raw(tensor), self._raw(result)
        self.give("a transform", 0.0, lambda: target.copy_(function(source)), reads=[tensor], writes=[result])
        return result  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """Wait in this thread until the current stream has done all its work."""
        event = Event(self)
        event.record(self.current)
        event.synchronize()

    def check(self) -> None:
        """Execute the work of all streams; fails if there were faults."""
        for stream in self.streams:
            self._run(stream, stream.given)
        if self.faults:
            raise AssertionError(f"{len(self.faults)} faults: " + "\n".join(self.faults[:5]))

    @contextlib.contextmanager
    def installed(self) -> Iterator[pytest.MonkeyPatch]:
        """In this context, every new prefetcher uses this device."""
        plain = copies.is_plain
        copies._warn_of_slow.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefetcher, "find_device", lambda device: (self.backend.device, self.backend))
            patch.setattr(ahead, "SimpleQueue", partial(ClockedQueue, self))
            patch.setattr(ahead, "Items", partial(ClockedItems, self))
            patch.setattr(ahead, "threading", ClockedThreading(self))
            patch.setattr(copies, "is_plain", lambda leaf: plain(leaf) and not self.on_device(leaf))
            patch.setattr(copies, "SMALL", 1024)
            yield patch

    def on_device(self, tensor: torch.Tensor) -> bool:
        piece = self.find(tensor)
        return piece is not None and piece.kind == "device"


class FakeBackend(Cuda):
    """The simulated device. torch treats its memory as that of a CPU."""

    def __init__(self, world: World) -> None:
        self.device = torch.device("cpu")
        self._world = world

    def bind(self) -> None:
        self._world.bind()

    def new_stream(self) -> Stream:
        return self._world.stream(f"stream {len(self._world.streams)}")

    def current_stream(self) -> Stream:
        return self._world.current

    def using(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        return self._world.using(stream)

    def new_event(self) -> Event:
        return Event(self._world)

    def empty(self, size: int) -> torch.Tensor:
        return self._world.hand_out("device", size)

    def keep(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            tensor.record_stream(self.current_stream())
            return
        piece = self._world.find(tensor)
        if piece is not None and self._world.current not in (piece.owner, *piece.keepers):
            piece.keepers.append(self._world.current)

    def empty_pinned(self, size: int) -> torch.Tensor:
        return self._world.hand_out("pinned", size)

    def stage(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        world = self._world
        for tensors, write in ((sources, False), (targets, True)):
            for tensor in tensors:
                world.touch(tensor, world.here, write, "staging")
        super().stage(targets, sources)

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
        return self._world.register(memory)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        piece = self._world.find(tensor)
        return piece is not None and piece.kind != "device"

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        world = self._world
        assert self.is_pinned(source), "only out of pinned memory can be copied without waiting"
        world.copies.append(world.current.name)
        work = partial(world._raw(target).copy_, world._raw(source))
        world.give("a copy", world.copy_seconds, work, reads=[source], writes=[target])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor in the order of its positions."""
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
