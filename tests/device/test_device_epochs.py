"""Epochs of a prefetcher: their ends, errors, remaining resources, and states."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes import World

import stallfree as sf
from stallfree.device.prefetcher import DevicePrefetcher


@pytest.fixture
def world() -> Iterator[World]:
    """A device used by every prefetcher of the test."""
    made = World()
    with made.installed():
        yield made
    made.check()


def batches(count: int) -> list[torch.Tensor]:
    return [torch.tensor([number, number]) for number in range(count)]


def numbers(world: World, prefetcher: Any, end: int | None = None) -> list[int]:
    """Return the batches of an epoch, or the first `end` of them."""
    found: list[int] = []
    for batch in prefetcher:
        world.synchronize()
        found.append(int(batch[0]))
        if len(found) == end:
            break
    return found


def prefetching() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "prefetch" in thread.name]


# -- epochs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "depth"), [(0, 2), (1, 1), (2, 5), (9, 1), (9, 2)])
def test_every_epoch_gives_every_batch_in_order(world: World, count: int, depth: int) -> None:
    prefetcher = DevicePrefetcher(batches(count), "cuda", depth)
    for _ in range(3):
        assert numbers(world, prefetcher) == list(range(count))
    assert len(prefetcher) == count
    prefetcher.close()


def test_one_stream_serves_all_epochs(world: World) -> None:
    prefetcher = DevicePrefetcher(batches(3), "cuda")
    for _ in range(4):
        numbers(world, prefetcher)
    prefetcher.close()
    assert len(world.streams) == 2
    assert len(set(world.copies)) == 1


def test_close_ends_the_epoch_and_may_be_called_again(world: World) -> None:
    prefetcher = DevicePrefetcher(batches(5), "cuda")
    prefetcher.close()
    iterator = iter(prefetcher)
    next(iterator)
    assert prefetching()
    for _ in range(2):
        prefetcher.close()
        assert not prefetching()
    with pytest.raises(StopIteration):
        next(iterator)
    assert numbers(world, prefetcher) == [0, 1, 2, 3, 4]
    prefetcher.close()


@pytest.mark.parametrize("end", [None, 2])
def test_a_generator_is_closed_and_the_thread_ends_when_nobody_asks_any_more(world: World, end: int | None) -> None:
    closed = threading.Event()

    def generate() -> Iterator[torch.Tensor]:
        try:
            yield from batches(50)
        finally:
            closed.set()

    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return generate()

    prefetcher = DevicePrefetcher(Loader(), "cuda")
    gone = weakref.ref(prefetcher)
    numbers(world, prefetcher, end)
    del prefetcher  # nobody closes it
    assert closed.wait(60)
    gc.collect()
    assert gone() is None


def test_a_batch_may_be_kept(world: World) -> None:
    prefetcher = DevicePrefetcher(batches(4), "cuda")
    held = [(batch, world.synchronize())[0] for batch in prefetcher]
    prefetcher.close()
    assert [int(batch[0]) for batch in held] == [0, 1, 2, 3]


# -- errors -----------------------------------------------------------------------------------------------------------


class Faulty:
    """A loader that raises in place of some batches, and continues."""

    def __init__(self, count: int, wrong: dict[int, BaseException]) -> None:
        self.count, self.wrong = count, wrong

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.number = -1
        return self

    def __next__(self) -> torch.Tensor:
        self.number += 1
        if self.number in self.wrong:
            raise self.wrong[self.number]
        if self.number == self.count:
            raise StopIteration
        return torch.tensor([self.number])


def outcomes(world: World, prefetcher: Any, most: int = 50) -> list[Any]:
    """Return the numbers of the batches of one epoch, and its errors."""
    found: list[Any] = []
    iterator = iter(prefetcher)
    while len(found) < most:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except BaseException as error:
            found.append(error)
        else:
            world.synchronize()
            found.append(int(batch[0]))
    return found


def test_an_error_says_where_in_the_loader_it_came_from(world: World) -> None:
    def generate() -> Iterator[torch.Tensor]:
        yield torch.tensor([0])
        raise ValueError("of the loader")

    prefetcher = DevicePrefetcher(generate(), "cuda")
    iterator = iter(prefetcher)
    next(iterator)
    with pytest.raises(ValueError, match="of the loader") as caught:
        next(iterator)
    assert "generate" in [frame.name for frame in caught.traceback]
    with pytest.raises(StopIteration):  # as the generator ended
        next(iterator)
    prefetcher.close()


@pytest.mark.parametrize("kind", [ValueError, StopIteration, KeyboardInterrupt])
def test_an_error_of_the_transform_costs_one_batch(world: World, kind: type[BaseException]) -> None:
    def transform(batch: torch.Tensor) -> torch.Tensor:
        if counter.pop(0):
            raise kind("of the transform")
        return batch

    counter = [False, True, True, True, True, False]
    prefetcher = DevicePrefetcher(batches(6), "cuda", transform_on_device=transform)
    found = outcomes(world, prefetcher)
    prefetcher.close()
    assert found[0] == 0
    assert found[5] == 5
    for error in found[1:5]:
        assert isinstance(error, sf.StallfreeError if kind is StopIteration else kind)


@pytest.mark.parametrize("where", ["loader", "transform"])
def test_an_error_that_is_let_go_of_holds_nothing(world: World, where: str) -> None:
    class Wrong(Exception):
        pass

    def transform(batch: torch.Tensor) -> torch.Tensor:
        raise Wrong

    def generate() -> Iterator[torch.Tensor]:
        yield torch.tensor([0])
        raise Wrong

    def first_error() -> weakref.ref[Wrong]:
        iterator = iter(prefetcher)
        try:
            while next(iterator) is not None:
                pass
        except Wrong as error:
            return weakref.ref(error)
        raise AssertionError("there was none")

    prefetcher = DevicePrefetcher(generate(), "cuda", transform_on_device=transform if where == "transform" else None)
    gc.disable()
    try:
        gone = first_error()
        prefetcher.close()
        assert gone() is None
        assert world.in_use("device") == 0
    finally:
        gc.enable()


def test_an_error_of_the_state_is_no_hang(world: World) -> None:
    class Loader(Faulty):
        def state_dict(self) -> int:
            if self.number == 2:
                raise LookupError("no state")
            return 0

    loader = Loader(4, {})
    loader.number = -1
    prefetcher = DevicePrefetcher(loader, "cuda")
    found = outcomes(world, prefetcher)
    prefetcher.close()
    assert [found[0], found[1], found[3]] == [0, 1, 3]
    assert isinstance(found[2], LookupError)


def test_an_error_of_the_device_at_the_begin_is_no_hang(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind() -> None:
        raise RuntimeError("no such device any more")

    monkeypatch.setattr(world.backend, "bind", bind)
    prefetcher = DevicePrefetcher(batches(3), "cuda")
    with pytest.raises(RuntimeError, match="any more"):
        next(iter(prefetcher))
    prefetcher.close()


def test_an_error_of_the_loader_at_the_begin_is_raised_by_iter(world: World) -> None:
    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            raise LookupError("no data")

    prefetcher = DevicePrefetcher(Loader(), "cuda")
    with pytest.raises(LookupError, match="no data"):
        iter(prefetcher)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"depth": 0}, "depth=0: give"),
    ({"depth": True}, "depth=True: give"),
    ({"depth": 1.5}, r"depth=1\.5: give"),
    ({"transform_on_device": 3}, "transform_on_device=3: give"),
    ({"loader": 3}, "the loader is a int, which cannot be iterated: give"),
    ({"device": "gpu"}, "device='gpu' is no device: give"),
    ({"device": None}, "device=None is no device: give"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message.partition(":")[0] for _, message in BAD])
def test_bad_arguments_are_one_clear_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(sf.errors.InputError, match=message):
        DevicePrefetcher(**({"loader": [], "device": "cpu"} | arguments))


def test_a_gpu_that_is_not_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(sf.errors.InputError, match=r"no GPU here\. Give device='cpu'"):
        DevicePrefetcher([], "cuda")


def test_a_loader_without_a_length_has_none() -> None:
    with pytest.raises(TypeError):
        len(DevicePrefetcher(iter([]), "cpu"))


# -- other devices ----------------------------------------------------------------------------------------------------


def test_where_there_are_no_streams_batches_are_sent_when_they_are_asked_for() -> None:
    found = list(DevicePrefetcher([{"x": torch.ones(3), "n": 5}], "meta", transform_on_device=lambda b: b | {"m": 1}))
    assert [(batch["x"].device.type, batch["n"], batch["m"]) for batch in found] == [("meta", 5, 1)]
