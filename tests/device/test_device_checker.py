"""All accesses of a prefetcher to the same memory are ordered, as checked with vector clocks and by the data."""

import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import Event, Stream, World, prefetching
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree.device import copies
from stallfree.device.copies import BatchBuffer, Copier, Sent
from stallfree.device.prefetcher import DevicePrefetcher

pytestmark = pytest.mark.filterwarnings("ignore:a Parcel is sent:RuntimeWarning")
Leaf = tuple[str, int]  # the kind of a leaf of a batch, and its length


class Trouble(Exception):
    """An error in the place of a batch, whose number is its argument."""


class Parcel:
    """Not a tensor: its `.to()` copies it in the current stream."""

    def __init__(self, world: World, content: torch.Tensor) -> None:
        self.world, self.content = world, content

    def to(self, device: torch.device) -> Any:
        world, content = self.world, self.content
        pinned, sent = (empty(content.nbytes).view(content.dtype) for empty in (world.empty_pinned, world.empty))
        world.stage([pinned], [content])
        world.copy(sent, pinned)
        world.synchronize()  # as a copy out of memory that is not pinned
        return type(self)(world, sent)


class Crate(Parcel):
    """Like a parcel, but its memory can be kept like that of tensors: it is sent in the copy stream."""

    def record_stream(self, stream: object) -> None:
        assert stream is self.world.current_stream()
        self.world.keep(self.content)


KINDS: dict[str, Callable[[World, torch.Tensor], Any]] = {
    "plain": lambda world, value: value.clone(), "lent": World.lend, "parcel": Parcel, "crate": Crate,
}  # fmt: skip


@dataclass(frozen=True)
class Order:
    """A batch that a loader must deliver."""

    leaves: list[Leaf]
    trouble: str = ""  # where it ends: "loader", "transform", or "memory" (the next piece of memory is refused)


class Loader:
    """Delivers the batches of its orders with their expected values, and continues after its errors."""

    def __init__(self, world: World) -> None:
        self.world, self.orders = world, list[Order]()
        self._refused, self._empty, self._made = threading.local(), world.empty, 0

    def __iter__(self) -> Iterator[Any]:
        return map(self.give, range(len(self.orders)))  # goes on after an error

    def give(self, number: int) -> Any:
        order = self.orders[number]
        self._refused.number = number if order.trouble == "memory" else None
        if order.trouble == "loader":
            raise Trouble(number)
        self._made += 1
        values = [torch.arange(length) * 1009 + 97 * self._made + at for at, (_, length) in enumerate(order.leaves)]
        leaves = [KINDS[kind](self.world, value) for value, (kind, _) in zip(values, order.leaves, strict=True)]
        return {"number": number, "leaves": leaves, "expected": SimpleNamespace(values=values)}

    def empty(self, size: int) -> torch.Tensor:
        number, self._refused.number = getattr(self._refused, "number", None), None
        if number is not None:
            raise Trouble(number)
        return self._empty(size)

    def transform(self, batch: Any) -> Any:
        """A transform on the device: negates each tensor, in new memory."""
        if self.orders[batch["number"]].trouble == "transform":
            raise Trouble(batch["number"])
        leaves, values = list(batch["leaves"]), list(batch["expected"].values)
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.numel():
                leaves[at], values[at] = self.world.compute(leaf, torch.neg), -values[at]
        return batch | {"leaves": leaves, "expected": SimpleNamespace(values=values)}


class Loop:
    """A training loop. What it does with a batch, in turn: only use it (""), "wait" for the step as well, "move" to
    another stream with the batch, or "hold" the batch and use it again when all is over.
    """

    def __init__(self, world: World, habits: tuple[str, ...], seconds: float) -> None:
        self.world, self.habits, self.seconds = world, habits, seconds
        self.streams, self._held = [world.main, world.new_stream()], list[Any]()

    def run(self, prefetcher: Any, end: int | None) -> list[tuple[int, bool]]:
        """Run one epoch; break after `end` batches and errors. Return the numbers, and whether each is an error's."""
        seen: list[tuple[int, bool]] = []
        iterator = iter(prefetcher)
        while end is None or len(seen) < end:
            with self.world.using(self.streams[0]):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return seen
                except Trouble as error:
                    seen.append((error.args[0], True))
                    continue
                seen.append((batch["number"], False))
                habit = self.habits[len(seen) % len(self.habits)]
                self._use(batch)
                if habit == "hold":
                    self._held.append(batch)
                elif habit == "wait":
                    self.world.synchronize()
                elif habit == "move":
                    self.streams.reverse()
                    self._use_again(batch, self.streams[1], self.streams[0])
                del batch
        with self.world.using(self.streams[0]):
            del iterator  # which gives its last batch back in the stream that is current here
        return seen

    def _use(self, batch: Any) -> None:
        for leaf, value in zip(batch["leaves"], batch["expected"].values, strict=True):
            tensor = leaf.content if isinstance(leaf, Parcel) else leaf
            assert (tensor.dtype, tensor.shape) == (value.dtype, value.shape)
            self.world.use(tensor, value, self.seconds)

    def _use_again(self, batch: Any, before: Stream, stream: Stream) -> None:
        event = Event(self.world)
        event.record(before)
        with self.world.using(stream):
            stream.wait_event(event)
            self._use(batch)
            for leaf in batch["leaves"]:
                self.world.keep(leaf.content if isinstance(leaf, Parcel) else leaf)

    def end(self) -> None:
        while self._held:
            self._use_again(self._held.pop(0), self.streams[0], self.world.main)


@dataclass(frozen=True)
class Scene:
    """A simulated device, a loader and a training loop."""

    epochs: list[tuple[list[Order], int | None]]  # what the loader delivers, and after how many the loop breaks off
    depth: int = 2
    transform: bool = False
    nested: bool = False  # whether the loader is a prefetcher, too
    habits: tuple[str, ...] = ("",)
    copy: float = 0.01  # seconds of a copy
    step: float = 0.02
    seed: int = 0  # says how late streams are

    def play(self, change: Callable[[pytest.MonkeyPatch, World], object] | None = None) -> World:
        """Run it with a change of the code; its faults are in the world's `faults`."""
        world = World(self.seed, self.copy)
        with world.installed() as patch:
            if change is not None:
                change(patch, world)
            loader, loop = Loader(world), Loop(world, self.habits, self.step)
            patch.setattr(world, "empty", loader.empty)
            inner: Any = DevicePrefetcher(loader, "cuda", 1) if self.nested else loader
            transform = loader.transform if self.transform else None
            prefetcher = DevicePrefetcher(inner, "cuda", self.depth, transform_on_device=transform)
            for orders, end in self.epochs:
                loader.orders = orders
                seen = loop.run(prefetcher, end)
                assert len(seen) == min(len(orders), len(orders) if end is None else end)
                assert [number for number, _ in seen] == list(range(len(seen)))
                for (_, failed), order in zip(seen, orders, strict=False):
                    assert failed == bool(order.trouble) or order.trouble == "memory"  # which need not be asked for
            assert len(prefetching()) <= 1 or self.nested, "an ended iteration leaves no thread"
            assert len({stream for stream in world.copies if stream not in loop.streams}) <= 1 + self.nested
            prefetcher.close()
            getattr(inner, "close", int)()
            del prefetcher, inner, transform
            loop.end()
            patch.undo()
            del loader, loop
        if world.in_use("device", "pinned", "lent"):
            gc.collect()  # exceptions with their tracebacks
        return world


LEAVES = st.tuples(st.sampled_from(["plain", "lent", "plain", "lent", "parcel", "crate"]), st.integers(1, 500))
BATCHES = st.lists(LEAVES | st.just(("plain", 0)), max_size=5)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    transform = draw(st.booleans())
    troubles = ["", "", "", "", "", "loader", "memory", *(["transform"] if transform else [])]
    leaves = st.sampled_from(draw(st.lists(BATCHES, min_size=1, max_size=3)))
    orders = st.lists(st.builds(Order, leaves, st.sampled_from(troubles)), max_size=7)
    return Scene(
        draw(st.lists(st.tuples(orders, st.none() | st.integers(0, 5)), min_size=1, max_size=3)),
        draw(st.integers(1, 3)), transform, draw(st.booleans()),
        tuple(draw(st.lists(st.sampled_from(["", "", "wait", "move", "hold"]), min_size=1, max_size=4))),
        draw(st.sampled_from([0.0, 0.01])), draw(st.sampled_from([0.0, 0.03])), draw(st.integers(0, 1 << 30)),
    )  # fmt: skip


@pytest.mark.parametrize("count", [25, pytest.param(2000, marks=pytest.mark.slow)])
def test_all_that_touches_the_same_memory_is_ordered_and_every_batch_is_exact(count: int) -> None:
    @given(scenes())
    @settings(max_examples=count)
    def holds(scene: Scene) -> None:
        world = scene.play()
        world.check()
        assert not world.in_use("device", "pinned", "lent")

    holds()


PLAIN = [([Order([("plain", 450), ("plain", 4)])] * 8, None)]
LENT = [([Order([("lent", 450)])] * 8, None)]
FAILING = [([Order([("plain", 450)], "transform" if number == 3 else "") for number in range(8)], None)]


def without(name: str, caller: str, owner: Any = None) -> Callable[[pytest.MonkeyPatch, World], None]:
    """Omit the calls of the method `name` of the owner, by default the device, by the function `caller`."""

    def change(patch: pytest.MonkeyPatch, world: World) -> None:
        plain = getattr(owner or world, name)

        def skip(*arguments: Any) -> Any:
            if sys._getframe(1).f_code.co_name != caller:
                return plain(*arguments)
            return nullcontext()

        patch.setattr(owner or world, name, skip)

    return change


def replaced(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch, World], None]:
    return lambda patch, world: patch.setattr(owner, name, value)


def transform_after_the_record(patch: pytest.MonkeyPatch, world: World) -> None:
    """Record `copied` when the copies are submitted, not after the transform."""
    plain = Copier._send

    def send(copier: Copier, buffer: BatchBuffer, *parts: Any) -> Sent:
        sent = plain(copier, buffer, *parts)
        RECORD(buffer.copied, world.current_stream())
        return sent

    patch.setattr(Copier, "_send", send)
    without("record", "send", Event)(patch, world)


RECORD = Event.record
STAGED_TWICE = r"nothing orders the read .* \(a copy\) and the write .* \(staging\)"
READ_TOO_SOON = r"nothing orders the write .* \(a copy\) and the read .* \(a step\)"
DEVICE_FREED = r"^device memory .* is freed too early: nothing orders the read .* \(a step\)"
LENT_FREED = r"^lent memory .* is freed too early: nothing orders the read .* \(a copy\)"
GUARDS: dict[str, tuple[Scene, Callable[[pytest.MonkeyPatch, World], None], str]] = {
    "the host waits for the copies before it fills pinned memory":
        (Scene(PLAIN), without("synchronize", "_send", Event), STAGED_TWICE),
    "the training waits for the copies":
        (Scene(PLAIN), without("wait_event", "deliver", Stream), READ_TOO_SOON),
    "a batch is kept for the training":
        (Scene(PLAIN), without("keep", "deliver"), DEVICE_FREED),
    "what the loader gave stays until it is copied":
        (Scene(LENT), replaced(BatchBuffer, "held", property(lambda buffer: None, lambda *_: None)), LENT_FREED),
    "copies are marked when the rest has failed":
        (Scene(FAILING, transform=True, step=0.0),
         replaced(Event, "record", lambda *given: None if sys.exc_info()[0] else RECORD(*given)), STAGED_TWICE),
    "a transform is part of what the training waits for":
        (Scene(PLAIN, transform=True), transform_after_the_record, r"nothing orders the write .* \(a transform\)"),
    "what a transform made is kept for the training":
        (Scene(PLAIN, transform=True), replaced(copies, "memory_of", lambda leaf: []), DEVICE_FREED),
    "the thread is bound to the device":
        (Scene(PLAIN), without("bind", "_run"), "is not bound"),
}  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_is_missed(guard: str) -> None:
    scene, change, fault = GUARDS[guard]
    scene.play().check()
    with pytest.raises(AssertionError) as caught:
        scene.play(change).check()
    assert re.search(fault, str(caught.value), re.MULTILINE), caught.value
