"""A `SharedLoader` used as torch's loader is: several iterations at once, temporary loaders, copies, any batch."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import stallfree as sf
from stallfree.shared import member

PATIENCE = 60.0  # seconds until what does not end is taken for hung
DATA = list(range(12))
BATCH = 4
_groups = itertools.count()


def shared(**changes: Any) -> sf.SharedLoader[Any]:
    """A loader of a new group."""
    arguments = {"dataset": DATA, "group": f"iterations-{next(_groups)}", "batch_size": BATCH}
    return sf.SharedLoader(**{**arguments, **changes})


def ids(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


WHOLE = [DATA[:4], DATA[4:8], DATA[8:]]

# -- several iterations ------------------------------------------------------------------------------------------------


def late(loader: Any) -> list[tuple[int, int]]:
    """Pairs, the second iteration one batch behind the first, which another one ends before its end."""
    first = iter(loader)
    ahead = next(first)[0].item()
    second = iter(loader)
    return [(ahead, ahead), *((one[0].item(), other[0].item()) for one, other in zip(first, second, strict=False))]


USES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "zip": (lambda loader: [(one[0].item(), other[0].item()) for one, other in zip(loader, loader, strict=True)],
            [(0, 0), (4, 4), (8, 8)]),
    "nested": (lambda loader: [(one[0].item(), other[0].item()) for one in loader for other in loader],
               [(one, other) for one in (0, 4, 8) for other in (0, 4, 8)]),
    "broken off": (lambda loader: [(one[0].item(), next(iter(loader))[0].item()) for one in loader],
                   [(0, 0), (4, 0), (8, 0)]),
    "late": (late, [(0, 0), (4, 0), (8, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_iterations_do_not_end_each_other(use: str) -> None:
    run, expected = USES[use]
    with shared() as loader:
        assert run(loader) == expected
        assert ids(loader) == WHOLE
        assert run(loader) == expected


@pytest.mark.parametrize("size", [2, 8], ids=["smaller batches", "larger batches"])
def test_each_iteration_has_every_sample_once_in_an_epoch_of_its_own(size: int) -> None:
    """While another job of the group goes on, with batches of another size."""
    options = {"dataset": list(range(32)), "shuffle": True, "seed": 1, "on_lag": "detach"}
    with shared(**options) as other, shared(**options, group=other.group, batch_size=size) as loader:
        going = iter(other)
        held = next(going)
        iterators, epochs = [], []
        for _ in range(3):
            iterators.append(iter(loader))
            epochs.append(loader.epoch)
        passes = [[id for batch in iterator for id in batch.tolist()] for iterator in iterators]
        assert [sorted(each) for each in passes] == [list(range(32))] * 3
        assert len(set(map(tuple, passes))) == len(set(epochs)) == 3, "each is an epoch, with an order of its own"
        rest = [id for batch in going for id in batch.tolist()]
        assert sorted([*held.tolist(), *rest]) == list(range(32))
        assert loader.epoch > max(epochs)


def test_the_state_is_that_of_the_last_iteration_begun() -> None:
    with shared() as loader:
        first, second = iter(loader), iter(loader)
        for _ in range(2):
            next(first)
        next(second)
        state = loader.state_dict()
        assert ids(second) == WHOLE[1:]
        assert ids(first) == WHOLE[2:]
        after = loader.epoch
        assert after == state["epoch"] + 1
    with shared() as resumed:
        resumed.load_state_dict(state)
        assert ids(resumed) == WHOLE[1:]


def test_close_ends_all_iterations() -> None:
    loader = shared()
    iterators = [iter(loader) for _ in range(3)]
    for iterator in iterators:
        next(iterator)
    loader.close()
    assert [list(iterator) for iterator in iterators] == [[]] * 3


# -- temporary loaders -------------------------------------------------------------------------------------------------


def returned(make: Callable[[], Any]) -> Iterator[Any]:
    loader = make()
    return iter(loader)


def prefetched() -> Any:
    return sf.DevicePrefetcher(shared(), "cpu")


TEMPORARY: dict[str, Callable[[Callable[[], Any]], list[list[int]]]] = {
    "for": lambda make: [batch.tolist() for batch in make()],
    "enumerate": lambda make: [batch.tolist() for _, batch in enumerate(make())],
    "returned": lambda make: [batch.tolist() for batch in returned(make) if gc.collect() >= 0],
}


@pytest.mark.parametrize("make", [shared, prefetched], ids=["shared", "with a prefetcher"])
@pytest.mark.parametrize("use", TEMPORARY)
def test_a_temporary_loader_lives_as_long_as_its_iterator(use: str, make: Callable[[], Any]) -> None:
    assert TEMPORARY[use](make) == WHOLE


def test_a_temporary_loader_ends_with_its_iterator(store_root: Any) -> None:
    """By reference counting alone."""
    gc.disable()
    try:
        iterator = iter(shared(group="temporary"))
        assert next(iterator).tolist() == WHOLE[0]
        assert list(store_root.rglob("group-temporary"))
        del iterator
        assert not list(store_root.rglob("group-temporary"))
    finally:
        gc.enable()


# -- copies ------------------------------------------------------------------------------------------------------------

COPIES = [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]


@pytest.mark.parametrize("taken", [0, 1, 3], ids=["unused", "in an epoch", "after an epoch"])
@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_is_another_job_of_the_group(copied: Callable[[Any], Any], taken: int) -> None:
    with shared(shuffle=True, seed=3, on_lag="detach", num_workers=2) as loader:
        iterator = iter(loader)
        mine = [id for _ in range(taken) for id in next(iterator).tolist()]
        with copied(loader) as other:
            assert (other.group, other.seed) == (loader.group, 3)
            theirs = [id for batch in other for id in batch.tolist()]
            mine += [id for batch in iterator for id in batch.tolist()]
            assert sorted(theirs) == sorted(mine) == DATA
            assert other.stats().num_workers == 2


def test_a_copy_of_a_loader_that_is_to_resume_resumes() -> None:
    with shared() as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
    with shared() as resumed:
        resumed.load_state_dict(state)
        with pickle.loads(pickle.dumps(resumed)) as other:
            assert ids(other) == WHOLE[1:]


def iterate(loader: Any, connection: Any) -> None:
    connection.send(ids(loader))
    loader.close()


def test_it_can_be_sent_to_another_process() -> None:
    with shared(on_lag="detach") as loader:
        assert ids(loader) == WHOLE
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=iterate, args=(loader, theirs))
        process.start()
        assert ours.poll(PATIENCE)
        assert ours.recv() == WHOLE
        process.join()


# -- batches that collate_fn makes -------------------------------------------------------------------------------------


def odd_ones(samples: list[int]) -> list[int] | None:
    return None if samples[0] == 4 else samples


@pytest.mark.parametrize("make", ["group", "alone"])
def test_a_batch_may_be_none(make: str) -> None:
    """One that the group prepares, and one that a job prepares by itself."""
    with shared(collate_fn=odd_ones) as loader:
        iterator = iter(loader)
        if make == "alone":
            other = iter(loader)
            assert next(other) == DATA[:4]
        assert list(iterator) == [DATA[:4], None, DATA[8:]]
        assert loader.stats().batches == 3 + (make == "alone")


def test_a_batch_that_is_skipped_is_none_of_them() -> None:
    class Broken:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, id: int) -> int:
            if 4 <= id < 8:
                raise ValueError(id)
            return id

    with shared(dataset=Broken(), on_error="skip", collate_fn=odd_ones) as loader:
        assert list(loader) == [DATA[:4], DATA[8:]]


# -- the end -----------------------------------------------------------------------------------------------------------


def test_closing_one_loader_does_not_wait_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "_ANSWER_SECONDS", 3600.0)
    loaders = [shared() for _ in range(3)]
    iterators = [iter(loader) for loader in loaders]
    assert [next(iterator).tolist() for iterator in iterators] == [WHOLE[0]] * 3

    def end() -> None:
        for loader in (loaders[1], loaders[0], loaders[2]):
            loader.close()

    closing = threading.Thread(target=end, daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
