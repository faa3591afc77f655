"""Importance sampling with four ranks on two nodes: one plan, drawn from what all know and what the servers hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from nodes import LIMIT, Here, Nodes, Stamped, close_store, is_right, open_store
from stallfree.stores import servers_of
from torch import distributed

import stallfree as sf
from importance_tools import Residents
from redis_servers import needs_server

pytestmark = needs_server

COUNT = 240
SIZE = 6144
"""Numbers in a sample, of 8 bytes: 11 MiB in all."""
SMALL = "5MiB"
"""Memory of a server, of which it needs about 1 MiB itself: both hold about half of the samples."""
BATCH = 6
RANKS, PER_NODE = 4, 2


@pytest.fixture(scope="module")
def job() -> Iterator[Nodes]:
    """Four ranks on two nodes."""
    with Nodes(RANKS // PER_NODE, PER_NODE) as nodes:
        nodes.run(join)
        yield nodes
        nodes.run(leave)


def join(here: Here) -> None:
    """Be one of the ranks."""
    meet, limit = f"file://{here.folder / 'ranks'}", timedelta(seconds=LIMIT)
    distributed.init_process_group("gloo", init_method=meet, rank=here.number, world_size=here.count, timeout=limit)


def leave(here: Here) -> None:
    """Be none any more."""
    here.meet()
    distributed.destroy_process_group()


@dataclass(frozen=True)
class Epoch:
    """What a rank saw of an epoch.

    Attributes:
        plan, weights: of all ranks together; no weights: None.
        there: ids that the servers held when the plan was drawn.
        keys: samples that were found on the servers then.
        served, given: ids and weights of its batches.
        losses: of these.
        reads: of this rank, from storage.
        rejected: samples for which this node has found no room so far.
    """

    plan: list[int]
    weights: list[float] | None
    there: list[int]
    keys: int
    served: list[int] = field(default_factory=list)
    given: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)


def make(here: Here, name: str, policy: str, capacity: str, timeout: float, workers: int, **options: Any) -> list[int]:
    """Make store, data set, sampler and loader of a rank; the owner of each sample."""
    open_store(here, name=name, capacity_per_node=capacity, timeout=timeout)
    source = Stamped(COUNT, here.storage(name), size=SIZE)
    dataset = sf.CachedDataset(source, capacity=0, policy=policy, store=here.store, name=name)
    sampler = sf.ImportanceSampler(COUNT, cache=dataset.cache, seed=3, max_age=20, beta=2, **options)
    context = "fork" if workers else None
    loader = sf.DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers, multiprocessing_context=context)
    here.kept |= {"dataset": dataset, "loader": loader, "name": name}
    dataset.cache.flush()  # type: ignore[union-attr]
    here.meet()
    owners: list[int] = servers_of(dataset.cache).owner(range(COUNT)).tolist()  # type: ignore[union-attr]
    return owners


def end(here: Here) -> Any:
    """Close all of it; what the loader counted."""
    loader = here.kept.pop("loader")
    stats = loader.importance_stats()
    loader.close()
    here.meet()
    here.kept.pop("dataset").close()
    close_store(here)
    return stats


def loss_of(ids: torch.Tensor, epoch: int) -> torch.Tensor:
    """Differs from sample to sample, and from epoch to epoch."""
    return 0.1 + ((ids * 37 + epoch * 11) % 101).float() / 10


def train(here: Here, number: int) -> Epoch:
    """Train an epoch in step with the other ranks, and wait until all that was read is stored."""
    loader, cache = here.kept["loader"], here.kept["dataset"].cache
    plan = loader.sampler._drawn_for(number).plan  # which all ranks draw at the same time
    steps = len(loader)
    weights = None if plan.weights is None else plan.weights.tolist()
    assert loader.sampler._draw is not None
    there = np.flatnonzero(loader.sampler._draw.resident).tolist()
    epoch = Epoch(plan.ids.tolist(), weights, there, cache.num_keys())
    reads = len(here.storage(here.kept["name"]).ids())
    distributed.barrier()
    for batch in loader:
        values, labels = batch.data
        assert labels.tolist() == batch.ids.tolist()
        assert is_right(values, batch.ids)
        losses = loss_of(batch.ids, number)
        loader.update(batch.ids, losses)
        epoch.served.extend(batch.ids.tolist())
        epoch.given.extend(batch.weights.tolist())
        epoch.losses.extend(losses.tolist())
        distributed.all_reduce(losses.sum())  # as that of the gradients
        steps -= 1
    assert steps == 0
    cache.flush()
    cache.drain(np.arange(COUNT))
    distributed.barrier()
    epoch.reads.extend(here.storage(here.kept["name"]).ids()[reads:])
    epoch.rejected.append(cache.stats().rejected)
    return epoch


# --- one plan -------------------------------------------------------------------------------------------------------


CASES = [
    ("unbiased", "importance", None, 0),
    pytest.param("icache", "minio", "substitute", 0, marks=pytest.mark.slow),
    pytest.param("unbiased", "minio", None, 0, marks=pytest.mark.slow),
    pytest.param("icache", "importance", None, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("plan", "policy", "on_miss", "workers"), CASES)
def test_all_ranks_serve_the_plan_of_one_process_that_knows_everything(
    plan: str, policy: str, on_miss: Any, workers: int, job: Nodes
) -> None:
    options = {"plan": plan, "on_miss": on_miss}
    owner = job.run(make, f"{plan}-{policy}-{workers}", policy, SMALL, 10.0, workers, **options)
    assert all(one == owner[0] for one in owner)
    epochs = [job.run(train, number) for number in range(4)]
    stats = job.run(end)
    alone = model(policy, **options)
    for number, ran in enumerate(epochs):
        check(ran, number, alone)
        there, served = set(ran[0].there), {id for epoch in ran for id in epoch.served}
        assert {epoch.keys for epoch in ran} == {len(there)}  # each sample is on one server only
        assert Counter(id for epoch in ran for id in epoch.reads) == Counter(served - there)
        assert number == 0 or 0.3 * COUNT < len(there) < 0.8 * COUNT
        if plan == "unbiased" and number > 0:
            assert len(served - there) == pytest.approx(0.25 * (COUNT - len(there)), abs=1)
            assert there <= served
    assert epochs[-1][0].rejected > [0] or policy == "importance"
    if plan == "unbiased":
        hits = sum(len({*ran[0].there} & {*epoch.served}) for ran in epochs for epoch in ran)
        assert sum(rank.high_hits + rank.low_hits for rank in stats) == hits


def model(policy: str, **options: Any) -> sf.ImportanceSampler:
    """The sampler of one process that serves all."""
    residents = Residents(COUNT, given=policy == "importance")
    return sf.ImportanceSampler(COUNT, cache=residents, seed=3, max_age=20, beta=2, **options)


def check(ran: list[Epoch], number: int, alone: sf.ImportanceSampler) -> None:
    """Plan and weights of an epoch are those of one process that has what the servers hold."""
    there = ran[0].there
    alone.cache.there[:] = np.isin(np.arange(COUNT), there)  # type: ignore[union-attr]
    begun = alone.begin(number, BATCH)
    expected = alone.plan(number)
    for epoch in ran:
        assert epoch.there == there
        assert epoch.plan == expected.ids.tolist()
        assert epoch.weights == (None if expected.weights is None else expected.weights.tolist())
        assert epoch.given == pytest.approx(begun.served(np.array(epoch.served)).tolist())
        alone.update(epoch.served, epoch.losses)
    begun.end()
    served = [id for epoch in ran for id in epoch.served]
    assert len(set(served)) == len(served) == len(expected.ids)
    assert alone.on_miss == "substitute" or set(served) == set(expected.ids.tolist())


# --- a server that is lost ------------------------------------------------------------------------------------------
