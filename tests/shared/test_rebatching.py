"""Rebatching yields the batches that torch's `DataLoader` makes of the same samples."""

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate

import stallfree as sf
from loader_data import KINDS, Made, same
from stallfree.datasets.ranks import Ranks
from stallfree.shared.rebatching import Rebatching, cut, join

ALONE = Ranks(0, 1, 1)
SAMPLES: list[Callable[[int], Any]] = [
    int, *(KINDS[name] for name in ("octets", "nested", "pair", "words")), lambda id: (f"a{id}", f"b{id}"),
    lambda id: (id, [], {}), lambda id: OrderedDict(a=np.float32(id), b=[id], c=defaultdict(list, {"d": id})),
]  # fmt: skip


class Epoch:
    """An epoch whose chunks are prepared as in a group, and in which some samples cannot be read."""

    def __init__(self, order: list[int], chunk: int, make: Callable[[int], Any], lost: set[int]) -> None:
        self.order, self.chunk, self.make, self.lost = order, chunk, make, lost
        self.planned_for: list[int] = []

    def planned(self, number: int) -> Any:
        self.planned_for.append(number)
        return np.array(self.order[number * self.chunk : (number + 1) * self.chunk], np.int64)

    def prepared(self, number: int) -> tuple[Any, Any]:
        ids = [id for id in self.order[number * self.chunk : (number + 1) * self.chunk] if id not in self.lost]
        return (default_collate([self.make(id) for id in ids]) if ids else None), np.array(ids, np.int64)

    def batches(self, rebatching: Rebatching, chunks: range) -> dict[int, tuple[Any, list[int]]]:
        got: dict[int, tuple[Any, list[int]]] = {}
        for at in chunks:
            for unit, data, ids in rebatching.feed(at, *self.prepared(at)):
                assert unit not in got
                got[unit] = data, ids.tolist()
        return got


def expected_ids(order: list[int], size: int, ranks: int, drop_last: bool) -> list[list[list[int]]]:
    """Return the expected samples of each rank for each unit; a small last unit is split or repeated."""
    units = [order[at : at + size * ranks] for at in range(0, len(order), size * ranks)]
    if drop_last and units and len(units[-1]) < size * ranks:
        units.pop()
    found = []
    for unit in units:
        enough = unit if len(unit) >= ranks else (unit * ranks)[:ranks]
        edges = [rank * len(enough) // ranks for rank in range(ranks + 1)]
        found.append([enough[low:high] for low, high in pairwise(edges)])
    return found


@st.composite
def divisions(draw: st.DrawFn) -> tuple[int, int, int]:
    """Chunk sizes, batch sizes and ranks that match."""
    size, ranks, times = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 1, 2, 3, 4])), draw(st.integers(1, 4))
    unit = size * ranks
    divisors = [k for k in range(1, unit + 1) if unit % k == 0]
    return draw(st.one_of(st.just(unit * times), st.sampled_from(divisors))), size, ranks


@given(
    division=divisions(), samples=st.integers(1, 60), make=st.sampled_from(SAMPLES), drop_last=st.booleans(),
    skipped=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=60)
def test_batches_are_torchs(division: Any, samples: int, make: Any, drop_last: bool, skipped: bool, seed: int) -> None:
    chunk, size, ranks = division
    chance = random.Random(seed)
    order = chance.sample(range(100), samples)
    lost = {id for id in order if skipped and chance.random() < chance.choice([0.1, 0.5, 0.9])}
    epoch = Epoch(order, chunk, make, lost)
    units = expected_ids(order, size, ranks, drop_last)
    if ranks == 1:  # torch's own rule
        sampler: Any = torch.utils.data.BatchSampler(order, size, drop_last)
        assert [unit[0] for unit in units] == list(sampler)
    for rank in range(ranks):
        rebatching = partial(Rebatching, samples, chunk, size, Ranks(rank, ranks, ranks), drop_last, epoch.planned)
        assert len(rebatching()) == len(units)
        chunks = rebatching().chunks
        assert chunks == -(-min(len(units) * size * ranks, samples) // chunk)
        got = epoch.batches(rebatching(), range(chunks))
        wanted = [[id for id in unit[rank] if id not in lost] for unit in units]
        numbers = [unit for unit, ids in enumerate(wanted) if ids]
        assert sorted(got) == numbers
        assert [got[unit][1] for unit in numbers] == [wanted[unit] for unit in numbers]
        batches: Any = DataLoader(Made(1000, make), batch_sampler=[wanted[unit] for unit in numbers])  # type: ignore[arg-type]
        assert all(same(got[unit][0], batch) for unit, batch in zip(numbers, batches, strict=True))
        done = chance.randint(0, len(units))  # resumed there, no chunk comes that is not needed
        first = rebatching().first_chunk(done)
        assert first == chunks or first * chunk <= done * size * ranks < (first + 1) * chunk
        rest = epoch.batches(rebatching(), range(first, chunks))
        assert all(rest[unit][1] == got[unit][1] for unit in numbers if unit >= done)
    if not lost:
        assert epoch.planned_for == []  # the plan is made only where it is needed


def test_a_chunk_of_the_batch_size_is_passed_on_as_it_is() -> None:
    """Also batches that cannot be split."""
    thing = object()
    rebatching = Rebatching(8, 4, 4, ALONE, False, lambda _: pytest.fail("not needed"))
    assert [got[1] for got in rebatching.feed(0, thing, np.arange(4))] == [thing]
    assert [got[1] for got in rebatching.feed(1, thing, np.arange(3))] == [thing]  # where one was left out
    assert list(rebatching.feed(1, None, np.empty(0, np.int64))) == []


def test_no_copies_where_none_are_needed() -> None:
    data = torch.arange(8)
    rebatching = Rebatching(8, 8, 2, ALONE, False, lambda _: pytest.fail("not needed"))
    for unit, part, _ in rebatching.feed(0, data, np.arange(8)):
        assert part.data_ptr() == data[2 * unit :].data_ptr()


@pytest.mark.parametrize("thing", [3, None, object(), np.arange(4)])
def test_what_cannot_be_divided(thing: Any) -> None:
    name = type(thing).__name__
    with pytest.raises(sf.InputError, match=f"a {name} cannot be split: give"):
        cut([torch.arange(4), thing], 1, 2, 4)
    with pytest.raises(sf.InputError, match=f"a {name} cannot be joined: give"):
        join([[torch.arange(4), thing], [torch.arange(4), thing]])
