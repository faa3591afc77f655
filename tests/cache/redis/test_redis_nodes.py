"""Training on two nodes with a server each: which samples come, from where, and what one node learns of another."""

import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed
from torch.utils.data.distributed import DistributedSampler

import stallfree as sf
from redis_jobs import LIMIT, Here, Job, Rows, check_batch, job, open_rows, stats_of
from redis_servers import needs_server
from stallfree.errors import WaitError
from stallfree.ipc.folders import default_root

pytestmark = needs_server

COUNT = 240


@pytest.fixture(scope="module")
def pair() -> Iterator[Job]:
    """Two nodes of two processes each, which have opened the store."""
    with job(2, 2) as made:
        yield made


def close_rows(here: Here) -> None:
    here.pop("cached").close()
    here["meet"].wait(LIMIT)


# -- epochs -----------------------------------------------------------------------------------------------------------


def train(here: Here, library: Any, options: dict[str, Any]) -> list[list[int]]:
    """The ids of three epochs. Each ends when everything that was read is stored."""
    cached, served = here["cached"], []
    sampler: Any = DistributedSampler(cached, here["count"], here["number"], seed=1)
    loader = (sf if library == "sf" else torch.utils.data).DataLoader(cached, batch_size=8, sampler=sampler, **options)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        served.append([id for values, ids in loader for id in check_batch(values, ids)])
        cached.cache.tier.flush()
        here["meet"].wait(LIMIT)
    if library == "sf":
        loader.close()
    return served


@pytest.mark.parametrize(
    ("library", "capacity", "method"),
    [
        ("sf", 0, None),
        ("sf", "8MiB", "fork"),
        pytest.param("sf", 0, "spawn", marks=pytest.mark.slow),
        pytest.param("torch", 0, "fork", marks=pytest.mark.slow),
    ],
)
def test_each_sample_comes_once_per_epoch_and_from_storage_once_in_all(
    library: str, capacity: Any, method: str | None, pair: Job
) -> None:
    options = {"num_workers": 1, "multiprocessing_context": method, "persistent_workers": library == "sf"}
    pair.run(open_rows, COUNT, {"capacity": capacity, "name": f"{library}-{capacity}-{method}"})
    looked_at = set(pair.reads())
    ran = pair.run(train, library, options if method else {})
    for epoch in range(3):
        assert sorted(id for process in ran for id in process[epoch]) == list(range(COUNT))
    assert sorted(pair.reads()) == sorted({*range(COUNT)} - looked_at), "once by all nodes, and never after epoch 1"
    stats = pair.run(stats_of)
    assert stats[0] == stats[1], "of a node"
    for node in stats[::2]:
        assert node.tier_rejected == node.evictions == node.damaged == 0
        assert node.hits >= COUNT, "two epochs of half of all"
        assert node.tier_hits > 20, "of the other node too"
    pair.run(close_rows)


def test_a_local_sampler_serves_what_the_node_stores(pair: Job) -> None:
    pair.run(open_rows, COUNT, {"name": "local"})
    ran = pair.run(train_locally)
    for epoch in range(2):
        assert sorted(id for process in ran for id in process[epoch]) == list(range(COUNT))
        assert ran[0][0] != ran[0][1]
    pair.run(close_rows)


def train_locally(here: Here) -> list[list[int]]:
    cached, served = here["cached"], []
    sampler = sf.LocalSampler(cached, seed=1, rank=here["number"], num_ranks=here["count"])
    with sf.DataLoader(cached, 8, sampler=sampler) as loader:
        for _ in range(2):
            served.append([id for values, ids in loader for id in check_batch(values, ids)])
            foreign = cached.tier.owner(np.array(served[-1])) != cached.tier.me
            assert foreign.sum() <= 1, "nodes whose numbers of samples differ"
    return served


def test_values_of_a_cache_loader_are_loaded_once_by_all_nodes(pair: Job) -> None:
    loads = [key for process in pair.run(load_by_key) for key in process]
    assert Counter(loads) == Counter([*range(40), *map(str, range(40))])


def load_by_key(here: Here) -> list[Any]:
    """Each process loads its part of the keys, then all."""
    keys: list[Any] = [*range(40), *map(str, range(40))]
    loads: list[Any] = []

    def load(key: Any) -> Any:
        loads.append(key)
        return None if key == "7" else {"key": key}

    with sf.CacheLoader(capacity="4MiB", store=here["store"], name="keys") as loader:
        here["meet"].wait(LIMIT)
        for some in (keys[here["number"] :: 4], keys):
            for key in some:
                assert loader.get(key, load) == (None if key == "7" else {"key": key})
            loader.cache.tier.flush()
            here["meet"].wait(LIMIT)
    return loads


def test_auto_is_a_store_of_all_nodes_unless_the_data_set_has_no_fingerprint(pair: Job) -> None:
    assert pair.run(open_auto, False) == [(2, 0)] * 4
    assert pair.run(open_auto, True) == [(None, 8 << 20)] * 4


def open_auto(here: Here, private: bool) -> tuple[int | None, int]:
    """The nodes of the tier, and the memory in front of it."""
    data = Rows(here["folder"], COUNT)
    if private:
        data.fingerprint = lambda: here["meet"]  # type: ignore[assignment,method-assign,return-value]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cached = sf.CachedDataset(data, capacity="8MiB", store="auto")
    with cached:
        here["meet"].wait(LIMIT)
        assert private == any("each node caches samples separately" in str(warning.message) for warning in caught)
        assert (default_root() / "redis-auto").exists() != private
        return getattr(cached.tier, "num_nodes", None), cached.cache.capacity


def test_a_node_that_does_not_come_is_named(pair: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (names | {"MASTER_PORT": pair.port}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("stallfree.cache.redis.launch.RENDEZVOUS_SECONDS", 0.5)
    with pytest.raises(WaitError, match="number 1 did not create the store"):
        sf.RedisStore(capacity_per_node="64MiB", name="alone")


# -- importance -------------------------------------------------------------------------------------------------------


def begin_importance(here: Here, options: dict[str, Any]) -> None:
    place = {"init_method": f"file://{here['folder'] / 'ranks'}", "rank": here["number"], "world_size": here["count"]}
    distributed.init_process_group("gloo", timeout=timedelta(seconds=LIMIT), **place)
    sampler = sf.ImportanceSampler(COUNT, cache=here["cached"].cache, seed=3, max_age=20, **options)
    here["loader"] = sf.DataLoader(here["cached"], 6, sampler=sampler)


def draw(here: Here, number: int) -> tuple[list[int], list[int], list[int]]:
    """Train an epoch, and wait until all that was read is stored.

    Returns the plan of all ranks, the ids that were assumed to be stored, and those of the rank's own batches.
    """
    loader, served = here["loader"], []
    batches = iter(loader)  # draws the plan, with all ranks
    plan, resident = loader.sampler.plan(number).ids.tolist(), np.flatnonzero(loader.sampler._draw.resident).tolist()
    for batch in batches:
        assert check_batch(*batch.data) == batch.ids.tolist()
        loss = 0.1 + ((batch.ids * 37 + number * 11) % 101).float() / 10
        loader.update(batch.ids, loss)
        served += batch.ids.tolist()
        distributed.all_reduce(loss.sum())  # as that of the gradients
    here["cached"].cache.tier.flush()
    distributed.barrier()
    return plan, resident, served


def end_importance(here: Here) -> None:
    here.pop("loader").close()
    distributed.destroy_process_group()


@pytest.mark.parametrize("plan", ["unbiased", pytest.param("icache", marks=pytest.mark.slow)])
def test_ranks_of_all_nodes_serve_one_plan_and_read_what_no_server_has(plan: str, pair: Job) -> None:
    pair.run(open_rows, COUNT, {"name": f"importance-{plan}", "policy": "importance"})
    pair.run(begin_importance, {"plan": plan, "on_miss": None})
    pair.reads()
    for number in range(3):
        ran = pair.run(draw, number)
        planned, resident, _ = ran[0]
        assert all(rank[:2] == (planned, resident) for rank in ran)
        served = [id for _, _, own in ran for id in own]
        assert sorted(served) == sorted(planned)
        assert sorted(pair.reads()) == sorted(set(served) - set(resident))
        assert number == 0 or len(resident) > COUNT / 3
    pair.run(end_importance)
    pair.run(close_rows)
