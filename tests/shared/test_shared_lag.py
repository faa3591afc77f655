"""A job that takes no more batches is dropped after a while, without harm to the others."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import TensorDataset

import stallfree as sf

DATA = TensorDataset(torch.arange(400))


def loaders(**changes: object) -> tuple[sf.SharedLoader, sf.SharedLoader]:
    first, second = (sf.SharedLoader(DATA, group="lag", batch_size=4, timeout=1, **changes) for _ in range(2))
    return first, second


def ids(batches: object) -> list[int]:
    return [id for batch in batches for id in batch[0].tolist()]  # type: ignore[attr-defined]


def test_a_job_that_stands_still_in_an_epoch_gets_an_error() -> None:
    slow, quick = loaders()
    with slow, quick:
        behind, ahead = iter(slow), iter(quick)
        held = next(behind)[0]
        assert ids(ahead) == list(range(400))
        assert held.tolist() == [0, 1, 2, 3], "what it holds stays"
        with pytest.raises(sf.WaitError, match=r"has held up the group 'lag' for 0\.5 s, so it gets no more batches"):
            ids(behind)
        assert held.tolist() == [0, 1, 2, 3]
        assert ids(slow) == list(range(400)), "and it may join again"


def test_a_job_that_is_late_between_epochs_joins_again() -> None:
    slow, quick = loaders()
    with slow, quick:
        both = [iter(slow), iter(quick)]
        for one, other in zip(*both, strict=True):
            assert torch.equal(one[0], other[0])
        del one, other
        assert ids(quick) == list(range(400))
        assert ids(slow) == list(range(400))
        assert slow.epoch > 2


def test_a_job_that_waits_for_the_next_epoch_does_not_time_out() -> None:
    """The group makes progress all the while, though each epoch takes longer than its timeout."""

    class Slow:
        def __len__(self) -> int:
            return 60

        def __getitem__(self, id: int) -> int:
            threading.Event().wait(0.03)
            return id

    data = Slow()
    first = sf.SharedLoader(data, group="long", batch_size=4, timeout=1)
    second = sf.SharedLoader(data, group="long", batch_size=4, timeout=1)
    with first, second:
        going = iter(first)
        next(going)
        got: list[int] = []
        waiting = threading.Thread(target=lambda: got.extend(id for batch in second for id in batch.tolist()))
        waiting.start()
        for _ in going:
            pass
        for _ in first:
            pass
        waiting.join()
        assert got == list(range(60))
