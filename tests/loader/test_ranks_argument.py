"""`ranks=`: one order, dealt out among the ranks without a sampler."""

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

import stallfree as sf
from loader_data import lists_of, values_of
from process_ranks import in_ranks, join
from stallfree import StallfreeWarning
from stallfree.datasets import ranks as module
from stallfree.datasets.ranks import agreed
from stallfree.errors import InputError, WaitError

SAMPLES = 22
DATA: Any = range(8)


def windowed() -> sf.SmartCacheDataset:
    return sf.SmartCacheDataset(DATA, None, cache_num=4, replace_rate=0.5)


def loader_of(rank: int, count: int, **options: Any) -> sf.DataLoader:
    return sf.DataLoader(range(SAMPLES), **{"batch_size": 3, "ranks": (rank, count), "seed": 5, **options})


@pytest.mark.parametrize(("count", "drop_last"), [(1, False), (2, True), (3, False), (4, True), (30, False)])
def test_in_order_the_samples_are_those_of_a_distributed_sampler(count: int, drop_last: bool) -> None:
    data: Any = range(SAMPLES)
    for rank in range(count):
        sampler = DistributedSampler(data, count, rank, shuffle=False, drop_last=drop_last)
        other = torch.utils.data.DataLoader(data, batch_size=3, sampler=sampler, drop_last=drop_last)
        mine = loader_of(rank, count, drop_last=drop_last)
        assert (lists_of(mine), len(mine)) == (lists_of(other), len(other))
        assert (list(mine.sampler), len(mine.sampler)) == (list(sampler), len(sampler))
        assert (mine.sampler.rank, mine.sampler.num_replicas) == (rank, count)


def test_shuffled_each_sample_is_on_one_rank() -> None:
    """In each epoch; the first ones are repeated so that all ranks have equally many."""
    loaders = [loader_of(rank, 4, shuffle=True) for rank in range(4)]
    whole = sf.DataLoader(range(SAMPLES), shuffle=True, seed=5)
    for _ in range(2):
        parts, order = [values_of(loader) for loader in loaders], values_of(whole)
        assert parts == [(order + order[:2])[rank::4] for rank in range(4)]


@pytest.mark.parametrize(("size", "drop_last"), [(1, False), (2, False), (2, True), (3, False)])
def test_resumed_from_any_number_of_ranks_with_any_other_at_every_step(size: int, drop_last: bool) -> None:
    """From 1 to 8 ranks each. The model: all ranks take their batches from one order, which goes on where it was."""
    options: dict[str, Any] = {"shuffle": True, "batch_size": size, "drop_last": drop_last}
    order = values_of(loader_of(0, 1, shuffle=True, batch_size=1))
    for count in range(1, 9):
        loader = loader_of(0, count, **options)
        states, served = [], []
        for step, _ in enumerate(loader, 1):
            states.append(loader.state_dict())
            served.append(min(SAMPLES, step * size * count))
        whole = [lists_of(loader_of(rank, count, **options)) for rank in range(count)]
        for step, (state, done) in enumerate(zip(states, served, strict=True), 1):
            for after in range(1, 9):
                rest = [resumed(state, rank, after, **options) for rank in range(after)]
                assert len({len(each) for each in rest}) == 1  # steps of all ranks
                got, left = [id for each in rest for id in values_of(each)], order[done:]
                if after == count:
                    assert rest == [each[step:] for each in whole]
                elif drop_last:
                    assert len(set(got)) == len(got)
                    assert set(got) <= set(left)
                    assert len(left) - len(got) < size * after
                else:
                    assert set(got) == set(left)
                    assert len(got) == -(-len(left) // after) * after  # some are repeated, for equal steps


def resumed(state: dict[str, Any], rank: int, count: int, **options: Any) -> list[list[int]]:
    loader = loader_of(rank, count, **options)
    loader.load_state_dict(state)
    return lists_of(loader)


def test_auto_takes_the_ranks_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = sf.DataLoader(range(8), batch_size=2, ranks="auto", seed=1)
    assert lists_of(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    monkeypatch.setenv("RANK", "1"), monkeypatch.setenv("WORLD_SIZE", "2")
    assert (lists_of(loader), len(loader)) == ([[1, 3], [5, 7]], 2)


def around_importance() -> Any:
    """What Lightning puts around such a sampler, and what would deal out the samples a second time."""
    around: Any = DistributedSampler(DATA, 2, 0)
    around.dataset = SimpleNamespace(_sampler=sf.ImportanceSampler(8))
    return around


@pytest.mark.parametrize(("options", "said"), [
    ({"ranks": (2, 2)}, r"ranks=\(2, 2\): give 'auto' or \(rank, number of ranks\), counted from 0"),
    ({"ranks": (-1, 2)}, r"ranks=\(-1, 2\): give"), ({"ranks": "all"}, "ranks='all': give"),
    ({"ranks": "auto", "sampler": [1, 2]}, "ranks='auto' and a sampler were given"),
    ({"ranks": (0, 2), "batch_sampler": [[1]]}, "and a sampler were given"),
    ({"sampler": around_importance()}, "around the ImportanceSampler.*use_distributed_sampler=False"),
])  # fmt: skip
def test_arguments_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        sf.DataLoader(DATA, **options)


def test_a_window_is_split_by_its_own_sampler() -> None:
    said = r"ranks=\(0, 2\) with a SmartCacheDataset.*rank_sampler\(\)"
    with windowed() as data, pytest.raises(InputError, match=said):
        sf.DataLoader(data, ranks=(0, 2))


def test_without_a_process_group_the_seed_has_to_be_given() -> None:
    with pytest.raises(InputError, match=r"no process group.*give seed=, the same in all ranks, or call torch\.distr"):
        lists_of(loader_of(0, 2, seed=None))
    assert len(lists_of(loader_of(0, 2, seed=7))) == 4
    assert len(lists_of(loader_of(0, 1, seed=None))) == 8


def test_all_ranks_use_the_seed_of_rank_0(tmp_path: Path) -> None:
    """It is compared with that of a state; and a rank that waits for it in vain says so."""

    def train(rank: int) -> Any:
        join(rank, 2, tmp_path)

        def loader(seed: int | None) -> sf.DataLoader:
            return sf.DataLoader(range(SAMPLES), batch_size=3, shuffle=True, ranks="auto", seed=seed)

        generator = torch.Generator().manual_seed(100 + rank)
        drawn = sf.DataLoader(range(SAMPLES), shuffle=True, ranks="auto", generator=generator)
        first = loader(10 * rank)
        if rank == 0:  # the order of iterating may differ
            first.state_dict()
        orders = values_of(drawn), values_of(first)
        assert first.seed == 0
        iterator = iter(first)
        next(iterator)
        state, rest = first.state_dict(), lists_of(iterator)
        for seed in (10 * rank, None):
            same = loader(seed)
            for _ in range(2):  # also after its first iteration
                same.load_state_dict(state)
                assert lists_of(same) == rest
        other = loader(5 * (1 - rank))  # on rank 1 the seed of the state, on rank 0 another one
        other.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(InputError, match=r"taken with seed=0, this loader has seed=5: give the same, or none"):
                lists_of(other)
        module.AGREE_SECONDS = 0.05
        if rank == 1:
            with pytest.raises(WaitError, match=r"rank 1 has waited 0\.05 s .* to set stallfree/some/1.*same order"):
                agreed(1, "some/1")
        torch.distributed.barrier()
        return orders

    for one, other in zip(*in_ranks(2, tmp_path, train), strict=True):
        assert sorted(one + other) == list(range(SAMPLES))


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 2)])
def test_a_state_of_another_seed_is_refused(rank: int, count: int) -> None:
    state = loader_of(rank, count, shuffle=True, seed=1).state_dict()
    with pytest.raises(InputError, match=r"the state was taken with seed=1, this loader has seed=2: give the same"):
        loader_of(rank, count, shuffle=True, seed=2).load_state_dict(state)
    taken = loader_of(rank, count, shuffle=True, seed=None)
    taken.load_state_dict(state)
    assert lists_of(taken) == lists_of(loader_of(rank, count, shuffle=True, seed=1))


ALL = r"ranks='auto'.*ranks=\(0, 1\)"
CASES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "in order": (dict, ALL), "shuffled": (lambda: {"shuffle": True}, ALL),
    "RandomSampler": (lambda: {"sampler": RandomSampler(DATA)}, "DistributedSampler in place of the sampler"),
    "BatchSampler": (lambda: {"batch_sampler": BatchSampler(SequentialSampler(DATA), 2, False)}, "DistributedSampler"),
    "window": (lambda: {"dataset": windowed()}, r"all samples of the window.*sampler=dataset\.rank_sampler\(\)"),
    "ranks": (lambda: {"ranks": "auto", "seed": 1}, ""), "all are meant": (lambda: {"ranks": (0, 1)}, ""),
    "all are meant, with a sampler": (lambda: {"ranks": (0, 1), "sampler": RandomSampler(DATA)}, ""),
    "in a BatchSampler": (lambda: {"batch_sampler": BatchSampler(DistributedSampler(DATA, 4, 1), 2, False)}, ""),
    "ids of the user's own": (lambda: {"sampler": [4, 5]}, ""),
    "window, ranks": (lambda: {"dataset": (data := windowed()), "sampler": data.rank_sampler()}, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_warning_names_the_cure(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 1 of 4."""
    for variable, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4"), ("MASTER_PORT", "4716")):
        monkeypatch.setenv(variable, value)
    make, cure = CASES[case]
    options = {"dataset": DATA, **make()}
    with warnings.catch_warnings(record=True) as caught, sf.DataLoader(**options) as loader:
        warnings.simplefilter("always", StallfreeWarning)
        assert list(loader)
    if isinstance(options["dataset"], sf.SmartCacheDataset):
        options["dataset"].close()
    assert len(caught) == bool(cure)
    for warning in caught:
        assert re.search(f"each of the 4 ranks.*{cure}", str(warning.message))
        assert warning.filename == __file__


def test_without_accelerate_a_loader_needs_no_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate.accelerator", raising=False)
    assert sf.DataLoader(DATA)._is_accelerate_prepared
