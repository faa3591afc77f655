"""A state taken at any step, and loaded into another loader, gives exactly what was left."""

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

import stallfree as sf
from cases import half
from loader_data import Made, jittered, noisy_collate, picture, same

SAMPLES = 23

Arguments = Callable[[], dict[str, Any]]
ORDERS: dict[str, Arguments] = {
    "in order": lambda: {"batch_size": 4}, "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "shuffled, drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "single": lambda: {"batch_size": None, "shuffle": True},
    "RandomSampler": lambda: {"batch_size": 4, "sampler": RandomSampler(range(SAMPLES))},
    "batch_sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SAMPLES)), 5, False)},
    "DistributedSampler": lambda: {"batch_size": 3, "sampler": DistributedSampler(range(SAMPLES), 2, 0, seed=4)},
}  # fmt: skip


def values(batch: Any) -> Any:
    return [batch.ids.tolist(), batch.data]


@pytest.mark.parametrize(("name", "workers"), [
    *((name, 0) for name in ORDERS if name != "single"), ("batch_sampler", 1),
    *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ORDERS),
])  # fmt: skip
def test_resume_at_every_step(name: str, workers: int) -> None:
    """The rest is the same; its augmentation too, except without workers, where it draws from global generators."""

    def make() -> sf.DataLoader:
        data = Made(SAMPLES, jittered if workers else picture)
        return sf.DataLoader(data, num_workers=workers, with_ids=True, **ORDERS[name]())

    torch.manual_seed(6)
    loader = make()
    list(loader)  # in the second epoch
    states = [loader.state_dict()]
    batches = []
    for batch in loader:
        batches.append(values(batch))
        states.append(loader.state_dict())
    states.append(loader.state_dict())
    assert states[-1]["epoch"] == 2
    own = ORDERS[name]().keys().isdisjoint(("sampler", "batch_sampler"))
    after = [values(batch) for batch in loader]
    for step, state in enumerate(states[:-1]):
        torch.manual_seed(step)  # the seed is in the state
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        if step == 0 and not own:
            continue  # nothing was drawn yet, so a random sampler is as free as it was
        assert same([values(batch) for batch in resumed], batches[step:]), step
        if own or "Distributed" in name:
            assert same([values(batch) for batch in resumed], after), step


@pytest.mark.parametrize("left", [False, True])
def test_resume_of_a_resumed_epoch(left: bool) -> None:
    """Batches that were under way when the loop was left are not lost."""

    def make() -> sf.DataLoader:
        sampler = RandomSampler(range(SAMPLES))
        return sf.DataLoader(Made(SAMPLES, picture), 4, sampler=sampler, collate_fn=noisy_collate, num_workers=1)

    torch.manual_seed(0)
    expected = list(make())
    torch.manual_seed(0)
    loader, got = make(), []
    for _ in range(len(expected)):
        iterator = iter(loader)
        got.append(next(iterator))
        if left:
            del iterator
        state = loader.state_dict()
        loader = make()
        loader.load_state_dict(state)
    assert same(got, expected)
    assert list(loader) == []


@pytest.mark.parametrize(("change", "message"), [
    ({"version": 0}, "version 0, expected 1"), ({"seed": 1}, "seed=1, this loader has seed=0: give the same, or none"),
    ({"order": {"samples": 20, "batch_size": 5, "shuffle": True, "drop_last": False}}, "batch_size"),
], ids=str)  # fmt: skip
def test_states_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    loader = sf.DataLoader(Made(20, picture), 3, shuffle=True, seed=0)
    with pytest.raises(sf.InputError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    assert len(list(loader)) == 7


def test_a_sampler_that_raises_has_no_state() -> None:
    def ids() -> Any:
        yield from range(8)
        raise ZeroDivisionError

    loader = sf.DataLoader(Made(20, int), 2, sampler=ids())
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(sf.StallfreeError, match="ZeroDivisionError"):
        loader.state_dict()
    assert [next(iterator).tolist() for _ in range(3)] == [[2, 3], [4, 5], [6, 7]]
    with pytest.raises(ZeroDivisionError):
        next(iterator)


class Endless:
    """Permutations without an end, or batches of them. Counts what is drawn; fails if that is more than needed."""

    def __init__(self, count: int = SAMPLES, size: int = 0) -> None:
        self.count, self.size, self.drawn = count, size, 0

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        while True:
            ids = torch.randperm(self.count, generator=generator).tolist()
            self.drawn += len(ids)
            assert self.drawn < 1_000_000
            yield from ([ids[at : at + self.size] for at in range(0, self.count, self.size)] if self.size else ids)


@pytest.mark.parametrize(("by_batches", "sized", "workers"), half([False, True], [False, True], [0, 1]))
def test_a_sampler_that_does_not_end(by_batches: bool, sized: bool, workers: int) -> None:
    kind = type("WithLength", (Endless,), {"__len__": lambda self: SAMPLES}) if sized else Endless

    def make() -> sf.DataLoader:
        order = {"batch_sampler": kind(size=5)} if by_batches else {"batch_size": 4, "sampler": kind()}
        return sf.DataLoader(Made(SAMPLES, int), num_workers=workers, seed=6, **order)

    def take(batches: Any, count: int) -> list[list[int]]:
        return [next(batches).tolist() for _ in range(count)]

    loader, resumed, third = make(), make(), make()
    take(batches := iter(loader), 7)
    state = json.dumps(loader.state_dict())
    assert len(state) < 500
    expected = take(batches, 20)
    resumed.load_state_dict(json.loads(state))
    assert take(iter(resumed), 10) == expected[:10]
    third.load_state_dict(resumed.state_dict())
    assert take(iter(third), 10) == expected[10:]
    sampler = loader.batch_sampler if by_batches else loader.sampler
    drawn = sampler.drawn
    for _ in range(100):
        next(batches)
        loader.state_dict()
    assert sampler.drawn - drawn < 700  # a state draws no more than the one before
    for made in (loader, resumed, third):
        made.close()


def test_a_long_sampler_that_ends_is_exact() -> None:
    """It is random, and much longer than the data set: its rest is in the state."""
    sampler = RandomSampler(range(SAMPLES), replacement=True, num_samples=100_000)
    loader, resumed = (sf.DataLoader(Made(SAMPLES, int), 1000, sampler=sampler) for _ in range(2))
    batches = iter(loader)
    next(batches)
    resumed.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in resumed]


FEW, SIZE = 6, 4


def noisy(id: int) -> tuple[int, float]:
    return id, torch.rand(()).item()


def with_replacement() -> RandomSampler:
    return RandomSampler(range(FEW), replacement=True, num_samples=60, generator=torch.Generator().manual_seed(2))


REPEATING: dict[str, Callable[[], dict[str, Any]]] = {
    "endless": lambda: {"batch_size": SIZE, "sampler": Endless(FEW)},
    "with replacement": lambda: {"batch_sampler": BatchSampler(with_replacement(), SIZE, False)},
    "single": lambda: {"batch_size": None, "sampler": Endless(FEW)},
    "a list": lambda: {"batch_size": 2, "sampler": [0, 1, 2] * 5},
}


def pairs(batches: Any) -> list[Any]:
    """(id, number drawn for it) of each sample."""
    found = []
    for ids, numbers in batches:
        found += sorted(zip(ids.tolist(), numbers.tolist(), strict=True)) if torch.is_tensor(ids) else [(ids, numbers)]
    return found


@pytest.mark.parametrize(("name", "workers"), half(REPEATING, [1, 0]))
def test_a_sample_that_comes_again_is_another_one(name: str, workers: int) -> None:
    cached = sf.CachedDataset(Made(FEW, int), capacity="1MiB", transform=noisy)
    data: Any = Made(FEW, noisy) if workers else cached

    def loader() -> sf.DataLoader:
        return sf.DataLoader(data, num_workers=workers, seed=3, **REPEATING[name]())

    first = loader()
    batches = iter(first)
    seen = pairs(islice(batches, 3))
    state = json.loads(json.dumps(first.state_dict()))
    rest = pairs(islice(batches, 12))
    drawn = [number for _, number in seen + rest]
    assert len({id for id, _ in seen + rest}) < len(drawn) == len(set(drawn))
    resumed = loader()
    resumed.load_state_dict(state)
    assert pairs(islice(iter(resumed), 12)) == rest
    again = loader()  # nothing but the seed decides
    assert pairs(islice(iter(again), 15)) == seen + rest
    if name in ("with replacement", "a list"):
        another = pairs(again)  # the next epoch, of the same generator or not
        assert not {number for _, number in another} & set(drawn)
    for made in (first, resumed, again, cached):
        made.close()
