"""What plans promise: no bias, the storage operations that were asked for, nobody unseen for long, the top losses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stallfree as sf
from importance_tools import Array, Drifting, Kept, Residents, Served, Task, chances_of, knowing, z_score
from stallfree.importance import sampler as importance
from stallfree.importance.plans import Draw, Known, draw_plan, leaning, ranks, shares, systematic


def epoch_of(rule: Any, task: Task, resident: Array, seed: int) -> Draw:
    return draw_plan(rule, Known(task.losses, np.zeros(len(task.losses), np.int32), resident), seed, 1)


def estimates(draws: list[Draw], task: Task, *, power: float = 1.0) -> tuple[list[float], list[Array]]:
    """Of each draw, the sum of the weights and the weighted sum of the gradients; the weights to some power."""
    weights = [np.float64(draw.plan.weights) ** power for draw in draws]
    sums = [float(each.sum()) for each in weights]
    return sums, [each @ task.gradients[draw.plan.ids] for each, draw in zip(weights, draws, strict=True)]


@pytest.mark.parametrize(("given", "some"), [
    ({}, lambda task: []), ({"target_io": 0.2, "p_min": 0.02}, lambda task: np.argsort(task.losses)),
    ({"plan": "infobatch", "prune": 0.8}, lambda task: np.argsort(task.gradients[:, 0])),
], ids=["no cache", "low floor, the unimportant are resident", "infobatch"])  # fmt: skip
def test_the_expected_gradient_is_the_full_one(given: Any, some: Any) -> None:
    """Whoever is resident; and the test notices weights that are tempered."""
    task = Task(150)
    full, cache = task.gradients.sum(axis=0), Residents(150, some(task)[:60])
    sampler = sf.ImportanceSampler(150, cache=cache, **given)
    draws = [epoch_of(sampler.rule, task, cache.there, seed) for seed in range(300)]
    sums, gradients = estimates(draws, task)
    assert z_score(sums, 150) < 4
    assert z_score(gradients, full) < 4
    sums, gradients = estimates(draws, task, power=0.8)
    assert z_score(sums, 150) > 12
    assert z_score(gradients, full) > 6


def rotated(folder: Path, task: Task, seed: int) -> tuple[list[float], Array]:
    """Sums of weights and weighted gradients of the epochs of a run on a cache whose residents rotate."""
    count = len(task.losses)
    cache = Kept(folder, count, count * 2 // 5, "importance")
    sampler = sf.ImportanceSampler(count, cache=cache, seed=seed)
    served, sums, gradients = Served(sampler, 32), [], []
    before = cache.resident(np.arange(count))
    for epoch in range(6):
        weights = np.zeros(count)
        for ids, each in served.epoch(epoch):
            cache.use(ids)
            weights[ids] = each
            sampler.update(ids, task.losses[ids])
        weights *= count / np.count_nonzero(weights)  # as they were before they were normalized
        sums.append(weights.sum())
        gradients.append(weights @ task.gradients)
        now = cache.resident(np.arange(count))
        assert epoch == 0 or (now & ~before).sum() > 20  # they do rotate
        before = now
    return sums[2:], np.mean(gradients[2:], axis=0)


def test_the_expected_gradient_where_residents_rotate(tmp_path: Path) -> None:
    task = Task(256)
    full = task.gradients.sum(axis=0)
    runs = [rotated(tmp_path / str(seed), task, seed) for seed in range(30)]
    assert z_score([np.mean(sums) for sums, _ in runs], 256) < 4
    gradients = np.array([gradient for _, gradient in runs])
    assert z_score(gradients, full) < 4
    assert np.linalg.norm(gradients.mean(axis=0) - full) < 0.02 * np.linalg.norm(full)


share = st.floats(0.01, 1)


@settings(max_examples=30)
@given(st.integers(1, 500), share, share, st.floats(0, 1), st.booleans(), st.integers(0, 2**32))
def test_probabilities(count: int, target: float, floor: float, held: float, rotating: bool, seed: int) -> None:
    """They are what the weights say, and above the floor."""
    rng = np.random.default_rng(seed)
    cache = Residents(count, np.flatnonzero(rng.random(count) < held), given=rotating)
    sampler = sf.ImportanceSampler(count, target_io=target, p_min=min(floor, target), cache=cache, seed=seed)
    losses = rng.exponential(size=count).astype(np.float32)
    chances = chances_of(knowing(sampler, losses), 1)
    assert min(floor, target) <= chances.min() <= chances.max() <= 1
    plan = sampler.plan(1)
    assert len(set(plan.ids.tolist())) == len(plan.ids)
    assert plan.weights is not None
    by = shares(chances, ranks(losses)) if rotating else chances
    assert plan.weights == pytest.approx(1 / by[plan.ids])
    assert set(np.flatnonzero(cache.there).tolist()) <= set(plan.ids.tolist())
    missing = count - int(cache.there.sum())
    assert abs((~cache.there[plan.ids]).sum() - missing * target) <= 1 + missing * 2e-3


@pytest.mark.parametrize("policy", ["minio", "importance"])
@pytest.mark.parametrize(("target", "held"), [(0.25, 0.8), (0.5, 0.4)])
def test_storage_operations_are_those_asked_for(tmp_path: Path, policy: str, target: float, held: float) -> None:
    """And never more than MinIO costs under the full plan."""
    count, rng = 1000, np.random.default_rng(1)
    cache = Kept(tmp_path / "cache", count, int(held * count), policy)
    sampler = sf.ImportanceSampler(count, cache=cache, target_io=target)
    served, missing = Served(sampler, 100), round((1 - held) * count)
    for epoch in range(6):
        before = cache.fetched
        for ids, _ in served.epoch(epoch):
            cache.use(ids)
            sampler.update(ids, rng.exponential(size=len(ids)) * (1 + ids))
        if epoch > 0:
            assert cache.fetched - before == pytest.approx(target * missing, rel=0.02)
            assert cache.fetched - before <= missing


plans, misses = ["unbiased", "icache", "infobatch", "full"], ["swap", "substitute", "fetch"]
choices = {"plan": st.sampled_from(plans), "on_miss": st.sampled_from(misses), "max_age": st.integers(1, 4)}
numbers = {"warm_up": st.integers(0, 2), "seed": st.integers(0, 2**32), "target_io": st.sampled_from([0.1, 0.5])}
arguments = st.fixed_dictionaries({**choices, **numbers})


@pytest.mark.filterwarnings("ignore:update was given NaN")
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(arguments, st.booleans(), st.integers(1, 20), st.integers(0, 4))
def test_nobody_is_unseen_for_long(given: dict[str, Any], scored: bool, batch_size: int, late: int) -> None:
    count, rng = 40, np.random.default_rng(given["seed"])
    if given["on_miss"] == "substitute" and given["plan"] in ("unbiased", "infobatch"):
        given = {**given, "on_miss": "swap"}
    cache = Drifting(count, given["seed"], given=scored)
    sampler = sf.ImportanceSampler(count, cache=cache, beta=2, prune=0.9, **given)
    served, last = Served(sampler, batch_size, late=late), np.full(count, -1)
    for epoch in range(3 * given["max_age"] + 3):
        for ids, _ in served.epoch(epoch):
            last[ids] = epoch
            losses = (1.0 + ids) ** 3 * rng.exponential(size=len(ids))
            losses[rng.random(len(ids)) < 0.02] = rng.choice([np.nan, np.inf, 0.0])
            sampler.update(ids, losses)
        assert epoch - last.min() < given["max_age"], "somebody was left out that often in a row"


def test_selection_goes_by_the_share_of_losses_below() -> None:
    """Jiang et al.: with losses 1 to 1,000 that were all seen, the one of rank r is drawn with (r / 1,000) ** beta."""
    sampler = knowing(sf.ImportanceSampler(1000, plan="icache", beta=2), np.arange(1000))
    chances = chances_of(sampler, 1)
    assert chances == pytest.approx((np.arange(1, 1001) / 1000) ** 2)
    assert sampler.begin(1, 8).draw.low.tolist() == (chances < 0.5).tolist()
    assert len(sampler.plan(1).ids) == pytest.approx(1000 / 3, abs=2)
    assert sampler.plan(1).weights is None


def test_infobatch_draws_all_while_nothing_is_known() -> None:
    sampler = sf.ImportanceSampler(100, plan="infobatch", warm_up=0)
    assert sorted(sampler.plan(0).ids.tolist()) == list(range(100))
    assert set(sampler.plan(0).weights.tolist()) == {1.0}
    sampler.update(np.arange(50), np.arange(50))
    assert chances_of(sampler, 1).tolist() == [0.5] * 25 + [1.0] * 75  # below the mean of the known ones, 24.5
    plan = sampler.plan(1)
    assert len(plan.ids) in (87, 88)
    assert plan.weights is not None
    assert plan.weights.tolist() == [2.0 if id < 25 else 1.0 for id in plan.ids]


@pytest.mark.parametrize(("given", "full"), [
    ({}, {0}), ({"warm_up": 3}, {0, 1, 2}), ({"plan": "icache", "full_every": 4}, {0, 4, 8, 12}),
    ({"plan": "infobatch", "num_epochs": 16}, {0, 14, 15}),
    ({"plan": "infobatch", "num_epochs": 9}, {0, *range(7, 16)}), ({"plan": "infobatch"}, {0}),
    ({"num_epochs": 4}, {0}), ({"plan": "full"}, set(range(16))),
], ids=str)  # fmt: skip
def test_which_epochs_take_all(given: dict[str, Any], full: set[int]) -> None:
    sampler = knowing(sf.ImportanceSampler(200, max_age=99, **given), np.arange(200))
    assert {epoch for epoch in range(16) if len(sampler.plan(epoch).ids) == 200} == full
    weights = sampler.plan(min(full)).weights
    assert weights is None or set(weights.tolist()) == {1.0}


STEPS = 64
finite = st.floats(-(2.0**90), 2.0**90, width=32)
scores = st.lists(finite | st.just(float("inf")), max_size=40).map(lambda values: np.array(values, np.float32))


@given(st.lists(st.integers(0, STEPS), max_size=30), st.randoms(use_true_random=False))
def test_systematic_draws_each_with_exactly_its_chance(chances: list[int], random: Any) -> None:
    """With chances in 64ths, the 64 places that the marks can have decide all there is."""
    order = np.array(random.sample(range(len(chances)), len(chances)), np.int64)
    times = np.zeros(len(chances), int)
    for step in range(STEPS):
        mark: Any = SimpleNamespace(random=lambda step=step: (step + 0.5) / STEPS)
        drawn = systematic(np.array(chances) / STEPS, order, mark)
        assert len(set(drawn.tolist())) == len(drawn)
        assert len(drawn) in (sum(chances) // STEPS, -(-sum(chances) // STEPS))
        places = [order.tolist().index(id) for id in drawn]
        assert places == sorted(places)
        times[drawn] += 1
    assert times.tolist() == chances


@given(scores)
def test_ranks(values: Any) -> None:
    places = ranks(values)
    count = len(values)
    assert sorted((places * count).round().astype(int).tolist()) == list(range(1, count + 1))
    assert values[np.argsort(places)].tolist() == sorted(values.tolist())


@given(st.integers(1, 300), st.floats(0.01, 1.2), share, st.floats(0, 1), st.integers(0, 2**32))
def test_leaning(count: int, mean: float, lowest: float, lean: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    places, some = ranks(rng.random(count)), rng.random(count) < 0.7
    chances = leaning(places, some, mean, lowest, lean)
    assert lowest <= chances.min() <= chances.max() <= 1
    assert (np.diff(chances[np.argsort(places)]) >= 0).all()
    if some.any():
        assert chances[some].mean() == pytest.approx(np.clip(mean, lowest, 1), rel=2e-3)
    if lean == 0:
        assert np.ptp(chances) < 1e-9


def test_under_another_loader() -> None:
    """As the sampler of torch's own loader: each epoch its plan, and `len` of the loader is what comes."""
    sampler = sf.ImportanceSampler(120, seed=2)
    loader = torch.utils.data.DataLoader(list(range(120)), batch_size=7, sampler=sampler)
    for epoch in range(5):
        batches = list(loader)
        assert len(loader) == len(batches)
        ids = torch.cat(batches)
        plan = sampler.plan(epoch)
        assert plan.epoch == epoch
        assert ids.tolist() == plan.ids.tolist()
        assert len(sampler) == len(ids) == (120 if epoch == 0 else 30)
        sampler.update(ids, ids.float())
    sampler.set_epoch(9)
    assert len(sampler) == len(sampler.plan(9).ids)
    assert list(sampler) == sampler.plan(9).ids.tolist()
    assert list(sampler) == sampler.plan(10).ids.tolist()


def test_asking_for_other_plans_does_not_change_an_epoch_under_way() -> None:
    sampler = knowing(sf.ImportanceSampler(200, seed=1), np.arange(200))
    plan, found = sampler.plan(1), dict[int, float]()
    expected = dict(zip(plan.ids.tolist(), (plan.weights * len(plan.ids) / 200).tolist(), strict=True))
    for ids, weights in Served(sampler).epoch(1):
        found |= dict(zip(ids.tolist(), weights.tolist(), strict=True))
        len(sampler), sampler.plan(5), sampler.plan(0)
    assert found == pytest.approx(expected)


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 8), st.booleans())
def test_parts_of_ranks(count: int, ranks: int, batch_size: int, drop_last: bool) -> None:
    parts, padded = [], set[int]()
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(ranks):
            patch.setattr(importance, "ranks_of_job", lambda rank=rank: (rank, ranks))  # but nothing to agree on
            sampler = sf.ImportanceSampler(count, seed=5)
            mine = list(sampler)
            assert len(mine) == len(sampler) == -(-count // ranks)  # padded, as torch's own
            padded |= {*mine}
            parts.append([ids.tolist() for ids in sampler.batches(0, batch_size, drop_last=drop_last)])
            assert len(parts[-1]) == sampler.num_batches(0, batch_size, drop_last=drop_last)
    assert padded == {*range(count)}
    assert len({len(part) for part in parts}) == 1
    sizes = {len(batch) for part in parts for batch in part}
    ledger = [id for part in parts for batch in part for id in batch]
    assert len(set(ledger)) == len(ledger)
    if drop_last:
        assert sizes <= {batch_size}
        assert len(ledger) == count // (batch_size * ranks) * batch_size * ranks
    else:
        assert not sizes or max(sizes) <= (batch_size if batch_size > 1 or ranks == 1 else 2)
        assert ranks == 1 or not sizes or max(sizes) - min(sizes) <= 1
        assert sorted(ledger) == (list(range(count)) if count >= ranks else [])


def test_equal_losses_prune_nothing() -> None:
    sampler = sf.ImportanceSampler(64, plan="infobatch", seed=0, warm_up=0, full_every=None, max_age=1000)
    sampler.update(np.arange(64), np.ones(64))
    plan = sampler.plan(1)
    assert sorted(plan.ids.tolist()) == list(range(64))
    assert (plan.weights == 1).all()


def test_overdue_samples_are_a_part_of_what_may_be_read() -> None:
    options: dict[str, Any] = {"target_io": 0.5, "p_min": 0.05, "max_age": 6, "warm_up": 1, "full_every": None}
    sampler = sf.ImportanceSampler(4000, plan="unbiased", seed=0, **options)
    sampler.update(np.arange(4000), np.linspace(0, 1, 4000) ** 2)
    assert max([len(sampler.plan(epoch).ids) for epoch in range(20)][6:]) < 0.52 * 4000
