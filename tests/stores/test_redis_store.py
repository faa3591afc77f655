"""Samples in servers as nodes, jobs and loaders use them: one copy of each, the best ones, and hits that stay."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from redis_tools import COUNT, ENOUGH, attach, client, emptied, keys_of, load, nodes, samples, shown

import stallfree as sf
from redis_servers import Server, needs_server
from stallfree.cache.records import MISS
from stallfree.errors import CapacityError, InputError

pytestmark = needs_server

ALL = list(range(COUNT))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with Server(tmp_path_factory.mktemp("one")) as one, Server(tmp_path_factory.mktemp("two")) as two:
        yield [one, two]


@pytest.fixture
def pair(both: list[Server]) -> list[Server]:
    """Two servers that stand alone, empty and without a limit."""
    return emptied(both)


# --- importance -----------------------------------------------------------------------------------------------------


def equal_samples(ids: list[int]) -> list[Any]:
    """Samples of one size, so that a server has room for a certain number."""
    return [np.full(20_000, id, np.uint8) for id in ids]


def test_samples_of_the_lowest_scores_make_room_for_higher_ones(pair: list[Server], tmp_path: Path) -> None:
    """Two nodes with room for half of the data set, each of which stores all in another order, with the same scores."""
    rng = np.random.default_rng(0)
    with nodes(tmp_path, pair, policy="importance") as caches:
        owner, scores = caches[0].owner(ALL), rng.random(COUNT)
        half = [np.flatnonzero(owner == place)[:50].tolist() for place in range(2)]
        for place, server in enumerate(pair):
            caches[place].put_many(half[place], equal_samples(half[place]))
            caches[place].flush()
            with client(server) as there:
                there.config_set("maxmemory", there.info("memory")["used_memory"])
                room = there.dbsize()
            assert room == 50
        for cache in caches:
            cache.set_known(np.isin(ALL, half[0] + half[1]))
            cache.set_scores(ALL, scores)
        for turn in range(4):
            cache = caches[turn % 2]
            order = rng.permutation(COUNT)
            for start in range(0, COUNT, 10):
                ids = order[start : start + 10].tolist()
                found = cache.get_many(ids)
                assert all(one is MISS or (one == id).all() for id, one in zip(ids, found, strict=True))
                missing = [id for id, one in zip(ids, found, strict=True) if one is MISS]
                cache.put_many(missing, equal_samples(missing))
                cache.flush()
                for server in pair:
                    with client(server) as there:
                        assert there.dbsize() <= 52
        best_first = np.argsort(-scores)
        there = [cache.verify(np.array(ALL)) for cache in caches]
        held = set(np.flatnonzero(there[0] | there[1]).tolist())
        counts = [len(client(server).keys("*")) for server in pair]
        assert len(held) == sum(counts)
        assert min(counts) > 40  # buffers of connections take room too
        best = {id for place in range(2) for id in best_first[owner[best_first] == place][: counts[place] - 5].tolist()}
        assert best <= held, "those of the highest scores are there"
        assert caches[0].stats().evictions + caches[1].stats().evictions > 0
        assert caches[0].stats().hits > 0


def test_importance_keeps_to_the_limit_of_given_servers(pair: list[Server]) -> None:
    with attach(pair[:1], policy="importance", limit=1 << 40) as cache:
        cache.set_scores(ALL, np.arange(COUNT))
        cache.put_many(ALL[:50], equal_samples(ALL[:50]))
        cache.flush()
        cache._storing._limit = 1
        cache.put_many(ALL[100:120], equal_samples(ALL[100:120]))
        cache.flush()
        assert np.flatnonzero(cache.verify(np.array(ALL))).tolist() == [*range(20, 50), *range(100, 120)]


# --- nodes ----------------------------------------------------------------------------------------------------------


def test_nodes_read_what_any_of_them_stored(pair: list[Server], tmp_path: Path) -> None:
    """Another data set of the same name lies on the same servers."""
    with nodes(tmp_path, pair) as caches, attach(pair, 50, fingerprint="other") as other:
        assert load(other, range(50), salt=1) == list(range(50))
        assert load(caches[0], ALL[::2]) == ALL[::2]
        assert load(caches[1], ALL) == ALL[1::2]
        assert load(caches[0], ALL) == []
        assert [cache.num_nodes for cache in caches] == [2, 2]
        there = [cache.verify(np.array(ALL)) for cache in caches]
        assert [np.flatnonzero(one).tolist() for one in there] == [
            np.flatnonzero(caches[0].owner(ALL) == me).tolist() for me in range(2)
        ], "each looks up its own"
        caches[0].clear()
        assert (caches[1].num_keys(), other.num_keys()) == (0, 50)
        assert shown(other.get_many(range(50)), salt=1) == list(range(50))


def test_a_step_that_is_random_ends_the_use_on_all_nodes(pair: list[Server], tmp_path: Path) -> None:
    with nodes(tmp_path, pair) as (first, second):
        load(first, ALL)
        assert first.uncache_steps()
        assert not first.uncache_steps()
        assert first.num_keys() == 0
        second._node.known[:] = 0
        second.put_many(ALL, samples(ALL))  # on its way when the first one finds out
        second.flush()
        assert shown(second.get_many(ALL[:1])) == [None]
        assert second.uncached_steps
        for cache in (first, second):
            cache.clear()
            assert not cache.put_many(ALL, samples(ALL)).any()
    with attach(pair, name="train") as later:
        assert load(later, ALL) == ALL
        assert load(later, ALL) == ALL, "a later job on the same servers does not use it either"


def test_no_node_reads_samples_that_are_about_to_be_removed(
    pair: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nodes(tmp_path, pair) as (first, second):
        load(first, ALL)
        at_removal: list[Any] = []
        monkeypatch.setattr(first, "clear", lambda: at_removal.append(shown(second.get_many(ALL))))
        first.uncache_steps()
        assert at_removal == [[None] * len(ALL)]


# --- the store ------------------------------------------------------------------------------------------------------


@sf.mark_deterministic
class Counted(torch.utils.data.Dataset):
    """The samples, of one size; writes the id of each reading to a file."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> tuple[np.ndarray, int]:
        fd = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, struct.pack("q", id))
        os.close(fd)
        return np.full(500, id), id

    def reads(self) -> int:
        return len(Path(self.file).read_bytes()) // 8


def hosts(servers: list[Server], **options: Any) -> sf.RedisStore:
    given = [{"host": "127.0.0.1", "port": server.port} for server in servers]
    return sf.RedisStore(hosts=given, **{"timeout": ENOUGH, **options})


def epoch(data: sf.CachedDataset, workers: int) -> None:
    """Serve all samples."""
    context = "fork" if workers else None
    loader = sf.DataLoader(data, batch_size=16, shuffle=True, num_workers=workers, multiprocessing_context=context)
    with contextlib.closing(loader):
        seen = []
        for rows, ids in loader:
            assert (rows == ids[:, None]).all()
            seen += ids.tolist()
    assert sorted(seen) == ALL


@pytest.mark.parametrize(("tiers", "workers"), [("servers", 0), ("memory, servers", 2), ("memory, disk, servers", 0)])
def test_a_loader_reads_each_sample_from_storage_once(
    tiers: str, workers: int, pair: list[Server], tmp_path: Path
) -> None:
    plain = Counted(tmp_path / "reads")
    store = hosts(pair)
    chain: Any = [sf.DiskTier(tmp_path / "disk", capacity="1MiB"), store] if "disk" in tiers else store
    capacity = "200KB" if "memory" in tiers else 0
    with store, sf.CachedDataset(plain, capacity=capacity, store=chain, name="loaded") as data:
        first = plain.reads()
        for _ in range(3):
            epoch(data, workers)
            data.cache.flush()
        assert plain.reads() <= COUNT + first
        assert data.cache.servers.num_keys() == COUNT
    assert len(keys_of(pair)) == COUNT, "given servers keep samples"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "without capacity_per_node"),
        ({"hosts": []}, "give a list of servers"),
        ({"hosts": "localhost:6379"}, "give a list of servers"),
        ({"hosts": {"host": "cache-1", "password": "secret"}}, "hosts=.*: give a list of servers"),
        ({"hosts": [{"host": "a", "prt": 1}]}, "'prt', which is unknown"),
        ({"capacity_per_node": "much"}, "capacity_per_node"),
        ({"capacity_per_node": "1MiB"}, "capacity_per_node=.* is too small for a server: give 4.0 MiB or more"),
        ({"capacity_per_node": "1MiB", "timeout": 0}, "timeout=0"),
        ({"capacity_per_node": "1MiB", "name": "a/b"}, "a/b"),
    ],
)
def test_arguments_that_cannot_be_used_are_one_clear_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        sf.RedisStore(**options)
    assert "secret" not in str(raised.value)


def test_what_data_sets_cannot_do_with_it(pair: list[Server], tmp_path: Path) -> None:
    disk, plain = sf.DiskTier(tmp_path, capacity="1MiB"), [1, 2, 3]
    with hosts(pair) as store:
        for chain in ([store, disk], [disk], [store]):
            with pytest.raises(InputError, match="a list must be"):
                sf.CachedDataset(plain, capacity="1MiB", store=chain)
        with pytest.raises(InputError, match="persist"):
            sf.CachedDataset(plain, capacity="1MiB", store=store, persist=True)
        with pytest.raises(CapacityError):
            sf.CachedDataset(plain, capacity=0, store=[disk, store])
        for policy in ("lru", "lfu", "fifo", "random"):
            with pytest.raises(InputError, match=f"policy='{policy}' with capacity=0: .*Leave policy out"):
                sf.CachedDataset(plain, capacity=0, store=store, policy=policy)
            with pytest.raises(InputError, match=r"[Ll]eave policy out"):
                sf.CacheLoader(capacity=0, store=store, policy=policy, name="keys")
        for policy in ("minio", "importance", "oracle"):
            sf.CachedDataset(plain, capacity=0, store=store, policy=policy).close()
        sf.CachedDataset(plain, capacity="1MiB", store=store, policy="lru").close()
        assert "2 servers" in repr(store)


# --- the life of a store --------------------------------------------------------------------------------------------


def test_a_closed_store_is_refused() -> None:
    with sf.RedisStore(capacity_per_node="16MiB") as store:
        pass
    with pytest.raises(InputError, match="the store 'default' is closed: make a new one"):
        sf.CachedDataset(list(range(10)), capacity=0, store=store)


def test_more_than_the_free_memory_is_refused(store_root: Path) -> None:
    with pytest.raises(CapacityError, match=r"capacity_per_node=.* exceeds the .* of free memory"):
        sf.RedisStore(capacity_per_node="1000TiB")
    assert list(store_root.iterdir()) == []


def test_the_bytes_of_residents_are_those_of_the_values(pair: list[Server]) -> None:
    with attach(pair) as cache:
        assert cache.stats().resident_bytes == 0
        cache.put_many(ALL, equal_samples(ALL))
        cache.flush()
        stats = cache.stats()
        assert 20_000 * COUNT < stats.resident_bytes < 20_400 * COUNT
