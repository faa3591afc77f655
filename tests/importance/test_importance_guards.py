"""What keeps an `ImportanceSampler` in a loader from being misused, and what it says of itself."""

import json

import numpy as np
import pytest
import torch

import stallfree as sf
from stallfree.errors import WaitError
from stallfree.importance.epoch import FRESH, Retention
from stallfree.importance.plans import Draw

COUNT = 200


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """As many tensors as there are ids, each full of its id."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> torch.Tensor:
        return torch.full((16,), float(id))


def cached(policy: str = "importance", name: str | None = None) -> sf.CachedDataset:
    return sf.CachedDataset(Numbers(), capacity="64KiB", policy=policy, name=name)


def test_a_resumed_epoch_has_its_own_weights_though_the_next_plan_was_asked_for() -> None:
    sampler = sf.ImportanceSampler(COUNT, seed=1)
    with sf.DataLoader(Numbers(), 20, sampler=sampler) as loader:
        for batch in loader:
            loader.update(batch.ids, batch.ids.float())
        iterator = iter(loader)
        next(iterator)
        plan = sampler.plan(1)
        assert plan.weights is not None
        weights = dict(zip(plan.ids.tolist(), (plan.weights * len(plan.ids) / COUNT).tolist(), strict=True))
        sampler.plan(2)
        state = json.loads(json.dumps(loader.state_dict()))
    with sf.DataLoader(Numbers(), 20, sampler=sf.ImportanceSampler(COUNT, seed=1)) as loader:
        loader.load_state_dict(state)
        rest = [(id, weight) for b in loader for id, weight in zip(b.ids.tolist(), b.weights.tolist(), strict=True)]
    assert len(rest) == len(plan.ids) - 20
    assert [weight for _, weight in rest] == pytest.approx([weights[id] for id, _ in rest])


def test_the_sampler_and_the_data_set_have_one_cache() -> None:
    with cached(name="one") as data, cached(name="two") as other:
        with pytest.raises(sf.InputError, match="the sampler has the cache 'two', the data set 'one'"):
            sf.DataLoader(data, 20, sampler=sf.ImportanceSampler(COUNT, cache=other.cache))
        with pytest.warns(RuntimeWarning, match="nothing counts as resident: give ImportanceSampler"):
            sf.DataLoader(data, 20, sampler=sf.ImportanceSampler(COUNT))


def test_rotating_residents_are_for_one_job() -> None:
    with cached() as data, cached() as again:
        assert data.cache.name == again.cache.name
        first, second = (sf.ImportanceSampler(COUNT, cache=d.cache) for d in (data, again))
        first.begin(0, 20)
        with pytest.warns(RuntimeWarning, match="2 jobs use this cache with importance"):
            second.begin(0, 20)
        first.close()
        second.begin(1, 20)  # alone, and it was said once
        second.close()


def test_what_a_busy_cache_could_not_be_told_is_told_the_next_time() -> None:
    told: list[tuple[list[int], list[float]]] = []

    class Busy:
        busy = True

        def resident(self, ids: np.ndarray) -> np.ndarray:
            return np.ones(len(ids), bool)

        def set_scores(self, ids: np.ndarray, scores: np.ndarray) -> None:
            if self.busy:
                raise WaitError("another process (stopped?) held the lock")
            told.append((ids.tolist(), scores.tolist()))

    cache = Busy()
    keeping = Retention(cache, rotating=False)
    plan = sf.ImportanceSampler(4, plan="full").plan(0)
    keeping.begin(Draw(plan, np.zeros(4, bool), np.ones(4, bool)), np.arange(4, dtype=np.float32), 1.0, 0)
    keeping.served(np.array([2]))
    assert told == []
    cache.busy = False
    keeping.served(np.array([0]))
    assert told == [([0, 1, 2, 3, 2, 0], [FRESH] * 4 + [0.75, 0.25])]
