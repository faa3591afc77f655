"""The edges of orders, states and draws: what is set or changes a second time, and what comes twice in a batch."""

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

import stallfree as sf
from loader_data import Made, floats, lists_of, values_of, zero_dim


def shuffled(**options: Any) -> sf.DataLoader:
    return sf.DataLoader(range(48), **{"batch_size": 2, "shuffle": True, "seed": 1, **options})


def test_an_epoch_that_is_set_begins_at_its_start_and_the_next_one_follows() -> None:
    """Also after a state was loaded, and where the shown sampler is iterated."""
    loader, resumed, shown = shuffled(), shuffled(), shuffled()
    next(iter(loader))
    resumed.load_state_dict(loader.state_dict())
    for each in (loader, resumed, shown):
        each.set_epoch(3)
    expected = [values_of(loader) for _ in range(2)]
    assert [values_of(resumed) for _ in range(2)] == [list(shown.sampler) for _ in range(2)] == expected


def test_the_epoch_that_a_sampler_is_given_is_the_loaders() -> None:
    sampler = DistributedSampler(range(8), 2, 0)  # type: ignore[arg-type]
    loader = sf.DataLoader(range(8), batch_size=2, sampler=sampler)
    for epoch in (0, 1, 2, 7):
        sampler.set_epoch(epoch)
        next(iterator := iter(loader))
        assert loader.state_dict()["epoch"] == epoch
        list(iterator)


def test_the_number_of_ranks_changes_twice_in_an_epoch() -> None:
    seen, state = list[int](), None
    for count, batches in ((2, 2), (3, 2), (2, 100)):  # 8, 12 and the 28 others
        loaders = [shuffled(ranks=(rank, count)) for rank in range(count)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            for _, batch in zip(range(batches), loader, strict=False):
                seen += batch.tolist()
        state = loaders[0].state_dict()
    assert sorted(seen) == list(range(48))


def test_what_other_ids_mean_is_for_a_plain_data_set_to_say() -> None:
    data, options = Made(5, zero_dim), {"batch_size": 2, "sampler": [2, -1, 7, -6]}
    assert lists_of(sf.DataLoader(data, **options)) == [[2, -1], [7, -6]]
    assert lists_of(sf.DataLoader(data, num_workers=1, seed=1, **options)) == [[2, -1], [7, -6]]
    with sf.CachedDataset(data, capacity="1MiB") as cached:
        assert values_of(sf.DataLoader(cached, batch_size=2, sampler=[-5, -1])) == [0, 4]
        for id in (5, -6):
            with pytest.raises(sf.InputError, match=f"the id {id}.*ids 0 to 4") as caught:
                list(sf.DataLoader(cached, sampler=[id]))
            assert isinstance(caught.value, IndexError)


def test_draws_differ_for_a_sample_that_comes_several_times_and_for_each_batch() -> None:
    data: Any = Made(4, lambda id: torch.rand(()).item())
    collate: Any = lambda samples: [*samples, torch.rand(()).item()]  # noqa: E731
    loader = sf.DataLoader(data, 4, sampler=[0, 0, 0, 1, 0, 0, 2, 3], collate_fn=collate, num_workers=1, seed=3)
    assert len({number for batch in loader for number in batch}) == 10


def test_numpys_generator_in_a_worker_begins_as_with_torchs_loader() -> None:
    found = []
    for kind in (torch.utils.data.DataLoader, sf.DataLoader):
        numbers: Any = multiprocessing.get_context("fork").Array("d", 2)
        torch.manual_seed(5)
        first: Any = lambda worker, numbers=numbers: numbers.__setitem__(worker, np.random.random())  # noqa: E731
        list(kind(range(8), 2, num_workers=2, worker_init_fn=first, multiprocessing_context="fork"))
        found.append(list(numbers))
    assert found[0] == found[1]


def test_a_gathered_batch_in_the_slot_of_a_shorter_one() -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 1}
    with sf.CachedDataset(Made(11, floats), capacity="4MiB") as cached, sf.DataLoader(cached, 4, **options) as loader:
        for _ in range(6):
            cached.cache.drop([9])  # so that a worker makes the last batch
            assert [batch[:, 0, 0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
