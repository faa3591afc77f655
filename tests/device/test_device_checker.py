"""All accesses of a prefetcher to the same memory are ordered, as checked with vector clocks and by the data."""

import gc
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from device_cases import Leaf, Loader, Loop, Order
from device_clocks import Event, Stream
from fakes import World
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree.device import copies
from stallfree.device.copies import BatchBuffer, Copier, Sent
from stallfree.device.prefetcher import DevicePrefetcher

pytestmark = pytest.mark.filterwarnings("ignore:a Parcel is sent:RuntimeWarning")


@dataclass(frozen=True)
class Scene:
    """A simulated device, a loader and a training loop.

    `epochs` has the orders of the loader and after how many batches the loop breaks off; with `nested`, the loader is a
    prefetcher, too; copies and steps take `copy` and `step` seconds; `seed` says how late streams are.
    """

    epochs: list[tuple[list[Order], int | None]] = field(default_factory=list)
    depth: int = 2
    transform: bool = False
    nested: bool = False
    habits: tuple[str, ...] = ("",)
    copy: float = 0.01
    step: float = 0.02
    seed: int = 0

    def play(self, change: Callable[[pytest.MonkeyPatch, World], object] | None = None) -> World:
        """Run it with a change of the code; its faults are in the world's `faults`."""
        world = World(self.seed, self.copy)
        with world.installed() as patch:
            if change is not None:
                change(patch, world)
            loader = Loader(world, [])
            patch.setattr(world.backend, "empty", loader.empty)
            inner = DevicePrefetcher(loader, "cuda", 1) if self.nested else loader
            transform = loader.transform if self.transform else None
            prefetcher = DevicePrefetcher(inner, "cuda", self.depth, transform_on_device=transform)
            loop = Loop(world, loader, self.habits, self.transform, self.step)
            for orders, end in self.epochs:
                loader.orders = orders
                loop.run(prefetcher, end)
                self.compare(loop.seen, orders, end)
            prefetcher.close()
            if isinstance(inner, DevicePrefetcher):
                inner.close()
            del prefetcher, inner, transform
            loop.end()
            patch.undo()
            del loader, loop
        if any(world.in_use(kind) for kind in ("device", "pinned", "lent")):
            gc.collect()  # exceptions with their tracebacks
        return world

    def compare(self, seen: list[int | tuple[str, int]], orders: list[Order], end: int | None) -> None:
        """The expected batches and errors, in order."""
        assert len(seen) == min(len(orders), len(orders) if end is None else end)
        for number, (found, order) in enumerate(zip(seen, orders, strict=False)):
            if order.trouble in ("loader", "transform"):
                assert found == ("error", number)
            elif order.trouble == "memory":  # it need not be asked for
                assert found in (number, ("error", number))
            else:
                assert found == number


# -- ours is right ----------------------------------------------------------------------------------------------------

LEAVES = st.builds(
    Leaf,
    st.sampled_from(["plain", "plain", "lent", "lent", "scalar", "strided", "bytes", "parcel", "crate"]),
    st.sampled_from([1, 3, 60, 300, 1000]),
) | st.just(Leaf("plain", 0))
STRUCTURES = st.recursive(
    LEAVES,
    lambda part: (
        st.lists(part, max_size=3) | st.lists(part, max_size=3).map(tuple) | st.dictionaries(st.integers(0, 9), part)
    ),
    max_leaves=5,
)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    transform = draw(st.booleans())
    troubles = ["", "", "", "", "", "loader", "memory", *(["transform"] if transform else [])]
    orders = st.builds(
        Order, draw(st.just(STRUCTURES)), scale=st.sampled_from([1, 1, 2, 5]), trouble=st.sampled_from(troubles)
    )
    habits = ["", "", "wait", "move", "hold"]
    return Scene(
        draw(st.lists(st.tuples(st.lists(orders, max_size=7), st.none() | st.integers(0, 5)), min_size=1, max_size=3)),
        draw(st.integers(1, 3)),
        transform,
        draw(st.booleans()),
        tuple(draw(st.lists(st.sampled_from(habits), min_size=1, max_size=4))),
        draw(st.sampled_from([0.0, 0.01])),
        draw(st.sampled_from([0.0, 0.03])),
        draw(st.integers(0, 1 << 30)),
    )


@pytest.mark.parametrize("count", [25, pytest.param(2000, marks=pytest.mark.slow)])
def test_all_that_touches_the_same_memory_is_ordered_and_every_batch_is_exact(count: int) -> None:
    @given(scenes())
    @settings(max_examples=count)
    def holds(scene: Scene) -> None:
        world = scene.play()
        world.check()
        assert [world.in_use(kind) for kind in ("device", "pinned", "lent")] == [0, 0, 0]

    holds()


# -- and each guard is needed -----------------------------------------------------------------------------------------

PLAIN = [([Order({"images": Leaf("plain", 900), "labels": Leaf("plain", 8)})] * 8, None)]
LENT = [([Order([Leaf("lent", 900)])] * 8, None)]
FAILING = [([Order([Leaf("plain", 900)], trouble="transform" if number == 3 else "") for number in range(8)], None)]


def without(name: str, caller: str, owner: Any = None) -> Callable[[pytest.MonkeyPatch, World], None]:
    """Omit the calls of the method `name` of the owner, by default the backend, by the function `caller`."""

    def change(patch: pytest.MonkeyPatch, world: World) -> None:
        plain = getattr(owner or world.backend, name)

        def skip(*arguments: Any) -> Any:
            if sys._getframe(1).f_code.co_name != caller:
                return plain(*arguments)
            return nullcontext()

        patch.setattr(owner or world.backend, name, skip)

    return change


def hold_nothing(patch: pytest.MonkeyPatch, world: World) -> None:
    """Release the leaves of the loader as soon as their copies are submitted."""
    patch.setattr(BatchBuffer, "held", property(lambda buffer: None, lambda buffer, leaves: None))


def forget_copies_of_failures(patch: pytest.MonkeyPatch, world: World) -> None:
    """Do not record `copied` if an error occurred."""
    plain = Event.record
    patch.setattr(Event, "record", lambda event, stream: None if sys.exc_info()[0] else plain(event, stream))


def transform_after_the_record(patch: pytest.MonkeyPatch, world: World) -> None:
    """Record `copied` when the copies are submitted, not after the transform."""
    plain, record = Copier._send, Event.record

    def send(copier: Copier, buffer: BatchBuffer, *parts: Any) -> Sent:
        sent = plain(copier, buffer, *parts)
        record(buffer.copied, world.current)
        return sent

    patch.setattr(Copier, "_send", send)
    without("record", "send", Event)(patch, world)


def forget_what_was_transformed(patch: pytest.MonkeyPatch, world: World) -> None:
    """Keep only the copies for the consumer's stream, not the outputs of the transform."""
    patch.setattr(copies, "memory_of", lambda leaf: [])


STAGED_TWICE = r"nothing orders the read .* \(a copy\) and the write .* \(staging\)"
READ_TOO_SOON = r"nothing orders the write .* \(a copy\) and the read .* \(a step\)"
DEVICE_FREED = r"^device memory .* is freed too early: nothing orders the read .* \(a step\)"
LENT_FREED = r"^lent memory .* is freed too early: nothing orders the read .* \(a copy\)"
GUARDS: dict[str, tuple[Scene, Callable[[pytest.MonkeyPatch, World], None], str]] = {
    "the host waits for the copies before it fills pinned memory": (
        Scene(PLAIN), without("synchronize", "_send", Event), STAGED_TWICE,
    ),
    "the training waits for the copies": (
        Scene(PLAIN), without("wait_event", "deliver", Stream), READ_TOO_SOON,
    ),
    "a batch is kept for the training": (
        Scene(PLAIN), without("keep", "deliver"), DEVICE_FREED,
    ),
    "what the loader gave stays until it is copied": (
        Scene(LENT), hold_nothing, LENT_FREED,
    ),
    "copies are marked when the rest has failed": (
        Scene(FAILING, transform=True, step=0.0), forget_copies_of_failures, STAGED_TWICE,
    ),
    "a transform is part of what the training waits for": (
        Scene(PLAIN, transform=True), transform_after_the_record, r"nothing orders the write .* \(a transform\)",
    ),
    "what a transform made is kept for the training": (
        Scene(PLAIN, transform=True), forget_what_was_transformed, DEVICE_FREED,
    ),
    "the thread is bound to the device": (
        Scene(PLAIN), without("bind", "_run"), "is not bound",
    ),
}  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_is_missed(guard: str) -> None:
    scene, change, fault = GUARDS[guard]
    scene.play().check()
    with pytest.raises(AssertionError) as caught:
        scene.play(change).check()
    assert re.search(fault, str(caught.value), re.MULTILINE), caught.value
