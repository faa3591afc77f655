"""A `SharedLoader` used as torch's loader is: several iterations at once, temporary loaders, copies, any batch."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import pickle
import sys
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


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Objects are freed by reference counting only."""
    gc.disable()
    yield
    gc.enable()


WHOLE = [DATA[:4], DATA[4:8], DATA[8:]]

# -- several iterations ------------------------------------------------------------------------------------------------


USES: dict[str, Callable[[Any], Any]] = {
    "zip": lambda loader: list(zip(loader, loader, strict=True)),
    "nested": lambda loader: [(one, other) for one in loader for other in loader],
    "late": lambda loader: [next(iterator) for first in [iter(loader)] for iterator in [first, iter(loader), first]],
}


@pytest.mark.parametrize("use", USES)
def test_a_later_iteration_ends_the_last_one_with_an_error(use: str) -> None:
    with shared() as loader:
        for _ in range(2):
            with pytest.raises(sf.InputError, match="a later iteration of this SharedLoader has begun, and ended this"):
                USES[use](loader)
        assert ids(loader) == WHOLE


def test_an_iteration_may_be_broken_off() -> None:
    with shared(shuffle=True, seed=1) as loader:
        epochs = []
        for taken in (0, 1, 2, 3):
            iterator = iter(loader)
            for _ in range(taken):
                next(iterator)
            epochs.append(loader.epoch)
            iterator = iter(loader)
            epochs.append(loader.epoch)
            assert sorted(id for batch in iterator for id in batch.tolist()) == DATA
        assert epochs == sorted(set(epochs)), "each is an epoch, with an order of its own"


def test_the_state_is_that_of_the_last_iteration_begun() -> None:
    with shared() as loader:
        first = iter(loader)
        for _ in range(2):
            next(first)
        second = iter(loader)
        next(second)
        state = loader.state_dict()
        assert ids(second) == WHOLE[1:]
        assert loader.epoch == state["epoch"] + 1
    with shared() as resumed:
        resumed.load_state_dict(state)
        assert ids(resumed) == WHOLE[1:]


# -- temporary loaders -------------------------------------------------------------------------------------------------


def returned(make: Callable[[], Any]) -> Iterator[Any]:
    loader = make()
    return iter(loader)


def prefetched() -> Any:
    return sf.DevicePrefetcher(shared(), "cpu")


TEMPORARY: dict[str, Callable[[Callable[[], Any]], list[list[int]]]] = {
    "for": lambda make: [batch.tolist() for batch in make()],
    "returned": lambda make: [batch.tolist() for batch in returned(make) if gc.collect() >= 0],
}


@pytest.mark.parametrize("make", [shared, prefetched], ids=["shared", "with a prefetcher"])
@pytest.mark.parametrize("use", TEMPORARY)
def test_a_temporary_loader_lives_as_long_as_its_iterator(use: str, make: Callable[[], Any]) -> None:
    assert TEMPORARY[use](make) == WHOLE


@pytest.mark.parametrize("batches", [0, 2], ids=["before", "in an epoch"])
def test_a_loader_that_is_dropped_leaves_its_group(batches: int, no_collector: None) -> None:
    """By reference counting alone; the jobs that remain go on."""
    other = shared(group="dropped")
    with other:
        first = iter(other)
        assert next(first).tolist() == WHOLE[0]
        iterator = iter(shared(group="dropped"))
        for _ in range(batches):
            next(iterator)
        del iterator
        assert ids(first) == WHOLE[1:]
        assert ids(other) == WHOLE


def test_a_temporary_loader_ends_with_its_iterator(store_root: Any, no_collector: None) -> None:
    iterator = iter(shared(group="temporary"))
    assert next(iterator).tolist() == WHOLE[0]
    assert list(store_root.rglob("group-temporary"))
    del iterator
    assert not list(store_root.rglob("group-temporary"))


def test_no_python_code_runs_where_a_batch_is_freed() -> None:
    """An interrupt during it would be lost."""
    with shared() as loader:
        for batch in loader:
            calls: list[str] = []
            sys.setprofile(lambda frame, event, _, calls=calls: calls.append(frame.f_code.co_name))
            try:
                del batch
            finally:
                sys.setprofile(None)
            assert set(calls) <= {"<lambda>", "test_no_python_code_runs_where_a_batch_is_freed"}


# -- copies ------------------------------------------------------------------------------------------------------------

COPIES = [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]


@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_is_another_job_of_the_group(copied: Callable[[Any], Any]) -> None:
    with shared(shuffle=True, seed=3, num_workers=2) as loader:
        iterator = iter(loader)
        mine = next(iterator).tolist()
        with copied(loader) as other:
            assert (other.group, other.seed) == (loader.group, 3)
            mine += [id for batch in iterator for id in batch.tolist()]
            theirs = [id for batch in other for id in batch.tolist()]
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


@pytest.mark.slow
def test_it_can_be_sent_to_another_process() -> None:
    with shared() as loader:
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


def test_a_batch_may_be_none() -> None:
    with shared(collate_fn=odd_ones) as loader:
        assert list(loader) == [DATA[:4], None, DATA[8:]]
        assert loader.stats().batches == 3


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
    monkeypatch.setattr(member, "ANSWER_SECONDS", 3600.0)
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
