"""Stamped batches, loaders with faults, and a training loop that checks each batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fakes import World

Stamped = tuple[Any, list[torch.Tensor]]
"""A batch, and what its tensors should be."""


class Trouble(Exception):
    """Return the stamp of batch `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Parcel:
    """Not a tensor: its `.to()` copies it in the current stream."""

    def __init__(self, world: World, content: torch.Tensor) -> None:
        self.world, self.content = world, content

    def to(self, device: torch.device) -> Parcel:
        return Parcel(self.world, send(self.world, self.content))


class Crate(Parcel):
    """Like a parcel, but its memory can be kept like that of tensors: it is sent in the copy stream."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Crate:
        return Crate(self.world, send(self.world, self.content))

    def record_stream(self, stream: object) -> None:
        assert stream is self.world.current
        self.world.backend.keep(self.content)


def send(world: World, content: torch.Tensor) -> torch.Tensor:
    """Return a copy on the device, made in the current stream."""
    pinned = world.backend.empty_pinned(content.nbytes).view(content.dtype)
    world.backend.stage([pinned], [content])
    sent = world.backend.empty(content.nbytes).view(content.dtype)
    world.backend.copy(sent, pinned)
    world.synchronize()  # as a copy out of memory that is not pinned
    return sent


def make_leaf(world: World, kind: str, length: int, stamp: int) -> tuple[Any, torch.Tensor]:
    """A batch of a loader, and its expected values."""
    value = torch.arange(length, dtype=torch.int32) * 1009 + stamp
    if kind == "scalar":
        value = torch.tensor(float(stamp))
    elif kind == "strided":
        value = value.repeat(2, 1).t()
    elif kind == "bytes":
        value = value.to(torch.uint8)
    if kind == "lent" and length:
        return world.lend(value), value.clone()
    if kind == "parcel":
        return Parcel(world, value), value.clone()
    if kind == "crate":
        return Crate(world, value), value.clone()
    return value, value.clone()


def make(world: World, structure: Any, scale: int, stamp: int) -> Stamped:
    """Return a batch of a structure: nested dicts, lists and tuples of (kind of leaf, length)."""
    expected: list[torch.Tensor] = []

    def walk(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: walk(value) for key, value in part.items()}
        if isinstance(part, list):
            return [walk(value) for value in part]
        if isinstance(part, tuple) and not (part and isinstance(part[0], str)):
            return tuple(walk(value) for value in part)
        kind, length = part
        leaf, value = make_leaf(world, kind, length * scale, stamp * 97 + len(expected))
        expected.append(value)
        return leaf

    return walk(structure), expected


def leaves_of(batch: Any) -> list[Any]:
    """Return the leaves that `walk` put into a batch, in order."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [leaf for part in batch for leaf in leaves_of(part)]
    return [batch]


@dataclass(frozen=True)
class Order:
    """A batch that a loader must deliver.

    Attributes:
        structure, scale: as `make` takes them.
        trouble: "" or where it ends: "loader", "transform", or "memory" (the next piece of memory is refused).
    """

    structure: Any
    scale: int = 1
    trouble: str = ""


class Loader:
    """Delivers the batches of its orders, and continues after its errors.

    Attributes:
        made: what each batch should be, by its stamp.
    """

    def __init__(self, world: World, orders: Sequence[Order]) -> None:
        self.world, self.orders = world, orders
        self.made: dict[int, list[torch.Tensor]] = {}
        self._refused = threading.local()
        self._plain = world.backend.empty

    def __len__(self) -> int:
        return len(self.orders)

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self)

    def give(self, number: int) -> Any:
        order = self.orders[number]
        self._refused.number = number if order.trouble == "memory" else None
        if order.trouble == "loader":
            raise Trouble(number)
        stamp = len(self.made)
        batch, self.made[stamp] = make(self.world, order.structure, order.scale, stamp)
        return {"number": number, "stamp": stamp, "data": batch}

    def empty(self, size: int) -> torch.Tensor:
        """Replaces the method of the backend."""
        number, self._refused.number = getattr(self._refused, "number", None), None
        if number is not None:
            raise Trouble(number)
        return self._plain(size)

    def transform(self, batch: Any) -> Any:
        """A transform on the device: doubles each number, in new memory; `doubled` gives the expected values."""
        if self.orders[batch["number"]].trouble == "transform":
            raise Trouble(batch["number"])
        data = [
            leaf if isinstance(leaf, Parcel) or not leaf.numel() else self.world.compute(leaf, doubled)
            for leaf in leaves_of(batch["data"])
        ]
        return batch | {"data": data}


class _Pass:
    def __init__(self, loader: Loader) -> None:
        self._loader, self._number = loader, -1

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        self._number += 1
        if self._number >= len(self._loader):
            raise StopIteration
        return self._loader.give(self._number)


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@dataclass
class Loop:
    """A training loop.

    Args:
        world: in which it runs.
        loader: whose batches are expected.
        habits: what it does with a batch, in turn: "" only to use it, "wait" for the step as well, "leave" for
            another stream, "move" there with the batch, "hold" the batch and use it again when all is over.
        changed: whether `Loader.transform` was called.
        seconds: that a step takes.

    Attributes:
        seen: numbers of the batches, and the errors.
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
                self._do(batch, self.habits[len(self.seen) % len(self.habits)])
                del batch
        with self.world.using(self._streams[0]):
            del iterator  # which gives its last batch back in the stream that is current here

    def _do(self, batch: Any, habit: str) -> None:
        world = self.world
        self._use(batch)
        if habit == "hold":
            self._held.append(batch)
        elif habit == "wait":
            world.synchronize()
        elif habit == "leave":
            self._streams.reverse()
        elif habit == "move":
            event = world.backend.new_event()
            event.record(world.current)
            self._streams.reverse()
            with world.using(self._streams[0]):
                world.current.wait_event(event)
                self._use(batch)
                for leaf in leaves_of(batch["data"]):
                    world.backend.keep(leaf.content if isinstance(leaf, Parcel) else leaf)

    def _use(self, batch: Any) -> None:
        expected = self.loader.made[batch["stamp"]]
        found = leaves_of(batch["data"])
        assert len(found) == len(expected)
        for leaf, value in zip(found, expected, strict=True):
            if isinstance(leaf, Parcel):
                leaf = leaf.content
            elif self.changed and value.numel():
                value = doubled(value)
            assert (leaf.dtype, leaf.shape) == (value.dtype, value.shape)
            self.world.use(leaf, value, self.seconds)

    def end(self) -> None:
        """Use the held batches once more, and drop them."""
        event = self.world.backend.new_event()
        with self.world.using(self._streams[0]):
            event.record(self.world.current)
        with self.world.using(self.world.main):
            self.world.current.wait_event(event)
            for batch in self._held:
                self._use(batch)
                for leaf in leaves_of(batch["data"]):
                    self.world.backend.keep(leaf.content if isinstance(leaf, Parcel) else leaf)
        self._held.clear()
