"""Importance sampling on two nodes with two ranks each: one plan, drawn from what all of them know and hold."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from nodes import (
    LIMIT,
    Here,
    Nodes,
    Office,
    Stamped,
    Storage,
    close_store,
    is_right,
    offices,
    open_store,
    parts,
    settle,
    stamp,
    until,
)
from redis_servers import needs_server
from torch import distributed

import stallfree as sf
from children import Child
from importance_tools import Residents
from stallfree.cache import MISS
from stallfree.loader.importance import _OnAllNodes
from stallfree.loader.reader import Reader
from stallfree.plans.draws import ranks
from stallfree.plans.serving import Serving
from stallfree.stores import PartitionedCache

pytestmark = needs_server

Array = npt.NDArray[Any]

COUNT = 240
SIZE = 1024  # numbers in a sample, of 8 bytes
BATCH = 6
RANKS, PER_NODE = 4, 2


def half(size: int) -> int:
    """Capacity of a node, so that both hold about half of all samples of so many numbers."""
    return int(0.5 * COUNT / 2 * (size * 8 + 64)) + 40_000


HALF = half(SIZE)


# --- four ranks on two nodes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Office]]:
    """The servers and clerks of two nodes."""
    with offices(tmp_path_factory.mktemp("importance"), RANKS // PER_NODE) as made:
        yield made


class Data:
    """A data set with a cache over two nodes."""

    seed = 0

    def __init__(self, source: Stamped, cache: PartitionedCache) -> None:
        self.cache = cache
        self.reader = Reader(source, cache, source.pipeline, source.pipeline)

    def __len__(self) -> int:
        return COUNT


def join(rank: int, meet: Path) -> None:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank % PER_NODE)
    limit = timedelta(seconds=LIMIT)
    distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS, timeout=limit)


def in_ranks(folder: Path, run: Callable[[int], Any]) -> list[Any]:
    """What `run(rank)` gives in each rank, a process."""

    def main(rank: int) -> None:
        join(rank, folder / "meet")
        (folder / str(rank)).write_bytes(pickle.dumps(run(rank)))
        distributed.destroy_process_group()

    children = [Child(main, rank) for rank in range(RANKS)]
    assert [child.wait() for child in children] == [0] * RANKS
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(RANKS)]


@dataclass(frozen=True)
class Epoch:
    """What a rank saw of an epoch.

    Attributes:
        plan, weights: of all ranks together, as it was told; no weights: None.
        there: what its node held when the plan was drawn.
        batches, given: ids and weights of what it was served.
        losses: of that, which it told.
        reads: of this rank, from storage.
        counts: of its node: how many samples the other node gave.
    """

    plan: list[int]
    weights: list[float] | None
    there: list[int]
    batches: list[list[int]] = field(default_factory=list)
    given: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def served(self) -> list[int]:
        """All ids, in order."""
        return [id for batch in self.batches for id in batch]


@dataclass(frozen=True)
class Ran:
    """What a rank saw: each epoch, the owner of each sample, the requests of its loader, and what it expected."""

    epochs: list[Epoch]
    owner: list[int]
    stats: Any
    expected: int


def loss_of(ids: torch.Tensor, epoch: int) -> torch.Tensor:
    """Differs from sample to sample, and from epoch to epoch."""
    return 0.1 + ((ids * 37 + epoch * 11) % 101).float() / 10


def train(
    data: Any, storage: Storage, *, epochs: int = 4, workers: int = 0, trained: Any = None, **options: Any
) -> Ran:
    """A rank, which keeps in step with the others as in training. `trained(epoch)` is called after each step."""
    cache = data.cache
    sampler = sf.ImportanceSampler(COUNT, cache=cache, seed=3, max_age=20, beta=2, **options)
    context = "fork" if workers else None
    with sf.DataLoader(data, BATCH, sampler=sampler, num_workers=workers, multiprocessing_context=context) as loader:
        ran = [one_epoch(cache, storage, loader, number, trained) for number in range(epochs)]
        stats, expected = loader.importance_stats(), sampler.expected_samples(2, start=1)
    distributed.barrier()
    return Ran(ran, cache.owner(range(COUNT)).tolist(), stats, expected)


def one_epoch(cache: Any, storage: Storage, loader: sf.DataLoader, number: int, trained: Any) -> Epoch:
    """Train it. Nobody waits for samples that are on their way to another node but the sampler itself."""
    sampler: Any = loader.sampler
    steps, plan = len(loader), sampler.plan(number)  # which all ranks draw at the same time
    weights = None if plan.weights is None else plan.weights.tolist()
    epoch = Epoch(plan.ids.tolist(), weights, np.flatnonzero(cache.resident(np.arange(COUNT))).tolist())
    reads, before = len(storage.ids()), cache.stats()
    distributed.barrier()
    for batch in loader:
        values, labels = batch.data
        assert labels.tolist() == batch.ids.tolist()
        assert is_right(values, batch.ids)
        losses = loss_of(batch.ids, number)
        loader.update(batch.ids, losses)
        epoch.batches.append(batch.ids.tolist())
        epoch.given.extend(batch.weights.tolist())
        epoch.losses.extend(losses.tolist())
        distributed.all_reduce(losses.sum())  # as that of the gradients
        if trained is not None:
            trained(number)
    assert len(epoch.batches) == steps
    distributed.barrier()
    epoch.reads.extend(storage.ids()[reads:])
    epoch.counts.append(cache.stats().other_hits - before.other_hits)
    distributed.barrier()
    return epoch


# --- one plan ------------------------------------------------------------------------------------------------------


def together(ran: list[Ran]) -> Iterator[tuple[list[Epoch], set[int]]]:
    """Of each epoch what all ranks saw, and what both nodes held when it was drawn."""
    for epochs in zip(*(rank.epochs for rank in ran), strict=True):
        assert epochs[0].there == epochs[1].there
        assert epochs[2].there == epochs[3].there
        assert not set(epochs[0].there) & set(epochs[2].there)  # no sample is cached twice
        yield list(epochs), {*epochs[0].there, *epochs[2].there}


def model(policy: str, **options: Any) -> sf.ImportanceSampler:
    """The sampler of one process that holds what both nodes hold, and serves all."""
    return sf.ImportanceSampler(
        COUNT, cache=Residents(COUNT, given=policy == "importance"), seed=3, max_age=20, beta=2, **options
    )


CASES = [
    ("unbiased", "minio", None),
    ("unbiased", "importance", None),
    ("icache", "importance", None),
    ("icache", "minio", "substitute"),
]


def check(ran: list[Ran], policy: str, plan: str, on_miss: Any) -> None:
    """Plans, weights, storage reads and hits on the other node, of each epoch, are those that a model predicts."""
    owner, alone = np.array(ran[0].owner), model(policy, plan=plan, on_miss=on_miss)
    hits = 0
    for number, (epochs, there) in enumerate(together(ran)):
        alone.cache.there[:] = np.isin(np.arange(COUNT), list(there))  # type: ignore[union-attr]
        begun = alone.begin(number, BATCH)
        expected = alone.plan(number)
        for epoch in epochs:
            assert epoch.plan == expected.ids.tolist()
            assert epoch.weights == (None if expected.weights is None else expected.weights.tolist())
            assert epoch.given == pytest.approx(begun.served(np.array(epoch.served)).tolist())
            alone.update(epoch.served, epoch.losses)
        begun.end()
        served = [id for epoch in epochs for id in epoch.served]
        assert len(set(served)) == len(served) == len(expected.ids)
        assert on_miss == "substitute" or set(served) == set(epochs[0].plan)
        assert Counter(id for epoch in epochs for id in epoch.reads) == Counter(set(served) - there)
        for node in (0, 1):
            mine = [id for epoch in epochs[2 * node : 2 * node + 2] for id in epoch.served]
            given = sum(owner[id] != node and id in there for id in mine)
            assert epochs[2 * node].counts == epochs[2 * node + 1].counts == [given]
            assert given > 0 or number == 0
        hits += len(set(served) & there)
        assert number == 0 or 0.4 * COUNT < len(there) < 0.6 * COUNT
        if plan == "unbiased" and number > 0:
            assert len(set(served) - there) == pytest.approx(0.25 * (COUNT - len(there)), abs=1)
            assert there <= set(served)
    if plan == "unbiased":
        assert sum(rank.stats.high_hits + rank.stats.low_hits for rank in ran) == hits
        assert all(rank.expected == pytest.approx(len(expected.ids), abs=5) for rank in ran)


@pytest.mark.parametrize(("plan", "policy", "on_miss"), CASES)
def test_all_ranks_of_all_nodes_serve_the_plan_that_one_process_would_draw(
    plan: str, policy: str, on_miss: Any, two: list[Office], tmp_path: Path
) -> None:
    options = {"plan": plan, "on_miss": on_miss}
    with parts(
        two, COUNT, name=f"{plan}-{policy}", capacity=HALF, policy=policy, example=(stamp(0, size=SIZE), 0)
    ) as caches:

        def run(rank: int) -> Ran:
            storage = Storage(tmp_path / f"reads{rank}")
            return train(Data(Stamped(COUNT, storage, size=SIZE), caches[rank // PER_NODE]), storage, **options)

        ran = in_ranks(tmp_path, run)
    check(ran, policy, plan, on_miss)
    if policy == "importance":
        check_changes(ran, plan)


def check_changes(ran: list[Ran], plan: str) -> None:
    """Each node lets go and takes in by the scores of the plan, whichever node's ranks served the samples."""
    alone, elsewhere = sf.ImportanceSampler(COUNT), 0
    epochs = list(together(ran))
    for number, ((before, _), (after, _)) in enumerate(pairwise(epochs)):
        importance = ranks(alone.losses.last)
        served = [{id for epoch in before[2 * node : 2 * node + 2] for id in epoch.served} for node in (0, 1)]
        for node in (0, 1):
            old, new = set(before[2 * node].there), set(after[2 * node].there)
            gone, came = old - new, new - old
            if number == 0:  # it fills the caches
                continue
            assert len(gone) == len(came) > 0
            assert came <= served[0] | served[1]
            if plan == "unbiased":
                assert gone <= served[0] | served[1]
                elsewhere += len(gone & served[1 - node])
            else:
                worst, best = (np.sort(importance[list(some)]) for some in (gone, came))
                assert (worst < best).all()
        for epoch in before:
            alone.update(epoch.served, epoch.losses)
    assert plan != "unbiased" or elsewhere > 0


def pid_of(office: Office) -> int:
    """The process of its clerk."""
    assert office.clerk is not None
    return office.clerk.pid


def test_nobody_stores_before_the_scores_of_an_epoch_are_told(two: list[Office], tmp_path: Path) -> None:
    """A node that is slow to tell its cache would lose samples before their turn to what others hand in."""
    with parts(two, COUNT, capacity=HALF, policy="importance", example=(stamp(0, size=SIZE), 0)) as caches:

        def run(rank: int) -> Ran:
            storage, cache = Storage(tmp_path / f"reads{rank}"), caches[rank // PER_NODE]
            told = cache.set_scores

            def tell(ids: Any, scores: Any) -> None:
                if len(ids) == COUNT:
                    time.sleep(0.3)
                told(ids, scores)

            if rank == PER_NODE:
                cache.set_scores = tell  # type: ignore[method-assign]
            return train(Data(Stamped(COUNT, storage, size=SIZE), cache), storage, epochs=6)

        check(in_ranks(tmp_path, run), "importance", "unbiased", None)


def test_what_is_on_its_way_to_another_node_is_resident_when_the_plan_is_drawn(
    two: list[Office], tmp_path: Path
) -> None:
    """Also if a rank comes late to draw it, and the clerk of the other node is slow to put away."""
    with parts(two, COUNT, example=(stamp(0, size=SIZE), 0)) as caches:

        def run(rank: int) -> Any:
            sampler = sf.ImportanceSampler(COUNT, cache=caches[rank // PER_NODE], seed=1)
            if rank == 0:
                time.sleep(0.2)  # the others look before, if they do not wait for this rank
                clerk = pid_of(two[1])
                os.kill(clerk, signal.SIGSTOP)
                caches[0].put_many(range(COUNT), [(stamp(id, size=SIZE), id) for id in range(COUNT)])
                threading.Timer(0.2, os.kill, (clerk, signal.SIGCONT)).start()
            sampler.plan(1)
            assert sampler._draw is not None
            return int(sampler._draw.resident.sum())

        assert in_ranks(tmp_path, run) == [COUNT] * RANKS


# --- whole jobs ----------------------------------------------------------------------------------------------------


def join_job(here: Here) -> None:
    """Be one of the ranks, on one of the hosts of a job."""
    node = here.number // PER_NODE
    os.environ.update(GROUP_RANK=str(node), GROUP_WORLD_SIZE=str(RANKS // PER_NODE))
    os.environ.update(STALLFREE_ROOT=str(here.folder / f"node{node}"))
    join(here.number, here.folder / "ranks")
    open_store(here)


def leave_job(here: Here) -> None:
    """Be none any more."""
    here.meet()
    close_store(here)
    distributed.destroy_process_group()


def train_job(here: Here, name: str, policy: str, packages: bool, **options: Any) -> Ran:
    """A rank with all that belongs to it."""
    size = 32 * SIZE if packages else SIZE  # four of them fill a package
    source = Stamped(COUNT, here.storage(name), size=size)
    if packages:
        options["packages"] = here.folder / f"packages{here.number // PER_NODE}"
    with sf.CachedDataset(source, capacity=half(size), policy=policy, store=here.store, name=name) as dataset:
        return train(dataset, here.storage(name), epochs=8, workers=2, **options)


@pytest.fixture(scope="module")
def job() -> Iterator[Nodes]:
    """Four ranks on two hosts, which have opened the store."""
    with Nodes(RANKS) as nodes:
        nodes.run(join_job)
        yield nodes
        nodes.run(leave_job)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "policy", "on_miss"), CASES)
def test_a_job_with_workers_serves_that_plan_too(plan: str, policy: str, on_miss: Any, job: Nodes) -> None:
    ran = job.run(train_job, f"{plan}-{policy}", policy, False, plan=plan, on_miss=on_miss)
    check(ran, policy, plan, on_miss)
    if policy == "importance":
        check_changes(ran, plan)


@pytest.mark.slow
def test_packages_are_made_of_samples_that_no_node_holds(job: Nodes) -> None:
    ran = job.run(train_job, "packages", "importance", True, plan="icache")
    for epochs, there in together(ran):
        served = [id for epoch in epochs for id in epoch.served]
        assert len(set(served)) == len(served)
        assert set(served) == set(epochs[0].plan)
        assert not {id for epoch in epochs for id in epoch.reads} & there
    assert sum(rank.stats.samples_packed for rank in ran) > 0


# --- a node that is lost -------------------------------------------------------------------------------------------


QUICK = 0.5
"""Seconds until a node that is silent counts as lost. One that is only slow may then be too, which costs reads."""


def test_what_a_lost_node_holds_counts_as_missing_until_it_is_back(tmp_path: Path) -> None:
    with offices(tmp_path, 2) as two, parts(two, COUNT, timeout=QUICK) as caches:
        ids, own = np.arange(COUNT), caches[0].here(np.arange(COUNT))
        caches[0].put_many(ids, [(stamp(id), id) for id in range(COUNT)])
        settle(caches)
        residents = _OnAllNodes(caches[0], np.ones(COUNT, bool))
        until(lambda: residents.resident(ids).all(), "no node is lost")
        assert serve(residents, "substitute") == (24, 0, 24)
        two[1].kill_clerk()
        assert all(value is MISS for value in caches[0].ask(ids[~own]))
        assert caches[0].lost(ids).tolist() == (~own).tolist()
        assert residents.resident(ids).tolist() == own.tolist()
        here = int(own[:24].sum())
        assert 0 < here < 24
        assert serve(residents, "substitute") == (here, 24 - here, 24)
        assert serve(residents, "fetch") == (here, 0, here)
        two[1].start_clerk()
        until(lambda: residents.resident(ids).all(), "the node is back")
        assert serve(residents, "substitute") == (24, 0, 24)


def serve(residents: Any, on_miss: str) -> tuple[int, int, int]:
    """The first 24 samples, all of them L-samples: hits, substitutions, and how many are served that are at hand."""
    batches = np.arange(24).reshape(4, 6)
    serving = Serving(list(batches), np.ones(COUNT, bool), residents, on_miss, np.random.default_rng(0))
    served = np.concatenate(list(serving))
    assert len(set(served.tolist())) == 24
    return serving.low_hits, serving.substitutions, int(residents.resident(served).sum())


@pytest.mark.parametrize(("plan", "on_miss"), [("unbiased", None), ("icache", "substitute")])
def test_a_node_that_is_lost_costs_reads_and_nothing_else(plan: str, on_miss: Any, tmp_path: Path) -> None:
    """Its clerk dies in epoch 1; in epoch 2 the ranks of the other node read from storage what only it holds."""
    options: dict[str, Any] = {"capacity": HALF, "example": (stamp(0, size=SIZE), 0), "timeout": QUICK}
    with offices(tmp_path, 2) as two, parts(two, COUNT, **options) as caches:

        def run(rank: int) -> Ran:
            storage = Storage(tmp_path / f"reads{rank}")

            def trained(epoch: int) -> None:
                if rank == 0 and epoch == 1:
                    os.kill(pid_of(two[1]), signal.SIGKILL)  # a zombie does not mind to be killed once more

            data = Data(Stamped(COUNT, storage, size=SIZE), caches[rank // PER_NODE])
            return train(data, storage, trained=trained, epochs=3, plan=plan, on_miss=on_miss)

        ran = in_ranks(tmp_path, run)
    owner = np.array(ran[0].owner)
    lost = 0
    for number, (epochs, there) in enumerate(together(ran)):
        served = [id for epoch in epochs for id in epoch.served]
        assert all(epoch.plan == epochs[0].plan for epoch in epochs)
        assert len(set(served)) == len(served) == len(epochs[0].plan)
        for rank, epoch in enumerate(epochs):
            missing = [id for id in epoch.served if id not in there]
            away = [id for id in epoch.served if id in there and owner[id] != rank // PER_NODE]
            read = Counter(epoch.reads)
            assert Counter(missing) <= read <= Counter(missing + away)
            if number == 2 and rank < PER_NODE:
                assert read == Counter(missing + away)
                lost += len(away)
    assert lost > 0
