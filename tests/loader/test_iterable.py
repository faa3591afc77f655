"""Iterable data sets: torch's own loader makes the batches; states, epochs and counts are beside it."""

import multiprocessing
import pickle
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import example, given, settings
from hypothesis import strategies as st

import stallfree as sf
from cases import half
from loader_data import same
from stallfree.errors import InputError, StallfreeError
from stream_data import Drawn, Generated, Held, Sized, Stateful, Stream

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def outcomes(iterator: Iterator[Any]) -> Iterator[Any]:
    """The batches and the types of the exceptions of an iterator, to its end."""
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except FileNotFoundError:
            yield FileNotFoundError


def epochs(kind: Any, dataset: Any, count: int, *, most: int | None = None, **arguments: Any) -> Any:
    """What `count` iterations give, of which each may end early, and where the generators are after that."""
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    loader, found = kind(dataset, **arguments), []
    for _ in range(count):
        iterator = iter(loader)
        found.append(list(islice(outcomes(iterator), most)))
    if kind is sf.DataLoader:
        loader.close()
    elif loader.num_workers:  # they would live as long as the traceback of an error
        iterator._shutdown_workers()
    return found, random.random(), np.random.rand(), torch.rand(())


def check(dataset: Any, count: int = 1, **arguments: Any) -> Any:
    """Compare with torch's loader; the batches of each epoch."""
    torchs = epochs(torch.utils.data.DataLoader, dataset, count, **arguments)
    ours = epochs(sf.DataLoader, dataset, count, **arguments)
    assert same(torchs, ours)
    return ours[0]


@settings(max_examples=3)
@given(
    kind=st.sampled_from([Stream, Generated]), lengths=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    bad=st.sets(st.integers(0, 9), max_size=2), size=st.sampled_from([None, 1, 2, 3]), drop_last=st.booleans(),
    workers=st.sampled_from([0, 1, 2, 3]), persistent=st.booleans(),
)  # fmt: skip
@example(kind=Stream, lengths=[9, 0, 4], bad=set(), workers=3, size=2, drop_last=True, persistent=True)
@example(kind=Generated, lengths=[5, 9, 1], bad={3}, workers=3, size=2, drop_last=False, persistent=False)
@example(kind=Stream, lengths=[9, 9, 9], bad={0, 4}, workers=0, size=2, drop_last=False, persistent=False)
def test_streams(
    kind: Any, lengths: Any, bad: set[int], size: int | None, drop_last: bool, workers: int, persistent: bool
) -> None:
    arguments: dict[str, Any] = {"batch_size": size, "drop_last": drop_last and size is not None}
    if workers:
        arguments |= {"num_workers": workers, "prefetch_factor": 1 + workers // 2, "persistent_workers": persistent}
    check(kind(lengths, tuple(bad)), 3 if persistent else 1, **arguments)


def test_persistent_workers_after_an_iteration_that_ended_early() -> None:
    check(Stream([30, 20]), 3, most=5, batch_size=2, num_workers=2, persistent_workers=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_closing_ends_an_endless_stream(workers: int, tmp_path: Path) -> None:
    loader = sf.DataLoader(Held((tmp_path / "ended").touch), batch_size=2, num_workers=workers)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    loader.close()
    assert (tmp_path / "ended").exists()
    with pytest.raises(StallfreeError, match="Begin a new one"):
        next(iterator)
    assert next(iter(loader)).tolist() == [0, 1]  # a temporary iterator ends as well
    loader.close()


def test_batches_on_a_device() -> None:
    with sf.DataLoader(Sized(3), batch_size=2, num_workers=2, device="cpu") as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 1], [0, 1], [2], [2]]
    assert loader.stats().batches == 8
    assert loader.stats().wait_seconds > 0


def test_attributes_that_are_set_later() -> None:
    loader = sf.DataLoader(Sized(3), batch_size=2)
    loader.num_workers, loader.collate_fn = 1, len
    assert list(loader) == [2, 1]
    assert loader.stats().num_workers == 1


def test_closing_ends_workers_that_an_exception_keeps() -> None:
    with pytest.raises(FileNotFoundError) as kept, sf.DataLoader(Stream([3], (1,)), num_workers=1) as loader:
        list(loader)
    assert not multiprocessing.active_children()
    assert kept.value.__traceback__ is not None


def test_arguments_without_meaning() -> None:
    orders = {"shuffle": True, "sampler": torch.arange(2), "batch_sampler": [[0], [1]], "ranks": "auto"}
    caches = {"cache": "auto", "capacity": "1MiB", "transform": len, "workers": sf.RayWorkers(1)}
    others = {"with_ids": True, "staging": 0, "on_error": "skip", "event_log": "log"}
    for name, value in (orders | caches | others).items():
        said = f"{name}=.* and an IterableDataset, .*leave out {name}.*stallfree.TarDataset"
        with pytest.raises(InputError, match=said):
            sf.DataLoader(Sized(5), **{name: value})


def test_epochs() -> None:
    with sf.DataLoader(Sized(3), batch_size=2) as loader:
        assert [loader.state_dict()["epoch"], len(list(loader)), loader.state_dict()["epoch"]] == [0, 2, 1]
        loader.set_epoch(7)
        assert next(iter(loader)).tolist() == [7000, 7001]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    half([Sized, Stateful], [{"num_workers": 2}, {}, {"num_workers": 1, "device": "cpu"}, {"device": "cpu"}]),
)
def test_a_state_resumes_at_every_step(kind: Any, arguments: dict[str, Any]) -> None:
    def loader() -> Any:
        return sf.DataLoader(kind(7), batch_size=2, **arguments)

    one = loader()
    one.set_epoch(3)
    whole = [batch.tolist() for batch in one]
    one.set_epoch(3)
    batches = iter(one)
    for taken in range(len(whole) + 1):
        state = pickle.loads(pickle.dumps(one.state_dict()))
        other = loader()
        other.load_state_dict(state)
        assert other.state_dict() == state
        rest = [batch.tolist() for batch in other]
        assert rest == (whole[taken:] or whole)  # after the last batch, the next epoch is due
        if kind is Stateful and not other.num_workers and taken < len(whole):
            assert other.dataset.made == 7 - 2 * taken  # nothing was made again
        assert other.state_dict()["epoch"] == (4 if taken < len(whole) else 5)
        other.close()
        next(batches, None)
        if taken == len(whole) - 1:
            assert next(batches, None) is None
    one.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_resumes_after_a_batch_that_failed(workers: int) -> None:
    one, other = (sf.DataLoader(Stream([8], (3,)), batch_size=2, num_workers=workers) for _ in range(2))
    with one, other:
        batches = outcomes(iter(one))
        assert [type(next(batches)), next(batches)] == [dict, FileNotFoundError]
        other.load_state_dict(one.state_dict())
        rest = [batch["at"].tolist() for batch in outcomes(iter(other)) if batch is not FileNotFoundError]
        assert rest == [batch["at"].tolist() for batch in batches]


def test_a_seed_is_that_of_the_workers() -> None:
    found: list[list[list[float]]] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed + len(found))
        with sf.DataLoader(Drawn(), 3, num_workers=1, seed=seed) as loader:
            found.append([torch.cat(list(loader)).tolist() for _ in range(2)])
    assert found[0] == found[1]
    assert len({number for epoch in found[0] + found[2] for number in epoch}) == 36
    with sf.DataLoader(Drawn(), 3, num_workers=1, seed=2) as loader:
        loader.set_epoch(1)
        first, state = next(iter(loader)), loader.state_dict()
        loader.load_state_dict(state)
        assert torch.cat([first, *loader]).tolist() == found[2][1]


def test_a_state_of_another_loader() -> None:
    state = sf.DataLoader(Sized(3), 2, seed=1).state_dict()
    for other in (sf.DataLoader(Sized(3), 1, seed=1), sf.DataLoader(Sized(3), 2), sf.DataLoader(list(range(3)), 2)):
        with pytest.raises(InputError, match="the state was taken with"):
            other.load_state_dict(state)
