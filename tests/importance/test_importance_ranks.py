"""Several ranks of torch.distributed, each a process: one plan for all, of which each serves its part."""

import json
from collections.abc import Callable
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

import stallfree as sf
from importance_tools import Drifting, Residents
from process_ranks import in_ranks, join

COUNT = 97
SAMPLES = list(range(COUNT))


def in_group(count: int, folder: Path, run: Callable[[int], Any]) -> list[Any]:
    """What `run(rank)` gives in each rank of a process group, fit for JSON."""

    def main(rank: int) -> Any:
        join(rank, count, folder)
        result = run(rank)
        distributed.barrier()
        return result

    return in_ranks(count, folder, main)


def make(rank: int, plan: str, on_miss: str, *, residents: str = "drifting", **arguments: Any) -> sf.DataLoader:
    cache: Any = Drifting(COUNT, rank) if residents == "drifting" else Residents(COUNT, range(rank, 60 + rank))
    sampler = sf.ImportanceSampler(COUNT, plan=plan, cache=cache, on_miss=on_miss, max_age=3, beta=2)
    return sf.DataLoader(SAMPLES, 5, sampler=sampler, **arguments)


def take(loader: sf.DataLoader, batches: Any, rng: np.random.Generator) -> list[tuple[list[int], list[float]]]:
    """Ids and weights of some batches, whose samples get losses."""
    taken = []
    for batch in batches:
        assert batch.data.tolist() == batch.ids.tolist()
        taken.append((batch.ids.tolist(), batch.weights.tolist()))
        loader.update(batch.ids, rng.exponential(size=len(batch.ids)) * (1 + batch.data.numpy()))
    return taken


def train(loader: sf.DataLoader, epochs: range, rank: int, *, save: bool = False) -> list[Any]:
    """Of each epoch: the plan, the batches, their weights, and how many were expected. Losses differ by rank."""
    rng, found = np.random.default_rng(rank), []
    for epoch in epochs:
        assert isinstance(loader.sampler, sf.ImportanceSampler)
        left: Any = iter(loader)
        steps, plan, taken = len(loader), loader.sampler.plan(epoch), []
        if save and epoch == 1:
            taken = take(loader, islice(left, 2), rng)
            state = json.loads(json.dumps(loader.state_dict()))
            left = loader = make(rank, loader.sampler.rule.plan, loader.sampler.on_miss)
            loader.load_state_dict(state)
            assert loader.sampler.plan(epoch).ids.tolist() == plan.ids.tolist()
        taken += take(loader, left, rng)
        weights = [] if plan.weights is None else plan.weights.tolist()
        given = [weight for _, of_batch in taken for weight in of_batch]
        found.append((plan.ids.tolist(), weights, [ids for ids, _ in taken], given, steps))
    return found


def check(ranks: list[Any], on_miss: str) -> None:
    for each in zip(*ranks, strict=True):
        plans, weights, batches, given, steps = zip(*each, strict=True)
        assert all((plan, other) == (plans[0], weights[0]) for plan, other in zip(plans, weights, strict=True))
        assert len({len(part) for part in batches} | set(steps)) == 1
        sizes = [len(batch) for part in batches for batch in part]
        assert max(sizes) <= min(5, 1 + min(sizes))
        served = [*chain(*chain(*batches))]
        assert len(set(served)) == len(served) == len(plans[0])
        if on_miss != "substitute":
            assert set(served) == set(plans[0])
        if weights[0]:
            scale = 1 if 0 in weights[0] else len(plans[0]) / COUNT
            of = dict(zip(plans[0], weights[0], strict=True))
            assert [*chain(*given)] == pytest.approx([of[id] * scale for id in served])


SLOW = pytest.param(3, "infobatch", "fetch", marks=pytest.mark.slow)


@pytest.mark.parametrize(("count", "plan", "on_miss"), [(3, "unbiased", "swap"), (2, "icache", "substitute"), SLOW])
def test_all_ranks_have_one_plan_and_serve_it_exactly_once(count: int, plan: str, on_miss: str, tmp_path: Path) -> None:
    """With other losses, residents and states of torch's generator at each rank."""
    ranks = in_group(count, tmp_path, lambda rank: train(make(rank, plan, on_miss), range(4), rank))
    check(ranks, on_miss)
    assert len(ranks[0][1][0]) < COUNT
    assert len({tuple(sorted(epoch[0])) for epoch in ranks[0][1:]}) > 1


def test_all_ranks_resume_in_mid_epoch(tmp_path: Path) -> None:
    """Losses that were told to one rank only when the state was taken reach the others."""
    check(in_group(2, tmp_path, lambda rank: train(make(rank, "icache", "swap"), range(4), rank, save=True)), "swap")


def test_losses_are_brought_together(tmp_path: Path) -> None:
    """Each rank knows the last losses of all; of a sample that two had, the mean; residents are those of all."""

    def run(rank: int) -> Any:
        sampler = sf.ImportanceSampler(COUNT, cache=Residents(COUNT, [0, 1, 2, 10 + rank]), seed=1)
        iter(sampler)
        sampler.update([3 + rank, 9], [10.0 + rank, 4.0 * rank])
        iter(sampler)
        first = sampler.plan(1).ids.tolist()
        told = sampler.losses.last.copy()
        sampler.update([20], [float(rank)])
        iter(sampler)
        sampler.update([4], [50.0] if rank else [np.inf])
        iter(sampler)
        return first, told.tolist(), sampler.losses.last.tolist(), sampler._draw.resident.nonzero()[0].tolist()

    one, two = in_group(2, tmp_path, run)
    assert one == two
    plan, told, last, resident = one
    assert {id: loss for id, loss in enumerate(told) if loss < np.inf} == {3: 10.0, 4: 11.0, 9: 2.0}
    assert (last[20], last[3], last[4]) == (0.5, 10.0, 50.0), "a loss that is no number is left out"
    assert resident == [0, 1, 2]
    assert {0, 1, 2} <= set(plan)


def importance_cached() -> sf.DataLoader:
    data = sf.CachedDataset(SAMPLES, capacity="1MiB", policy="importance", name="reading")
    return sf.DataLoader(data, 4, sampler=sf.ImportanceSampler(COUNT, cache=data.cache))


def window() -> sf.DataLoader:
    data = sf.SmartCacheDataset(SAMPLES, cache_num=20, replace_rate=0.5, name="reading-window", seed=1)
    return sf.DataLoader(data, 4, sampler=data.rank_sampler())


LOADERS: dict[str, Callable[[], sf.DataLoader]] = {
    "order": lambda: sf.DataLoader(SAMPLES, 4, shuffle=True, ranks="auto"), "window": window,
    "importance": lambda: sf.DataLoader(SAMPLES, 4, sampler=sf.ImportanceSampler(COUNT, plan="icache", beta=2)),
    "importance with a cache": importance_cached,
}  # fmt: skip


def read(loader: sf.DataLoader) -> int:
    """Reads what a loader and its sampler show; returns the length."""
    for shown in (loader, loader.sampler, loader.dataset):
        repr(shown)
    loader.state_dict(), loader.stats(), loader.seed, loader.decision, loader.cached, loader.batch_sampler
    sampler: Any = loader.sampler
    assert len(sampler) <= COUNT
    if isinstance(sampler, sf.ImportanceSampler):
        sampler.next_epoch, sampler.state_dict(), sampler.expected_samples(5), loader.importance_stats()
    return len(loader)


@pytest.mark.parametrize("kind", LOADERS)
def test_one_rank_alone_may_read_between_collective_operations(kind: str, tmp_path: Path) -> None:
    def run(rank: int) -> list[Any]:
        def sum_of_ranks() -> float:
            total = torch.ones(1)
            distributed.all_reduce(total)
            return total.item()

        found = []
        with closing(LOADERS[kind]()) as loader:
            for _ in range(3):
                before = read(loader) if rank == 0 else 0
                assert sum_of_ranks() == 2
                iterator = iter(loader)
                during = read(loader) if rank == 1 else len(loader)
                assert sum_of_ranks() == 2
                ids = []
                for batch in iterator:
                    served = getattr(batch, "ids", batch)
                    ids.append(served.tolist())
                    if isinstance(batch, sf.Batch):
                        loader.update(served, served.float() + rank)
                    if rank == 0:
                        assert read(loader) == during
                    assert sum_of_ranks() == 2
                assert len(ids) == during
                found.append((before, during, ids))
        getattr(loader.dataset, "close", int)()
        return found

    one, other = in_group(2, tmp_path, run)
    lengths = [during for _, during, _ in one]
    assert [during for _, during, _ in other] == lengths
    assert one[0][0] == lengths[0]
    if kind == "importance":  # shorter epochs: the length of the last one counts until the next one begins
        assert [before for before, _, _ in one] == [lengths[0], lengths[0], lengths[1]]
        assert lengths[2] < lengths[0]
