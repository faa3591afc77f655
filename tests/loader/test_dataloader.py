"""`DataLoader` gives what `torch.utils.data.DataLoader` gives, and refuses what cannot be meant."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import stallfree as sf
from loader_data import (
    Gate,
    Made,
    as_list,
    labels_of,
    noisy_collate,
    picture,
    same,
    zero_dim,
)
from names import named
from stallfree.loader.pool import WorkerPool
from warm import Interpreter


def ours(dataset: Any, **arguments: Any) -> list[Any]:
    return list(sf.DataLoader(dataset, **arguments))


def test_without_workers_objects_are_handed_over_as_they_are() -> None:
    things = [object(), lambda: 1]
    assert ours(Made(2, things.__getitem__), batch_size=2, collate_fn=as_list) == [things]
    grad = torch.ones(2, requires_grad=True)
    assert ours(Made(1, lambda _: grad * 2), collate_fn=as_list)[0][0].grad_fn is not None


def test_distributed_sampler_shuffles_anew_without_set_epoch() -> None:
    def orders(tell: bool) -> list[list[int]]:
        sampler: DistributedSampler[Any] = DistributedSampler(range(20), num_replicas=2, rank=1, seed=3)
        loader = sf.DataLoader(Made(20, zero_dim), batch_size=10, sampler=sampler)
        found = []
        for epoch in range(3):
            if tell:
                sampler.set_epoch(epoch + 5)
            found.append(next(iter(loader)).tolist())
        return found

    def expected(epoch: int) -> list[int]:
        sampler: DistributedSampler[Any] = DistributedSampler(range(20), num_replicas=2, rank=1, seed=3)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert orders(tell=False) == [expected(0), expected(1), expected(2)]
    assert orders(tell=True) == [expected(5), expected(6), expected(7)]


def info(id: int) -> tuple[int, int, int, bool]:
    found = torch.utils.data.get_worker_info()
    assert found is not None
    return found.id, found.num_workers, len(found.dataset), found.seed >= 0


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)])
def test_get_worker_info(method: str, workers: int) -> None:
    batches = ours(Made(6, info), batch_size=1, num_workers=workers, multiprocessing_context=method, collate_fn=tuple)
    found = [sample for batch in batches for sample in batch]
    assert {worker for worker, *_ in found} == set(range(workers))
    assert {rest for _, *rest in map(tuple, found) for rest in [tuple(rest)]} == {(workers, 6, True)}
    assert torch.utils.data.get_worker_info() is None


def test_cached_batches_are_the_loops_own() -> None:
    """A loop may change a batch in place, and neither the cache nor the data set changes."""
    data = torch.arange(6)
    with sf.CachedDataset(Made(6, lambda id: data[id]), capacity="32MiB") as cached:
        for size in (2, None):
            for batch in sf.DataLoader(cached, batch_size=size):
                batch += 1
        assert data.tolist() == [0, 1, 2, 3, 4, 5]
        assert [int(batch) for batch in sf.DataLoader(cached)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"persistent_workers": True}, "num_workers of 1 or more"),
        ({"shuffle": True, "sampler": [1]}, "leave out shuffle"),
        ({"batch_sampler": [[1]], "batch_size": 2}, "leave out batch_size"),
        ({"batch_sampler": [[1]], "sampler": [1]}, "leave out batch_size"),
        ({"batch_size": None, "drop_last": True}, "needs a batch_size"),
        ({"multiprocessing_context": "threads", "num_workers": 1}, "multiprocessing_context='threads'"),
        ({"staging": "much"}, "staging='much'"),
    ],
    ids=named,
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(sf.InputError, match=message):
        sf.DataLoader(Made(3, zero_dim), **arguments)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ([0, 1, 7], "the id 7.*ids 0 to 4"),
        ([0, 1, -6], "the id -6.*ids 0 to 4"),
        ([0, "one"], "must be integers"),
        ([0.5], "must be integers"),
        ([True], "must be integers"),
        ([[0, 1]], "must be integers"),
        ([None], "must be integers"),
    ],
    ids=named,
)
def test_samplers_that_give_something_else(sampler: Any, message: str) -> None:
    loader = sf.DataLoader(Made(5, zero_dim), sampler=[2, *sampler])
    got = []
    with pytest.raises(sf.InputError, match=message):
        got.extend(loader)
    iterator = iter(loader)
    assert next(iterator).tolist() == [2]  # what came before the fault is handed out


# -- epochs: what differs from one to the next, and what remains when one is not finished ------------------------------


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


def order(loader: sf.DataLoader) -> list[int]:
    return labels_of(list(loader))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    dataset = Made(30, picture)

    def orders(**arguments: Any) -> list[list[int]]:
        loader = sf.DataLoader(dataset, batch_size=8, shuffle=True, **arguments)
        return [order(loader) for _ in range(2)]

    first = orders(seed=1)
    torch.manual_seed(99)
    assert orders(seed=1) == first
    assert orders(seed=1, num_workers=2) == first
    assert orders(seed=2) != first
    assert orders(seed=-1) != first
    with sf.CachedDataset(dataset, capacity="32MiB", seed=1) as cached:
        loader = sf.DataLoader(cached, batch_size=8, shuffle=True)
        assert [order(loader) for _ in range(2)] == first
    loader = sf.DataLoader(dataset, batch_size=8, shuffle=True, seed=1)
    loader.set_epoch(1)
    assert order(loader) == first[1]
    loader.set_epoch(0)
    assert order(loader) == first[0]


def test_what_collate_fn_draws() -> None:
    """A mix-up in `collate_fn` is fresh for each batch and epoch, and does not depend on the workers."""

    def epochs(workers: int) -> list[Any]:
        loader = sf.DataLoader(Made(12, picture), batch_size=4, collate_fn=noisy_collate, num_workers=workers, seed=1)
        return [list(loader) for _ in range(2)]

    expected = epochs(1)
    factors = {float(images.flatten().max()) for epoch in expected for images, _ in epoch}
    assert len(factors) == 6
    assert same(epochs(2), expected)


def test_persistent_workers_persist() -> None:
    def pids(loader: sf.DataLoader) -> set[int]:
        return {pid for batch in loader for pid in batch}

    dataset = Made(8, lambda id: os.getpid())
    with sf.DataLoader(dataset, num_workers=2, persistent_workers=True, collate_fn=as_list) as loader:
        first = pids(loader)
        assert len(first) == 2
        assert pids(loader) == first
        loader.close()
        assert not pids(loader) & first
    loader = sf.DataLoader(dataset, num_workers=2, collate_fn=as_list)
    assert not pids(loader) & pids(loader)


def test_an_iteration_waits_for_the_slots_that_the_one_before_still_has(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would find none free, and end before it has begun."""
    wait = WorkerPool.wait

    def open_and_wait(*arguments: Any) -> None:
        gate.open()
        wait(*arguments)

    ids = [0, 1, 2]
    with sf.DataLoader(
        Made(8, gate), sampler=ids, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    ) as loader:
        kept = list(loader)  # three slots
        ids[:] = [5, 6, 7]
        iter(loader)  # two more are with the worker, before the gate
        ids[:] = range(8)
        iterator = iter(loader)
        assert loader._epochs.kept is not None
        assert loader._epochs.kept.ring.free == 0
        monkeypatch.setattr(WorkerPool, "wait", open_and_wait)
        assert [int(batch) for batch in iterator] == list(range(8))
        assert [int(batch) for batch in kept] == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 1])
def test_two_iterations_of_one_loader_are_independent(workers: int) -> None:
    loader = sf.DataLoader(Made(12, picture), batch_size=4, num_workers=workers)
    pairs = [(a[1].tolist(), b[1].tolist()) for a, b in zip(loader, loader, strict=True)]
    assert pairs == [([0, 1, 2, 3],) * 2, ([4, 5, 6, 7],) * 2, ([8, 9, 10, 11],) * 2]
    state = loader.state_dict() | {"seed": 5}  # another seed, so the next iteration has a pool of its own
    first = iter(loader)
    assert next(first)[1].tolist() == [0, 1, 2, 3]
    loader.load_state_dict(state)
    assert [labels.tolist() for _, labels in loader] == [pair[0] for pair in pairs]
    assert [labels.tolist() for _, labels in first] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_no_worker_is_started_when_all_can_be_gathered() -> None:
    def init(worker: int) -> None:
        raise AssertionError("a worker was started")

    with sf.CachedDataset(Made(20, picture), capacity="32MiB") as cached:
        list(sf.DataLoader(cached, batch_size=4))
        loader = sf.DataLoader(cached, batch_size=4, num_workers=2, worker_init_fn=init)
        assert order(loader) == list(range(20))


def test_statistics_add_up() -> None:
    with sf.CachedDataset(Made(30, picture), capacity="32MiB") as cached:
        before = cached.stats()
        with sf.DataLoader(cached, batch_size=4, num_workers=2, persistent_workers=True, shuffle=True) as loader:
            for epoch in range(1, 4):
                list(loader)
                stats = loader.stats()
                assert stats.batches == 8 * epoch
                assert stats.samples == stats.hits + stats.misses == 30 * epoch
                assert stats.misses == 30 - before.resident_items  # what the first look at the data set has stored
            assert cached.stats().storage_reads - before.storage_reads == stats.misses
            assert cached.stats().hits - before.hits >= stats.hits
            assert stats.skips == stats.retries == stats.workers_replaced == 0
            assert stats.wait_seconds >= 0
            assert stats.stall_fetch_seconds + stats.stall_prep_seconds == pytest.approx(stats.wait_seconds)
            assert stats.num_workers == 2
            assert stats.staging_bytes == loader.stats().staging_bytes > 0
        assert loader.stats() == stats
        next(iter(loader))
        assert loader.stats().batches == 25


THREADS = """
import os, threading
import torch
import stallfree as sf

def others():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

torch.set_num_threads(4)
data = list(range(34_000))
before = others()
with sf.CachedDataset(data, capacity="64MiB", form="prepared") as cached:
    with sf.DataLoader(cached, batch_size=33_000, shuffle=True, num_workers=1, persistent_workers=True) as loader:
        for epoch in range(2):
            assert sum(int(batch.numpy().sum()) for batch in loader) == sum(data)
            assert others() == before, others()
"""


def test_torch_starts_no_threads_for_a_loader_with_workers(interpreter: Interpreter) -> None:
    """They would spin on the cores that the workers need."""
    ended = interpreter.run(THREADS)
    assert ended.code == 0, ended.err
