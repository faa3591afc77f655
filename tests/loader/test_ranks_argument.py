"""`ranks=`: one order, dealt out among the ranks without a sampler."""

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
from children import Child
from stallfree import StallfreeWarning
from stallfree.datasets import ranks as module
from stallfree.datasets.ranks import agreed
from stallfree.errors import InputError, WaitError

SAMPLES = 22


def loader_of(rank: int, count: int, **options: Any) -> sf.DataLoader:
    return sf.DataLoader(range(SAMPLES), **{"batch_size": 3, "ranks": (rank, count), "seed": 5, **options})


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(lists: list[list[int]]) -> list[int]:
    return [id for ids in lists for id in ids]


@pytest.mark.parametrize(("count", "drop_last"), [(1, False), (2, True), (3, False), (4, True), (30, False)])
def test_in_order_the_samples_are_those_of_a_distributed_sampler(count: int, drop_last: bool) -> None:
    data: Any = range(SAMPLES)
    for rank in range(count):
        sampler = DistributedSampler(data, count, rank, shuffle=False, drop_last=drop_last)
        other = torch.utils.data.DataLoader(data, batch_size=3, sampler=sampler, drop_last=drop_last)
        mine = loader_of(rank, count, drop_last=drop_last)
        assert batches(mine) == batches(other)
        assert len(mine) == len(other)
        assert list(mine.sampler) == list(sampler)
        assert len(mine.sampler) == len(sampler)


def test_shuffled_each_sample_is_on_one_rank() -> None:
    """In each epoch, and in another order; the first ones are repeated so that all ranks have equally many."""
    loaders = [loader_of(rank, 4, shuffle=True) for rank in range(4)]
    epochs = [[flat(batches(loader)) for loader in loaders] for _ in range(2)]
    for parts in epochs:
        assert [len(part) for part in parts] == [6] * 4
        assert set(flat(parts)) == set(range(SAMPLES))
    assert epochs[0] != epochs[1]
    whole = flat(batches(sf.DataLoader(range(SAMPLES), shuffle=True, seed=5)))
    assert [epochs[0][at % 4][at // 4] for at in range(SAMPLES)] == whole


@pytest.mark.parametrize(("size", "drop_last"), [(1, False), (2, False), (2, True), (3, False)])
def test_resumed_from_any_number_of_ranks_with_any_other_at_every_step(size: int, drop_last: bool) -> None:
    """From 1 to 8 ranks each. The model: all ranks take their batches from one order, which goes on where it was."""
    options: dict[str, Any] = {"shuffle": True, "batch_size": size, "drop_last": drop_last}
    order = flat(batches(loader_of(0, 1, shuffle=True, batch_size=1)))
    for count in range(1, 9):
        loader = loader_of(0, count, **options)
        states, served = [], []
        for step, _ in enumerate(loader, 1):
            states.append(loader.state_dict())
            served.append(min(SAMPLES, step * size * count))
        whole = [batches(loader_of(rank, count, **options)) for rank in range(count)]
        for step, (state, done) in enumerate(zip(states, served, strict=True), 1):
            for after in range(1, 9):
                rest = [resumed(state, rank, after, **options) for rank in range(after)]
                assert len({len(each) for each in rest}) == 1  # steps of all ranks
                got, left = flat(flat(rest)), order[done:]  # type: ignore[arg-type]
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
    return batches(loader)


def test_auto_takes_the_ranks_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = sf.DataLoader(range(8), batch_size=2, ranks="auto", seed=1)
    assert batches(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert batches(loader) == [[1, 3], [5, 7]]
    assert len(loader) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": (2, 2)}, r"ranks=\(2, 2\): the rank is counted from 0, so give one from 0 to 1"),
        ({"ranks": (-1, 2)}, r"ranks\[0\]=-1"),
        ({"ranks": "all"}, "ranks='all': give"),
        ({"ranks": "auto", "sampler": [1, 2]}, "ranks='auto' and a sampler were given"),
        ({"ranks": (0, 2), "batch_sampler": [[1]], "batch_size": 1}, "and a sampler were given"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        loader_of(0, 1, **options)


def test_a_window_is_split_by_its_own_sampler() -> None:
    with (
        sf.SmartCacheDataset(range(8), None, cache_num=4, replace_rate=0.5) as data,
        pytest.raises(InputError, match=r"ranks=\(0, 2\) with a SmartCacheDataset.*rank_sampler\(\)"),
    ):
        sf.DataLoader(data, ranks=(0, 2))


def test_a_sampler_around_an_importance_sampler_is_an_error() -> None:
    """Lightning puts one around it, and it would deal out the samples a second time."""
    around: Any = DistributedSampler(range(8), 2, 0)  # type: ignore[arg-type]
    around.dataset = SimpleNamespace(_sampler=sf.ImportanceSampler(8))
    with pytest.raises(InputError, match=r"around the ImportanceSampler.*use_distributed_sampler=False"):
        sf.DataLoader(range(8), sampler=around)


# -- the seed of rank 0 -----------------------------------------------------------------------------------------------


def test_without_a_process_group_the_seed_has_to_be_given() -> None:
    with pytest.raises(InputError, match=r"no process group.*give seed=, the same in all ranks, or call torch\.distr"):
        batches(loader_of(0, 2, seed=None))
    assert len(batches(loader_of(0, 2, seed=7))) == 4
    assert len(batches(loader_of(0, 1, seed=None))) == 8


@pytest.fixture
def two(tmp_path: Path) -> Any:
    """Runs a function in two processes of one gloo group, which ends with them as in `test_importance_ranks`."""

    def run(function: Any) -> None:
        def child(rank: int) -> None:
            where = f"file://{tmp_path / 'store'}"
            torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
            function(rank)
            torch.distributed.barrier()

        children = [Child(child, rank) for rank in range(2)]
        assert [one.wait() for one in children] == [0, 0]

    return run


def test_all_ranks_use_the_seed_of_rank_0(two: Any, tmp_path: Path) -> None:
    def train(rank: int) -> None:
        generator = torch.Generator().manual_seed(100 + rank)
        first = sf.DataLoader(range(SAMPLES), shuffle=True, ranks="auto", generator=generator)
        second = sf.DataLoader(range(SAMPLES), shuffle=True, ranks="auto", seed=10 * rank)
        if rank == 0:  # the order of iterating may differ
            second.state_dict()
        seen = [flat(batches(first)), flat(batches(second))]
        assert second.seed == 0
        (tmp_path / f"{rank}").write_text(repr(seen))

    two(train)
    parts = [eval((tmp_path / f"{rank}").read_text()) for rank in range(2)]
    for number in range(2):
        assert sorted(parts[0][number] + parts[1][number]) == list(range(SAMPLES))


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (0, 2), (1, 2)])
def test_a_state_of_another_seed_is_refused(rank: int, count: int) -> None:
    state = loader_of(rank, count, shuffle=True, seed=1).state_dict()
    with pytest.raises(InputError, match=r"the state was taken with seed=1, this loader has seed=2: give the same"):
        loader_of(rank, count, shuffle=True, seed=2).load_state_dict(state)
    taken = loader_of(rank, count, shuffle=True, seed=None)
    taken.load_state_dict(state)
    assert batches(taken) == batches(loader_of(rank, count, shuffle=True, seed=1))


def test_in_a_group_the_seed_of_rank_0_is_compared_with_that_of_the_state(two: Any) -> None:
    def train(rank: int) -> None:
        def loader(seed: int | None) -> sf.DataLoader:
            return sf.DataLoader(range(SAMPLES), batch_size=3, shuffle=True, ranks="auto", seed=seed)

        first = loader(10 * rank)  # that of rank 0 counts
        iterator = iter(first)
        next(iterator)
        state, rest = first.state_dict(), batches(iterator)
        for seed in (10 * rank, None):
            same = loader(seed)
            same.load_state_dict(state)
            assert batches(same) == rest
            same.load_state_dict(state)  # once more, after its first iteration
            assert batches(same) == rest
        other = loader(5 * (1 - rank))  # on rank 1 the seed of the state, on rank 0 another one
        other.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(InputError, match=r"taken with seed=0, this loader has seed=5: give the same, or none"):
                batches(other)

    two(train)


def test_a_rank_that_waits_for_rank_0_in_vain_says_so(two: Any) -> None:
    def train(rank: int) -> None:
        module.AGREE_SECONDS = 0.05
        if rank == 1:
            with pytest.raises(
                WaitError, match=r"rank 1 has waited 0\.05 s for another rank to set stallfree/some/1.*same order"
            ):
                agreed(1, "some/1")

    two(train)


# -- a warning if each of several ranks has all samples ----------------------------------------------------------------

DATA: Any = range(8)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 1 of 4."""
    for variable, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4"), ("MASTER_PORT", "4716")):
        monkeypatch.setenv(variable, value)


def windowed() -> sf.SmartCacheDataset:
    return sf.SmartCacheDataset(DATA, None, cache_num=4, replace_rate=0.5)


ALL_TO_EACH: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "in order": (dict, r"ranks='auto'.*ranks=\(0, 1\)"),
    "shuffled": (lambda: {"shuffle": True}, r"ranks='auto'.*ranks=\(0, 1\)"),
    "RandomSampler": (lambda: {"sampler": RandomSampler(DATA)}, "DistributedSampler in place of the sampler"),
    "BatchSampler": (lambda: {"batch_sampler": BatchSampler(SequentialSampler(DATA), 2, False)}, "DistributedSampler"),
    "window": (lambda: {"dataset": windowed()}, r"all samples of the window.*sampler=dataset\.rank_sampler\(\)"),
}
DEALT: dict[str, Callable[[], dict[str, Any]]] = {
    "ranks": lambda: {"ranks": "auto", "seed": 1},
    "all are meant": lambda: {"ranks": (0, 1)},
    "all are meant, with a sampler": lambda: {"ranks": (0, 1), "sampler": RandomSampler(DATA)},
    "DistributedSampler": lambda: {"sampler": DistributedSampler(DATA, 4, 1)},
    "in a BatchSampler": lambda: {"batch_sampler": BatchSampler(DistributedSampler(DATA, 4, 1), 2, False)},
    "ids of the user's own": lambda: {"sampler": [4, 5]},
    "ImportanceSampler": lambda: {"sampler": sf.ImportanceSampler(len(DATA)), "batch_size": 2},
    "window": lambda: {"dataset": (data := windowed()), "sampler": data.rank_sampler()},
}


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("case", ALL_TO_EACH)
def test_a_warning_names_the_cure(case: str) -> None:
    make, cure = ALL_TO_EACH[case]
    options = {"dataset": DATA, **make()}
    with (
        sf.DataLoader(**options) as loader,
        pytest.warns(StallfreeWarning, match=f"each of the 4 ranks.*{cure}") as seen,
    ):
        iter(loader)
    assert seen[0].filename == __file__
    close(options)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("case", DEALT)
def test_no_false_warning(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "ImportanceSampler":  # knows its ranks by torch.distributed
        monkeypatch.delenv("RANK"), monkeypatch.delenv("WORLD_SIZE"), monkeypatch.delenv("LOCAL_WORLD_SIZE")
    options = {"dataset": DATA, **DEALT[case]()}
    with warnings.catch_warnings(), sf.DataLoader(**options) as loader:
        warnings.simplefilter("error", StallfreeWarning)
        assert list(loader)
    close(options)


def test_one_rank() -> None:
    with warnings.catch_warnings(), sf.DataLoader(DATA, shuffle=True) as loader:
        warnings.simplefilter("error")
        assert len(list(loader)) == len(DATA)


def close(options: dict[str, Any]) -> None:
    if isinstance(options["dataset"], sf.SmartCacheDataset):
        options["dataset"].close()


def test_without_accelerate_a_loader_needs_no_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate.accelerator", raising=False)
    assert sf.DataLoader(DATA)._is_accelerate_prepared
