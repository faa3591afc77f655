"""A `SharedLoader` used as torch's loader is: iterations, temporary loaders, copies, forks, and jobs that lag."""

import gc
import itertools
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from group_jobs import ids_of

import stallfree as sf
from children import Holder
from loader_data import Made
from stallfree.shared import member
from stallfree.shared.coordinator import Coordinator

DATA = list(range(12))
BATCH = 4
_groups = itertools.count()


def shared(**changes: Any) -> sf.SharedLoader[Any]:
    arguments = {"dataset": DATA, "group": f"iterations-{next(_groups)}", "batch_size": BATCH}
    return sf.SharedLoader(**{**arguments, **changes})


def flat(batches: Any) -> list[int]:
    return [id for batch in batches for id in batch.tolist()]


WHOLE = [DATA[:4], DATA[4:8], DATA[8:]]


def test_a_later_iteration_ends_the_last_one_with_an_error() -> None:
    with shared() as loader:
        for _ in range(2):
            with pytest.raises(sf.InputError, match="a later iteration of this SharedLoader has begun, and ended this"):
                list(zip(loader, loader, strict=True))
        assert ids_of(loader) == WHOLE


def test_an_iteration_may_be_broken_off() -> None:
    with shared(shuffle=True, seed=1) as loader:
        epochs = []
        for taken in (0, 1, 3):
            iterator = iter(loader)
            for _ in range(taken):
                next(iterator)
            epochs.append(loader.epoch)
            iterator = iter(loader)
            epochs.append(loader.epoch)
            assert sorted(flat(iterator)) == DATA
        assert epochs == sorted(set(epochs)), "each is an epoch, with an order of its own"


def test_the_state_is_that_of_the_last_iteration_begun() -> None:
    with shared() as loader:
        first = iter(loader)
        next(first), next(first)
        second = iter(loader)
        next(second)
        state = loader.state_dict()
        assert ids_of(second) == WHOLE[1:]
    with shared() as resumed:
        resumed.load_state_dict(state)
        with pickle.loads(pickle.dumps(resumed)) as other:  # another job of the group
            assert ids_of(other) == WHOLE[1:]
            assert other.group == resumed.group


@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: sf.DevicePrefetcher(loader, "cpu")])
def test_a_temporary_loader_lives_and_ends_with_its_iterator(wrap: Callable[[Any], Any], store_root: Any) -> None:
    iterator = iter(wrap(shared(group="temporary")))
    assert [batch.tolist() for batch in iterator if gc.collect() >= 0] == WHOLE
    assert list(store_root.rglob("group-temporary"))
    del iterator
    gc.collect()
    assert not list(store_root.rglob("group-temporary"))


def test_a_loader_that_is_dropped_leaves_its_group() -> None:
    """By reference counting alone; the jobs that remain go on."""
    gc.disable()
    try:
        with shared(group="dropped") as other:
            first = iter(other)
            assert next(first).tolist() == WHOLE[0]
            iterator = iter(shared(group="dropped"))
            next(iterator), next(iterator)
            del iterator
            assert [ids_of(first), ids_of(other)] == [WHOLE[1:], WHOLE]
    finally:
        gc.enable()


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


def test_a_batch_may_be_none() -> None:
    with shared(collate_fn=lambda samples: None if samples[0] == 4 else samples) as loader:
        assert list(loader) == [DATA[:4], None, DATA[8:]]
        assert loader.stats().batches == 3


ROWS = Made(24, lambda id: torch.full((20_000,), id, dtype=torch.int32))  # samples of several pages


def saver(number: int, batch: torch.Tensor) -> Holder:
    """A forked process that checks batch `number`, of two rows, when it is told to end."""

    def check() -> None:
        assert [np.unique(row).tolist() for row in batch.numpy()] == [[2 * number], [2 * number + 1]]

    return Holder(lambda: check)


@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: sf.DevicePrefetcher(loader, "cpu")])
def test_a_forked_child_keeps_its_batch(wrap: Callable[[Any], Any]) -> None:
    savers = []
    with shared(dataset=ROWS, batch_size=2) as loader:
        batches = wrap(loader)
        for epoch in range(2):
            for number, batch in enumerate(batches):
                if number in (2, 3, 7):
                    savers.append(saver(number, batch))
                assert batch[:, -1].tolist() == [2 * number, 2 * number + 1], epoch
        del batch
        for each in savers:
            each.end()
        getattr(batches, "close", int)()


def test_many_forks_cost_no_memory() -> None:
    with shared(dataset=ROWS, batch_size=2) as loader:
        staging = []
        for number, batch in enumerate(loader):
            saver(number, batch).end()
            staging.append(loader.stats().staging_bytes)
        del batch
        assert max(staging) <= 2 * staging[8]


MANY = list(range(100))


@contextmanager
def two_jobs(**changes: Any) -> Iterator[list[sf.SharedLoader[Any]]]:
    given = {"dataset": MANY, "group": f"lag-{next(_groups)}", "timeout": 120, **changes}
    with shared(**given) as first, shared(**given) as second:
        yield [first, second]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laggards are dropped after 0.3 s, though nobody's wait ends so soon, on a busy machine either."""
    made = Coordinator.__init__

    def make(self: Coordinator, *arguments: Any) -> None:
        made(self, *arguments)
        self._lag_seconds = 0.3

    monkeypatch.setattr(Coordinator, "__init__", make)


@pytest.mark.usefixtures("impatient")
def test_a_job_that_stands_still_in_an_epoch_gets_an_error() -> None:
    with two_jobs() as (slow, quick):
        behind, ahead = iter(slow), iter(quick)
        held = next(behind)
        assert flat(ahead) == MANY
        assert held.tolist() == [0, 1, 2, 3], "what it holds stays"
        with pytest.raises(sf.WaitError, match=r"has held up the group 'lag-\d+' for 0\.3 s, so it gets no more"):
            flat(behind)
        assert held.tolist() == [0, 1, 2, 3]
        assert flat(slow) == MANY, "and it may join again"


def test_a_job_that_breaks_off_an_epoch_holds_up_nobody() -> None:
    with two_jobs() as (early, other):
        first, second = iter(early), iter(other)
        next(first)
        del first
        begun = time.monotonic()
        assert flat(second) == MANY
        assert time.monotonic() - begun < 30, "half of the timeout is what a laggard costs"


@pytest.mark.usefixtures("impatient")
def test_a_job_that_is_late_between_epochs_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that was dropped is closed without a wait for the end of the coordinator, which others use."""
    monkeypatch.setattr(member, "ANSWER_SECONDS", 20.0)
    with two_jobs() as (slow, quick):
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
    """It gets each sample once. The group makes progress all the while, though an epoch takes longer than `timeout`."""
    slow = Made(60, lambda id: time.sleep(0.04) or torch.tensor(id))  # type: ignore[func-returns-value]
    with two_jobs(dataset=slow, timeout=2) as (first, second):
        going = iter(first)
        next(going)
        got: list[int] = []
        waiting = threading.Thread(target=lambda: got.extend(flat(second)))
        waiting.start()
        assert flat(going) == list(range(4, 60))
        assert flat(first) == list(range(60))
        waiting.join()
        assert got == list(range(60))
