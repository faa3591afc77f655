"""`DataLoader` gives what `torch.utils.data.DataLoader` gives, and refuses what cannot be meant."""

import inspect
import os
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

import stallfree as sf
from cached_data import Numbers
from loader_data import Gate, Made, as_list, labels_of, loading, noisy_collate, picture, same, zero_dim
from warm import Interpreter


def test_without_workers_objects_are_handed_over_as_they_are() -> None:
    """For gradients, see `test_kinds_of_samples`."""
    things = [object(), lambda: 1]
    assert list(sf.DataLoader(things, batch_size=2, collate_fn=as_list)) == [things]


def test_distributed_sampler_shuffles_anew_without_set_epoch() -> None:
    """If the user sets the epoch, see `test_against_torch`."""
    sampler, expected = (DistributedSampler(range(20), 2, 1, seed=3) for _ in range(2))  # type: ignore[arg-type, var-annotated]
    loader = sf.DataLoader(Made(20, zero_dim), batch_size=10, sampler=sampler)
    for epoch in range(3):
        expected.set_epoch(epoch)
        assert next(iter(loader)).tolist() == list(expected)


def info(id: int) -> tuple[int, int, int, bool]:
    found = torch.utils.data.get_worker_info()
    assert found is not None
    return found.id, found.num_workers, len(found.dataset), found.seed >= 0


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)])
def test_get_worker_info(method: str, workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": method, "collate_fn": tuple}
    with sf.DataLoader(Made(6, info), None, **options) as loader:
        assert {*loader} == {(worker, workers, 6, True) for worker in range(workers)}
    assert torch.utils.data.get_worker_info() is None


def test_fetches_start_after_worker_init_fn(tmp_path: Path) -> None:
    def write_late(worker: int) -> None:
        time.sleep(0.1)
        (tmp_path / "late").write_bytes(b"x")

    data = sf.FileDataset([tmp_path / "late"] * 4)
    with sf.DataLoader(data, 2, num_workers=1, worker_init_fn=write_late, collate_fn=len) as loader:
        assert list(loader) == [2, 2]


def test_cached_batches_are_the_loops_own() -> None:
    """A loop may change a batch in place, and neither the cache nor the data set changes."""
    data = torch.arange(6)
    with sf.CachedDataset(Made(6, lambda id: data[id]), capacity="32MiB") as cached:
        for size in (2, None):
            for batch in sf.DataLoader(cached, batch_size=size):
                batch += 1
        assert data.tolist() == [0, 1, 2, 3, 4, 5]
        assert [int(batch) for batch in sf.DataLoader(cached)] == [0, 1, 2, 3, 4, 5]


UNUSABLE: dict[str, dict[str, Any]] = {
    "num_workers of 1 or more": {"persistent_workers": True}, "leave out shuffle": {"shuffle": True, "sampler": [1]},
    "leave out batch_size": {"batch_sampler": [[1]], "batch_size": 2},
    "needs a batch_size": {"batch_size": None, "drop_last": True},
    "multiprocessing_context='threads'": {"multiprocessing_context": "threads", "num_workers": 1},
    "staging='much'": {"staging": "much"},
}  # fmt: skip


@pytest.mark.parametrize("message", UNUSABLE)
def test_arguments_that_cannot_be_used(message: str) -> None:
    with pytest.raises(sf.InputError, match=message):
        sf.DataLoader(Made(3, zero_dim), **UNUSABLE[message])


@pytest.mark.parametrize("id", ["one", 0.5, True, [0, 1], None])
def test_samplers_that_give_something_else(id: Any) -> None:
    iterator = iter(sf.DataLoader(Made(5, zero_dim), sampler=[2, 0, id]))
    assert [next(iterator).tolist(), next(iterator).tolist()] == [[2], [0]]
    with pytest.raises(sf.InputError, match="must be integers"):
        next(iterator)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    dataset = Made(30, picture)

    def orders(data: Any = dataset, **arguments: Any) -> list[list[int]]:
        loader = sf.DataLoader(data, batch_size=8, shuffle=True, **arguments)
        return [labels_of(loader) for _ in range(2)]

    first = orders(seed=1)
    torch.manual_seed(99)
    assert orders(seed=1) == orders(seed=1, num_workers=2) == first
    assert first[0] != first[1]
    assert first not in (orders(seed=2), orders(seed=-1))
    with sf.CachedDataset(dataset, capacity="32MiB", seed=1) as cached:
        assert orders(cached) == first
    loader = sf.DataLoader(dataset, batch_size=8, shuffle=True, seed=1)
    for epoch in (1, 0):
        loader.set_epoch(epoch)
        assert labels_of(loader) == first[epoch]


def test_what_collate_fn_draws() -> None:
    """A mix-up in `collate_fn` is fresh for each batch and epoch, and does not depend on the workers."""
    loaders = [sf.DataLoader(Made(12, picture), 4, collate_fn=noisy_collate, num_workers=n, seed=1) for n in (1, 2)]
    one, other = ([*loader, *loader] for loader in loaders)
    assert len({float(images.flatten().max()) for images, _ in one}) == 6
    assert same(one, other)


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


def test_an_iteration_goes_on_though_the_one_before_still_has_all_slots(caplog: pytest.LogCaptureFixture) -> None:
    ids = [0, 1, 2]
    with Gate() as gate, loading(Made(8, gate), sampler=ids, num_workers=1, multiprocessing_context="fork") as loader:
        kept = list(loader)  # three slots
        ids[:] = [5, 6, 7]
        iter(loader)  # two more are with the worker, before the gate
        ids[:] = range(8)
        iterator = iter(loader)
        assert loader._epochs.kept is not None
        assert loader._epochs.kept.ring.free == 0
        gate.open()
        assert [int(batch) for batch in iterator] == list(range(8))
        assert [int(batch) for batch in kept] == [0, 1, 2]
    assert not caplog.records


@pytest.mark.parametrize("workers", [0, 1])
def test_two_iterations_of_one_loader_are_independent(workers: int) -> None:
    """Also with two seeds. With one, see `test_against_torch`."""
    loader = sf.DataLoader(Made(12, zero_dim), batch_size=4, num_workers=workers)
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    state = loader.state_dict() | {"seed": 5}  # another seed, so the next iteration has a pool of its own
    first = iter(loader)
    assert next(first).tolist() == expected[0]
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == expected
    assert [batch.tolist() for batch in first] == expected[1:]


def test_no_worker_is_started_when_all_can_be_gathered() -> None:
    with sf.CachedDataset(Made(20, picture), capacity="32MiB") as cached:
        list(sf.DataLoader(cached, batch_size=4))
        loader = sf.DataLoader(cached, batch_size=4, num_workers=2, worker_init_fn=pytest.fail)
        assert labels_of(loader) == list(range(20))


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
import os, threading, torch, stallfree as sf
def others(): return len(os.listdir("/proc/self/task")) - threading.active_count()
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


@pytest.mark.parametrize("size", [None, 2])
def test_a_loader_made_like_another(size: int | None) -> None:
    """As Lightning does it: with the attributes of the first one as arguments."""
    first = sf.DataLoader(Made(4, zero_dim), batch_size=size)
    again = sf.DataLoader(first.dataset, batch_size=first.batch_size, collate_fn=first.collate_fn)
    assert same([*again], [*first])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_batch_goes_to_collate_fn(workers: int) -> None:
    """Out of a cache too."""
    batches = [[0, 1], [], [2]]
    with sf.CachedDataset(Made(4, int), capacity="1MiB") as cached:
        for data in (cached, Made(4, int)):
            loader = sf.DataLoader(data, batch_sampler=batches, collate_fn=list, num_workers=workers)
            assert list(loader) == list(loader) == batches
        with pytest.raises(sf.InputError, match="empty batch: leave it out"):
            list(sf.DataLoader(cached, batch_sampler=[[]], num_workers=workers))


def test_repr() -> None:
    data = Made(4, zero_dim)
    assert repr(sf.DataLoader(data, 2, shuffle=True)) == (
        "DataLoader(<Made of 4 samples>, batch_size=2, shuffle=True, num_workers=0)"
    )
    with sf.CachedDataset(data, capacity="1MiB", name="shown") as cached:
        assert repr(sf.DataLoader(cached, num_workers=2)) == f"DataLoader({cached!r}, batch_size=1, num_workers=2)"
        assert "Made, 4 samples" in repr(cached)
    with sf.SharedLoader(data, group="shown", batch_size=2) as loader:
        assert repr(loader) == "SharedLoader(<Made of 4 samples>, group='shown', batch_size=2)"
    assert repr(sf.DataLoader(data, device="cpu")).endswith("device=device(type='cpu'))")


@pytest.mark.parametrize("workers", [0, 2])
def test_arguments_are_shown_as_torch_shows_them(workers: int) -> None:
    kinds = sf.DataLoader, torch.utils.data.DataLoader
    names = {*inspect.signature(kinds[1]).parameters} - {"dataset", "shuffle", "sampler", "batch_sampler"}
    ours, theirs = ({name: getattr(kind([1, 2], num_workers=workers), name) for name in names} for kind in kinds)
    assert ours == theirs


COUNT, SIZE = 22, 4


def skipping(loader: Any, first: int) -> Any:
    """A loader of torch's with the rest of an epoch, as Accelerate's `skip_first_batches` makes it."""
    rest: Any = islice(loader.batch_sampler, first, None)
    return torch.utils.data.DataLoader(loader.dataset, batch_sampler=rest, generator=loader.generator)


def ids(batches: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


def make(**options: Any) -> sf.DataLoader:
    return sf.DataLoader(Numbers(COUNT), SIZE, **options)


MAKE: dict[str, Callable[[], sf.DataLoader]] = {
    "in order": make, "torch's seed": lambda: (torch.manual_seed(3), make(shuffle=True))[1],
    "generator": lambda: make(shuffle=True, generator=torch.Generator().manual_seed(4)),
    "drop_last": lambda: make(shuffle=True, seed=1, drop_last=True),
    "ranks": lambda: make(shuffle=True, seed=1, ranks=(1, 2)), "ranks in order": lambda: make(seed=1, ranks=(1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("kind", MAKE)
def test_epochs_go_on(kind: str) -> None:
    """An epoch by the samplers that are shown, or the rest of one, is that of the loader, and counts."""
    loader = MAKE[kind]()
    expected = [ids(loader) for _ in range(4)]
    assert ids(skipping(MAKE[kind](), 2)) == expected[0][2:]
    loader = MAKE[kind]()
    assert [ids(loader), ids(skipping(loader, 0)), ids(loader), ids(skipping(loader, 0))] == expected
    loader.set_epoch(1)
    assert ids(skipping(loader, 1)) == expected[1][1:]
    loader.set_epoch(2)
    assert ids(loader) == expected[2]


def test_the_types_that_libraries_look_for() -> None:
    assert isinstance(make(shuffle=True).sampler, RandomSampler)
    assert isinstance(make().sampler, SequentialSampler)
    assert isinstance(make(ranks=(1, 2)).sampler, DistributedSampler)
    assert [len(loader.sampler) for loader in (make(shuffle=True), make(ranks=(1, 2)))] == [COUNT, COUNT // 2]
