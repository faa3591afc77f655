"""A `SharedLoader` used as torch's loader is: iterations, temporary loaders, copies, forks, and jobs that lag."""

import copy
import gc
import itertools
import multiprocessing
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

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
        with pickle.loads(pickle.dumps(resumed)) as other:
            assert ids(other) == WHOLE[1:]


# -- temporary loaders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: sf.DevicePrefetcher(loader, "cpu")])
def test_a_temporary_loader_lives_and_ends_with_its_iterator(wrap: Callable[[Any], Any], store_root: Any) -> None:
    iterator = iter(wrap(shared(group="temporary")))
    assert [batch.tolist() for batch in iterator if gc.collect() >= 0] == WHOLE
    assert list(store_root.rglob("group-temporary"))
    del iterator
    gc.collect()
    assert not list(store_root.rglob("group-temporary"))


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


# -- forks inside the loop: an asynchronous saver, a plot --------------------------------------------------------------

VALUES = 20_000  # of a sample: several pages


class Rows:
    """Samples of several pages, filled with their number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, id: int) -> torch.Tensor:
        return torch.full((VALUES,), id, dtype=torch.int32)


class Saver:
    """A forked process that looks at its batch when it is asked to."""

    def __init__(self, batch: torch.Tensor) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()

        def save() -> None:
            theirs.recv()
            theirs.send([np.unique(row).tolist() for row in batch.numpy()])

        self._process = context.Process(target=save, daemon=True)
        self._process.start()
        theirs.close()

    def saved(self) -> Any:
        """The values of each row of the batch."""
        self._ours.send(None)
        assert self._ours.poll(PATIENCE)
        values = self._ours.recv()
        self._process.join()
        return values


@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: sf.DevicePrefetcher(loader, "cpu")])
def test_a_forked_child_keeps_its_batch(wrap: Callable[[Any], Any]) -> None:
    savers, expected = [], []
    with shared(dataset=Rows(40), batch_size=2) as loader:
        batches = wrap(loader)
        for epoch in range(2):
            for number, batch in enumerate(batches):
                if number in (2, 3, 7):
                    savers.append(Saver(batch))
                    expected.append([[2 * number], [2 * number + 1]])
                assert batch[:, -1].tolist() == [2 * number, 2 * number + 1], epoch
        del batch
        assert [saver.saved() for saver in savers] == expected
        getattr(batches, "close", int)()


def test_many_forks_cost_no_memory() -> None:
    with shared(dataset=Rows(40), batch_size=2) as loader:
        staging = []
        for number, batch in enumerate(loader):
            assert Saver(batch).saved() == [[2 * number], [2 * number + 1]]
            staging.append(loader.stats().staging_bytes)
        del batch
        assert max(staging) <= 2 * staging[8]


# -- jobs that take no more batches ------------------------------------------------------------------------------------

MANY = list(range(100))


def two_jobs(**changes: Any) -> tuple[sf.SharedLoader[Any], sf.SharedLoader[Any]]:
    group = f"lag-{next(_groups)}"
    first, second = (shared(**{"dataset": MANY, "group": group, "timeout": 0.6, **changes}) for _ in range(2))
    return first, second


def flat(batches: Any) -> list[int]:
    return [id for batch in batches for id in batch.tolist()]


def test_a_job_that_stands_still_in_an_epoch_gets_an_error() -> None:
    slow, quick = two_jobs()
    with slow, quick:
        behind, ahead = iter(slow), iter(quick)
        held = next(behind)
        assert flat(ahead) == MANY
        assert held.tolist() == [0, 1, 2, 3], "what it holds stays"
        with pytest.raises(sf.WaitError, match=r"has held up the group 'lag-\d+' for 0\.3 s, so it gets no more"):
            flat(behind)
        assert held.tolist() == [0, 1, 2, 3]
        assert flat(slow) == MANY, "and it may join again"


def test_a_job_that_is_late_between_epochs_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that was dropped is closed without a wait for the end of the coordinator, which others use."""
    monkeypatch.setattr(member, "ANSWER_SECONDS", 20.0)
    slow, quick = two_jobs()
    with slow, quick:
        for one, other in zip(iter(slow), iter(quick), strict=True):
            assert torch.equal(one, other)
        del one, other
        assert flat(quick) == MANY
        assert flat(slow) == MANY
        assert slow.epoch > 2
        begun = time.monotonic()
        quick.close()
        assert time.monotonic() - begun < 10


def test_a_job_that_waits_for_the_next_epoch_does_not_time_out() -> None:
    """The group makes progress all the while, though each epoch takes longer than its timeout."""

    class Slow(Rows):
        def __getitem__(self, id: int) -> torch.Tensor:
            time.sleep(0.015)
            return torch.tensor(id)

    first, second = two_jobs(dataset=Slow(60), timeout=0.5)
    with first, second:
        going = iter(first)
        next(going)
        got: list[int] = []
        waiting = threading.Thread(target=lambda: got.extend(flat(second)))
        waiting.start()
        assert flat(going) == list(range(4, 60))
        assert flat(first) == list(range(60))
        waiting.join()
        assert got == list(range(60))
