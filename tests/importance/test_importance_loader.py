"""A loader with an `ImportanceSampler`: ids, samples, weights, losses, states, copies; and how it must not be used."""

import contextlib
import json
import multiprocessing
import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from cached_data import Numbers
from importance_tools import Drifting, Residents
from loader_data import Made
from stallfree.cache import SampleCache
from stallfree.errors import WaitError
from stallfree.importance.epoch import FRESH, Retention
from stallfree.importance.plans import Draw
from stallfree.testing import ThrottledSource

COUNT = 240
SIZE = 512  # numbers in a sample, of 8 bytes


def loss_of(ids: torch.Tensor, epoch: int) -> torch.Tensor:
    return ((ids * 37) % 101 + epoch).float() / 10


def sample(id: int) -> tuple[torch.Tensor, int]:
    return torch.full((3,), id), id


@contextlib.contextmanager
def cached(policy: str) -> Iterator[tuple[ThrottledSource, sf.CachedDataset]]:
    """A counted source, and a cache that holds about four in ten of its samples."""
    capacity = int(0.4 * COUNT * (SIZE * 8 + 64)) + 60 * COUNT + 16384
    options, numbers = {"capacity": capacity, "policy": policy}, Numbers(COUNT, size=SIZE)
    with contextlib.closing(ThrottledSource(numbers)) as source, sf.CachedDataset(source, **options) as dataset:
        yield source, dataset


def weights_by_id(sampler: sf.ImportanceSampler, epoch: int) -> dict[int, float]:
    """What the docstring says of the weights of an epoch: 1 / p times one factor, so that their mean is 1."""
    plan = sampler.plan(epoch)
    if plan.weights is None:
        return dict.fromkeys(plan.ids.tolist(), 1.0)
    scale = len(plan.ids) / sampler.num_samples
    return dict(zip(plan.ids.tolist(), (plan.weights * scale).tolist(), strict=True))


def check(batch: sf.Batch, expected: dict[int, float]) -> list[int]:
    """Each sample of a batch has its own label and weight; its ids."""
    numbers, labels = batch.data
    ids = batch.ids.tolist()
    assert labels.tolist() == ids
    assert (numbers == batch.ids[:, None]).all()
    assert batch.weights.dtype == torch.float32
    assert batch.weights.tolist() == pytest.approx([expected.get(id, 1.0) for id in ids])
    return ids


@pytest.mark.parametrize(("plan", "policy", "on_miss", "workers"), [
    ("unbiased", "minio", None, 0), ("unbiased", "importance", "swap", 2), ("icache", "minio", "swap", 0),
    ("icache", "importance", "substitute", 0), ("infobatch", "minio", "swap", 2),
])  # fmt: skip
def test_ids_labels_weights_and_losses_belong_together(plan: str, policy: str, on_miss: Any, workers: int) -> None:
    with cached(policy) as (source, dataset):
        sampler = sf.ImportanceSampler(COUNT, plan=plan, cache=dataset.cache, on_miss=on_miss, beta=2)
        told, substituted = np.full(COUNT, np.inf), 0
        with sf.DataLoader(dataset, 13, sampler=sampler, num_workers=workers, persistent_workers=workers > 0) as loader:
            for epoch in range(4):
                ledger: list[int] = []
                planned, steps = set(sampler.plan(epoch).ids.tolist()), len(loader)
                expected, missing = weights_by_id(sampler, epoch), COUNT - int(dataset.cache.stats().resident_items)
                before, batches = source.requests, 0
                for batches, batch in enumerate(loader, 1):  # noqa: B007
                    assert len(loader) == steps
                    ledger += check(batch, expected)
                    told[batch.ids] = losses = loss_of(batch.ids, epoch)
                    loader.update(batch.ids, losses)
                assert batches == steps
                assert len(ledger) == len(set(ledger)) == len(planned)
                if on_miss != "substitute":
                    assert set(ledger) == planned
                substituted += len(set(ledger) - planned)
                assert sampler.losses.last.tolist() == told.tolist()
                if plan == "unbiased" and epoch > 0:
                    assert source.requests - before == pytest.approx(0.25 * missing, abs=1.5)
                    assert len(ledger) < COUNT
            stats = loader.importance_stats()
        assert (stats.low_hits <= stats.low_requests, stats.high_hits <= stats.high_requests) == (True, True)
        assert 0 <= stats.hit_ratio <= 1
        assert stats.substitutions >= substituted
        if plan == "icache":
            assert (substituted if on_miss == "substitute" else stats.swaps) > 0


def test_samples_that_are_skipped() -> None:
    def read(id: int) -> Any:
        if id not in good:
            raise OSError("the file is cut short")
        return sample(id)

    good = {id for id in range(70) if id % 7 != 3}
    sampler = sf.ImportanceSampler(70, plan="icache", cache=Drifting(70, 1), on_miss="substitute", max_age=2)
    loader = sf.DataLoader(Made(70, read), 6, sampler=sampler, num_workers=2, on_error="skip")
    last = np.full(70, -1)
    for epoch in range(4):
        expected = weights_by_id(sampler, epoch)
        ledger: list[int] = []
        for batch in loader:
            ledger += check(batch, expected)
            loader.update(batch.ids, loss_of(batch.ids, epoch))
        assert set(ledger) <= good
        assert len(ledger) == len(set(ledger))
        last[ledger] = epoch
        assert epoch - last[list(good)].min() < 2
    assert np.isinf(sampler.losses.last[[id for id in range(70) if id not in good]]).all()


def resumable(plan: str, on_miss: str | None, workers: int, *, drop_last: bool = False) -> sf.DataLoader:
    """The residents are those whose id is even, and stay."""
    cache = Residents(90, range(0, 90, 2))
    sampler = sf.ImportanceSampler(90, plan=plan, cache=cache, on_miss=on_miss, beta=2, seed=5, max_age=2)
    return sf.DataLoader(Made(90, sample), 7, sampler=sampler, num_workers=workers, drop_last=drop_last)


Told = tuple[list[int], list[float]]


def train(loader: sf.DataLoader, epoch: int, told: list[Told], states: list[Any] | None = None) -> None:
    for batch in loader:
        told.append((batch.ids.tolist(), batch.weights.tolist()))
        loader.update(batch.ids, loss_of(batch.ids, epoch))
        if states is not None:
            states.append(json.dumps(loader.state_dict()))


@pytest.mark.parametrize(
    ("plan", "on_miss", "workers", "drop_last"),
    [("unbiased", None, 0, False), ("icache", "swap", 2, True), ("icache", "substitute", 0, False)],
)
def test_resume_at_every_batch(plan: str, on_miss: Any, workers: int, drop_last: bool) -> None:
    """Ids and weights of the rest are those that were left, and so are the epochs that follow."""
    loader = resumable(plan, on_miss, workers, drop_last=drop_last)
    train(loader, 0, [])
    states, told, after = [json.dumps(loader.state_dict())], list[Told](), list[Told]()
    train(loader, 1, told, states)
    train(loader, 2, after), train(loader, 3, after)
    every = range(len(states)) if workers == 0 else (1, len(states) // 2, len(states) - 1)
    for step in every:
        resumed = resumable(plan, on_miss, 0, drop_last=drop_last)
        resumed.load_state_dict(json.loads(states[step]))
        assert json.dumps(resumed.state_dict()) == states[step]
        assert len(resumed) == len(told)
        rest: list[Told] = []
        train(resumed, 1, rest)
        assert rest == told[step:], step
        train(resumed, 2, rest), train(resumed, 3, rest)
        assert rest == told[step:] + after, step


FORTY = list(range(40))


def told(batches: Any, loader: sf.DataLoader) -> list[int]:
    """The ids of the rest of an epoch, each with its sample and a loss."""
    ids: list[int] = []
    for batch in batches:
        assert batch.data.tolist() == batch.ids.tolist()
        loader.update(batch.ids, batch.ids.float())
        ids += batch.ids.tolist()
    return ids


def test_a_copy_goes_on_by_itself(tmp_path: Path) -> None:
    data = sf.CachedDataset(FORTY, capacity="1MiB", policy="importance", name="copies")
    sampler = sf.ImportanceSampler(40, cache=data.cache, plan="icache", packages=tmp_path)
    loader = sf.DataLoader(data, 4, sampler=sampler)
    iterator = iter(loader)
    before = told(islice(iterator, 3), loader)
    other = pickle.loads(pickle.dumps(loader))
    assert other.sampler is not loader.sampler
    other.set_epoch(0)
    assert sorted(told(other, other)) == FORTY
    shorter = len(told(other, other))
    assert sorted(before + told(iterator, loader)) == FORTY
    assert shorter == len(told(loader, loader)) <= 40, "the same losses give the same plan"
    for each in (loader, loader.dataset, other, other.dataset):
        each.close()  # type: ignore[union-attr]


def send_size(loader: sf.DataLoader, answers: Any) -> None:
    answers.send(len(told(loader, loader)))
    loader.close()


@pytest.mark.slow
def test_it_can_be_sent_to_another_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    with (
        sf.CachedDataset(FORTY, capacity="1MiB", policy="importance", name="sent") as data,
        sf.DataLoader(data, 4, sampler=sf.ImportanceSampler(40, cache=data.cache, packages=tmp_path)) as loader,
    ):
        told(loader, loader)
        ours, theirs = context.Pipe()
        process = context.Process(target=send_size, args=(loader, theirs))
        process.start()
        assert ours.poll(60)
        assert 0 < ours.recv() <= 40
        process.join()
        assert process.exitcode == 0
        assert len(told(loader, loader)) > 0, "this one goes on as well"
        ours.close(), theirs.close()


def small(name: str | None = None) -> sf.CachedDataset:
    return sf.CachedDataset(Made(COUNT, sample), capacity="64KiB", policy="importance", name=name)


def test_a_resumed_epoch_has_its_own_weights_though_the_next_plan_was_asked_for() -> None:
    sampler = sf.ImportanceSampler(COUNT, seed=1)
    with sf.DataLoader(Made(COUNT, sample), 20, sampler=sampler) as loader:
        train(loader, 0, [])
        next(iter(loader))
        expected = weights_by_id(sampler, 1)
        sampler.plan(2)
        state = json.loads(json.dumps(loader.state_dict()))
    with sf.DataLoader(Made(COUNT, sample), 20, sampler=sf.ImportanceSampler(COUNT, seed=1)) as loader:
        loader.load_state_dict(state)
        assert len([id for batch in loader for id in check(batch, expected)]) == len(expected) - 20


def test_the_sampler_and_the_data_set_have_one_cache() -> None:
    with small(name="one") as data, small(name="two") as other:
        with pytest.raises(sf.InputError, match="the sampler has the cache 'two', the data set 'one'"):
            sf.DataLoader(data, 20, sampler=sf.ImportanceSampler(COUNT, cache=other.cache))
        with pytest.warns(RuntimeWarning, match="nothing counts as resident: give ImportanceSampler"):
            sf.DataLoader(data, 20, sampler=sf.ImportanceSampler(COUNT))


def test_rotating_residents_are_for_one_job() -> None:
    with small() as data, small() as again:
        assert data.cache.name == again.cache.name
        first, second = (sf.ImportanceSampler(COUNT, cache=d.cache) for d in (data, again))
        first.begin(0, 20)
        with pytest.warns(RuntimeWarning, match="2 jobs use this cache with importance"):
            second.begin(0, 20)
        first.close()
        second.begin(1, 20)  # alone, and it was said once
        second.close()


@pytest.mark.parametrize("given", [None, 0.5])
def test_the_benefit_of_the_cache_is_measured_unless_it_is_given(given: float | None) -> None:
    with contextlib.closing(ThrottledSource(Numbers(32, size=SIZE), latency=0.05)) as source:
        data = sf.CachedDataset(source, capacity="64KiB", policy="importance")
        sampler = sf.ImportanceSampler(32, plan="full", cache=data.cache, benefit=given)
        with data, sf.DataLoader(data, 8, sampler=sampler) as loader:
            list(loader), list(loader), iter(loader)
    assert sampler.benefit > 1.2 if given is None else sampler.benefit == given


def test_what_a_busy_cache_could_not_be_told_is_told_the_next_time() -> None:
    told: list[tuple[list[int], list[float]]] = []

    def set_scores(ids: np.ndarray, scores: np.ndarray) -> None:
        if cache.busy:
            raise WaitError("another process (stopped?) held the lock")
        told.append((ids.tolist(), scores.tolist()))

    cache = SimpleNamespace(busy=True, set_scores=set_scores)
    keeping = Retention(cache, rotating=False)
    plan = sf.ImportanceSampler(4, plan="full").plan(0)
    keeping.begin(Draw(plan, np.zeros(4, bool), np.arange(4) < 3), np.arange(4, dtype=np.float32), 1.0, 0)
    keeping.served(np.array([2]))
    assert told == []
    cache.busy = False
    keeping.served(np.array([0]))
    assert told == [([0, 1, 2, 3, 2, 0], [FRESH] * 3 + [1.0, 0.75, 0.25])]  # 3 is not resident


@pytest.mark.parametrize("begun", [False, True])
def test_an_iteration_that_is_left_ends_no_later_epoch(begun: bool) -> None:
    """Its end changes nothing of what a later plan counts as served, also if that epoch has begun."""
    sampler = sf.ImportanceSampler(1000, target_io=0.25, max_age=2, seed=0)
    with sf.DataLoader(range(1000), batch_size=10, sampler=sampler) as loader:
        iterations = []
        for _ in range(1 + begun):
            iterations.append(iter(loader))
            next(iterations[-1])
        planned = {*sampler.plan(1).ids.tolist()}
        del iterations[0]
        drawn = {*sampler.plan(2).ids.tolist()}
    assert set(range(1000)) - planned <= drawn  # overdue
    assert len(planned & drawn) < len(planned) / 2  # these are not: epoch 1 has them


def test_an_l_sample_that_packages_brought_is_evicted_once_it_is_served() -> None:
    row = np.zeros(4096, np.uint8)
    with SampleCache(200, capacity="256KiB", fingerprint="f", policy="importance", example=row) as cache:
        sampler = sf.ImportanceSampler(200, plan="icache", cache=cache, seed=0, warm_up=0)
        sampler.update(np.arange(200), np.arange(200) / 200)
        active = sampler.begin(1, 10)
        low = np.intersect1d(np.flatnonzero(active.draw.low), active.draw.plan.ids)[:3]
        cache.set_scores(low, np.full(len(low), FRESH))  # as the packaging process does
        assert cache.put_many(low, [row] * len(low)).all()
        active.served(low)
        cache.put_many(np.arange(100, 200), [row] * 100)  # of higher loss, more than there is room for
        assert not cache.resident(low).any()
