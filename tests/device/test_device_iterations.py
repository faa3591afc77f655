"""Several iterations of one loader with a device, loaders that nothing but their iterator refers to, and copies.

A loader with a device does what torch's loader does: iterations do not end each other, an iterator keeps its loader,
and a loader can be copied and sent to another process.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.utils.data as tud
from fakes import World

import stallfree as sf

DATA = list(range(12))
BATCH = 4

Make = Callable[[], Any]


def plain(**options: Any) -> tud.DataLoader[Any]:
    return tud.DataLoader(DATA, BATCH, **options)  # type: ignore[arg-type]


def close(loader: object) -> None:
    end = getattr(loader, "close", None)
    if end is not None:
        end()


LOADERS: dict[str, Make] = {
    "list": lambda: sf.DevicePrefetcher([batch.clone() for batch in torch.tensor(DATA).split(BATCH)], "cpu"),
    "torch": lambda: sf.DevicePrefetcher(plain(), "cpu"),
    "torch, a worker": lambda: sf.DevicePrefetcher(plain(num_workers=1), "cpu"),
    "stallfree": lambda: sf.DataLoader(DATA, BATCH, device="cpu"),
    "stallfree, a worker": lambda: sf.DataLoader(DATA, BATCH, num_workers=1, device="cpu"),
    "prefetcher of a prefetcher": lambda: sf.DevicePrefetcher(sf.DevicePrefetcher(plain(), "cpu"), "cpu"),
}
each_loader = pytest.mark.parametrize("name", LOADERS)

USES: dict[str, Callable[[Any], list[Any]]] = {
    "zip": lambda loader: [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=True)],
    "nested": lambda loader: [(one.tolist(), other.tolist()) for one in loader for other in loader],
    "broken off": lambda loader: [
        (one.tolist(), other.tolist()) for one in loader for other in islice(iter(loader), 1)
    ],
    "late": lambda loader: late(loader),
}


def late(loader: Any) -> list[Any]:
    """A second iteration begins in the middle of the first, which ends before it."""
    first = iter(loader)
    taken = [next(first).tolist()]
    second = iter(loader)
    taken += [next(second).tolist(), *(batch.tolist() for batch in first)]
    return taken + [batch.tolist() for batch in second]


# -- several iterations ------------------------------------------------------------------------------------------------


@each_loader
@pytest.mark.parametrize("use", USES)
def test_iterations_do_not_end_each_other(name: str, use: str) -> None:
    loader = LOADERS[name]()
    for epoch in range(2):
        assert USES[use](loader) == USES[use](plain()), epoch
    close(loader)


@pytest.mark.parametrize("use", USES)
def test_iterations_share_a_device(use: str) -> None:
    world = World()
    with world.installed():
        made = sf.DevicePrefetcher(plain(), "cuda")

        class Synchronized:
            def __iter__(self) -> Iterator[torch.Tensor]:
                for batch in made:
                    world.synchronize()
                    yield batch

        for _ in range(2):
            assert USES[use](Synchronized()) == USES[use](plain())
        made.close()
    world.check()


@pytest.mark.parametrize("use", ["zip", "nested"])
def test_iterations_draw_the_random_numbers_that_torch_draws(use: str) -> None:
    """With a sampler that draws, and a data set that does."""

    class Noisy:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, id: int) -> torch.Tensor:
            return id + torch.rand(())

    def run(wrap: Callable[[Iterable[Any]], Any]) -> tuple[list[Any], float]:
        torch.manual_seed(3)
        loader = wrap(tud.DataLoader(Noisy(), 2, shuffle=True))  # type: ignore[arg-type]
        found = USES[use](loader)
        close(loader)
        return found, torch.rand(()).item()

    assert run(lambda loader: sf.DevicePrefetcher(loader, "cpu")) == run(lambda loader: loader)


def test_a_data_set_is_used_by_one_thread_at_a_time() -> None:
    users = threading.Semaphore()

    class OneUser:
        def __len__(self) -> int:
            return 16

        def __getitem__(self, id: int) -> int:
            assert users.acquire(blocking=False), "two threads in the data set"
            time.sleep(0.001)
            users.release()
            return id

    loader = sf.DevicePrefetcher(tud.DataLoader(OneUser(), 4), "cpu")  # type: ignore[arg-type]
    for _ in range(3):
        assert len(list(zip(loader, loader, loader, strict=True))) == 4
    loader.close()


def test_the_state_is_that_of_the_last_iteration_begun() -> None:
    loader = sf.DataLoader(DATA, 1, device="cpu")
    first, second = iter(loader), iter(loader)
    for _ in range(3):
        next(first)
    next(second)
    resumed = sf.DataLoader(DATA, 1, device="cpu")
    resumed.load_state_dict(loader.state_dict())
    assert [int(batch) for batch in resumed] == DATA[1:]
    assert [int(batch) for batch in first] == DATA[3:]
    assert [int(batch) for batch in second] == DATA[1:]
    loader.close()
    resumed.close()


def test_an_ended_iteration_leaves_no_thread() -> None:
    loader = sf.DevicePrefetcher(plain(), "cpu")
    before = threading.active_count()
    held = [iterator for _ in range(5) for iterator in [iter(loader)] if list(iterator)]
    assert len(held) == 5
    next(iter(loader))
    assert threading.active_count() <= before + 1
    loader.close()
    assert threading.active_count() == before


def test_a_child_forked_in_the_middle_of_an_iteration_begins_its_own() -> None:
    loader = sf.DevicePrefetcher(plain(), "cpu")
    first = iter(loader)
    next(first)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        theirs.send([[batch.tolist() for batch in pair] for pair in zip(loader, loader, strict=True)])

    process = context.Process(target=child)
    process.start()
    assert ours.poll(60)
    assert ours.recv() == [[batch.tolist() for batch in pair] for pair in zip(plain(), plain(), strict=True)]
    process.join()
    assert len(list(first)) == 2
    loader.close()


def test_persistent_workers_serve_one_iteration_and_say_so() -> None:
    with sf.DataLoader(DATA, BATCH, num_workers=1, persistent_workers=True, device="cpu") as loader:
        with pytest.raises(sf.StallfreeError, match="iterated again"):
            USES["zip"](loader)
        assert len(list(loader)) == 3


# -- one process that loads --------------------------------------------------------------------------------------------


def make_plain() -> Any:
    return plain()


def of_process() -> Any:
    return sf.ProcessPrefetcher(make_plain, "cpu")


def test_a_process_prefetcher_loses_nothing_silently() -> None:
    """One process loads for one iteration: an earlier one that is continued says so."""
    with of_process() as loader:
        first = iter(loader)
        assert next(first).tolist() == DATA[:BATCH]
        second = iter(loader)
        assert next(second).tolist() == DATA[:BATCH]
        for _ in range(2):
            with pytest.raises(sf.StallfreeError, match="iterated again"):
                next(first)
        assert [batch.tolist() for batch in second] == [DATA[4:8], DATA[8:]]
        with pytest.raises(sf.StallfreeError, match="iterated again"):
            list(zip(loader, loader, strict=True))
        third = iter(loader)
        assert len(list(third)) == 3
        assert len(list(loader)) == 3
        assert not list(third), "it had ended by itself"


# -- temporary loaders -------------------------------------------------------------------------------------------------


def returned(make: Make) -> Any:
    loader = make()
    return iter(loader)


TEMPORARY: dict[str, Callable[[Make], list[Any]]] = {
    "for": lambda make: [batch.tolist() for batch in make()],
    "enumerate": lambda make: [batch.tolist() for _, batch in enumerate(make())],
    "zip": lambda make: [batch.tolist() for batch, _ in zip(make(), range(9), strict=False)],
    "returned": lambda make: [batch.tolist() for batch in returned(make) if gc.collect() >= 0],
    "map": lambda make: list(map(torch.Tensor.tolist, make())),
}


@pytest.mark.parametrize("use", TEMPORARY)
@each_loader
def test_a_temporary_loader_lives_as_long_as_its_iterator(name: str, use: str) -> None:
    assert TEMPORARY[use](LOADERS[name]) == [DATA[:4], DATA[4:8], DATA[8:]]


@pytest.mark.slow
def test_a_temporary_process_prefetcher_lives_as_long_as_its_iterator() -> None:
    assert TEMPORARY["returned"](of_process) == [DATA[:4], DATA[4:8], DATA[8:]]


# -- copies ------------------------------------------------------------------------------------------------------------

COPIES = [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]


@pytest.mark.parametrize("taken", [0, 1, 3], ids=["unused", "in an epoch", "after an epoch"])
@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle"])
def test_a_prefetcher_can_be_copied_as_torchs_loader(copied: Callable[[Any], Any], taken: int) -> None:
    loader = sf.DevicePrefetcher(plain(), "cpu", 3, transform_on_device=torch.neg)
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    other = copied(loader)
    assert (other.depth, other.device) == (loader.depth, loader.device)
    assert [batch.tolist() for batch in other] == [batch.neg().tolist() for batch in plain()]
    assert len(list(iterator)) == 3 - taken, "and it is independent of its copy"
    loader.close()
    other.close()


def count_batches(loader: Any, counts: Any) -> None:
    counts.send(sum(1 for _ in loader))


def test_a_prefetcher_can_be_sent_to_another_process() -> None:
    loader = sf.DevicePrefetcher(plain(), "cpu")
    assert len(list(loader)) == 3
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=partial(count_batches, loader), args=(theirs,))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == 3
    process.join()
    loader.close()
