"""`DataLoader` gives what `torch.utils.data.DataLoader` gives, and refuses what cannot be meant."""

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import stallfree as sf
from loader_data import (
    Made,
    as_list,
    zero_dim,
)
from names import named


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
