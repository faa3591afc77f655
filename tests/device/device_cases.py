"""Loaders of stamped batches with faults, and a training loop that checks each batch."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from device_clocks import Event
from fakes import World


class Trouble(Exception):
    """An error in the place of batch `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Parcel:
    """Not a tensor: its `.to()` copies it in the current stream."""

    def __init__(self, world: World, content: torch.Tensor) -> None:
        self.world, self.content = world, content

    def to(self, device: torch.device) -> Any:
        backend, content = self.world.backend, self.content
        pinned = backend.empty_pinned(content.nbytes).view(content.dtype)
        backend.stage([pinned], [content])
        sent = backend.empty(content.nbytes).view(content.dtype)
        backend.copy(sent, pinned)
        self.world.synchronize()  # as a copy out of memory that is not pinned
        return type(self)(self.world, sent)


class Crate(Parcel):
    """Like a parcel, but its memory can be kept like that of tensors: it is sent in the copy stream."""

    def record_stream(self, stream: object) -> None:
        assert stream is self.world.current
        self.world.backend.keep(self.content)


def make_leaf(world: World, kind: str, length: int, stamp: int) -> tuple[Any, torch.Tensor]:
    """Return a leaf of a batch, and its expected values."""
    value = torch.arange(length, dtype=torch.int32) * 1009 + stamp
    if kind == "scalar":
        value = torch.tensor(float(stamp))
    elif kind == "strided":
        value = value.repeat(2, 1).t()
    elif kind == "bytes":
        value = value.to(torch.uint8)
    if kind == "lent" and length:
        return world.lend(value), value.clone()
    kinds: dict[str, Any] = {"parcel": Parcel, "crate": Crate}
    return kinds[kind](world, value) if kind in kinds else value, value.clone()


def leaves_of(batch: Any) -> list[Any]:
    """Return the leaves of nested dicts, lists and tuples, in order. A named tuple is one."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if type(batch) in (list, tuple):
        return [leaf for part in batch for leaf in leaves_of(part)]
    return [batch]


class Leaf(NamedTuple):
    kind: str
    length: int


@dataclass(frozen=True)
class Order:
    """A batch that a loader must deliver: nested dicts, lists and tuples of `Leaf`.

    `trouble` is "" or where it ends: "loader", "transform", or "memory" (the next piece of memory is refused).
    """

    structure: Any
    scale: int = 1
    trouble: str = ""


class Loader:
    """Delivers the batches of its orders, and continues after its errors; `made` has the expected values by stamp."""

    def __init__(self, world: World, orders: Sequence[Order]) -> None:
        self.world, self.orders = world, orders
        self.made: dict[int, list[torch.Tensor]] = {}
        self._refused = threading.local()
        self._plain = world.backend.empty

    def __iter__(self) -> Any:
        return map(self.give, range(len(self.orders)))  # goes on after an error

    def give(self, number: int) -> Any:
        order, stamp = self.orders[number], len(self.made)
        self._refused.number = number if order.trouble == "memory" else None
        if order.trouble == "loader":
            raise Trouble(number)
        expected = self.made[stamp] = []

        def walk(part: Any) -> Any:
            if isinstance(part, dict):
                return {key: walk(value) for key, value in part.items()}
            if not isinstance(part, Leaf):
                return type(part)(map(walk, part))
            leaf, value = make_leaf(self.world, part.kind, part.length * order.scale, stamp * 97 + len(expected))
            expected.append(value)
            return leaf

        return {"number": number, "stamp": stamp, "data": walk(order.structure)}

    def empty(self, size: int) -> torch.Tensor:
        """Replaces the method of the backend."""
        number, self._refused.number = getattr(self._refused, "number", None), None
        if number is not None:
            raise Trouble(number)
        return self._plain(size)

    def transform(self, batch: Any) -> Any:
        """A transform on the device: doubles each number, in new memory."""
        if self.orders[batch["number"]].trouble == "transform":
            raise Trouble(batch["number"])
        data = [
            leaf if isinstance(leaf, Parcel) or not leaf.numel() else self.world.compute(leaf, doubled)
            for leaf in leaves_of(batch["data"])
        ]
        return batch | {"data": data}


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@dataclass
class Loop:
    """A training loop.

    Args:
        habits: what it does with a batch, in turn: "" only to use it, "wait" for the step as well, "move" to another
            stream with the batch, "hold" the batch and use it again when all is over.
        changed: whether `Loader.transform` was called.
        seconds: that a step takes.
    """

    world: World
    loader: Loader
    habits: Sequence[str] = ("",)
    changed: bool = False
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.seen: list[int | tuple[str, int]] = []
        self._streams = [self.world.main, self.world.stream("the other stream")]
        self._held: list[Any] = []

    def run(self, prefetcher: Any, end: int | None = None) -> None:
        """Run one epoch; break after `end` batches and errors."""
        self.seen = []
        iterator = iter(prefetcher)
        while end is None or len(self.seen) < end:
            with self.world.using(self._streams[0]):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                except Trouble as error:
                    self.seen.append(("error", error.number))
                    continue
                self.seen.append(batch["number"])
                habit = self.habits[len(self.seen) % len(self.habits)]
                self._use(batch)
                if habit == "hold":
                    self._held.append(batch)
                elif habit == "wait":
                    self.world.synchronize()
                elif habit == "move":
                    self._streams.reverse()
                    self._use_again(batch, self._streams[1], self._streams[0])
                del batch
        with self.world.using(self._streams[0]):
            del iterator  # which gives its last batch back in the stream that is current here

    def _use(self, batch: Any) -> None:
        leaves, expected = leaves_of(batch["data"]), self.loader.made[batch["stamp"]]
        for leaf, value in zip(leaves, expected, strict=True):
            if isinstance(leaf, Parcel):
                leaf = leaf.content
            elif self.changed and value.numel():
                value = doubled(value)
            assert (leaf.dtype, leaf.shape) == (value.dtype, value.shape)
            self.world.use(leaf, value, self.seconds)

    def _use_again(self, batch: Any, before: Any, stream: Any) -> None:
        """Use a batch in a stream, after what another stream has done."""
        event = Event(self.world)
        event.record(before)
        with self.world.using(stream):
            stream.wait_event(event)
            self._use(batch)
            for leaf in leaves_of(batch["data"]):
                self.world.backend.keep(leaf.content if isinstance(leaf, Parcel) else leaf)

    def end(self) -> None:
        """Use the held batches once more, and drop them."""
        while self._held:
            self._use_again(self._held.pop(0), self._streams[0], self.world.main)
