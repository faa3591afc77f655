"""A sampler by itself: arguments, iteration under any loader, parts of ranks, states."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stallfree as sf
from importance_tools import Residents, Served, knowing
from names import named
from stallfree.errors import text_of
from stallfree.importance import sampler as importance


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_samples": 0}, "num_samples=0: give a whole number, 1 or more"),
        ({"num_samples": True}, "num_samples=True"),
        ({"num_samples": 2.5}, "num_samples=2.5"),
        ({"plan": "random"}, "plan='random' is unknown: use one of 'unbiased', 'icache', 'infobatch', 'full'"),
        ({"plan": None}, "plan=None"),
        ({"cache": "memory"}, "has no resident"),
        ({"cache": Residents(11)}, "the cache is of 11 samples, num_samples is 10"),
        ({"seed": 1.5}, "seed=1.5: give a whole number"),
        ({"seed": "one"}, "seed='one': give a whole number"),
        ({"target_io": 0}, "target_io=0: give a number above 0, and 1 at most"),
        ({"target_io": 1.1}, "target_io=1.1"),
        ({"target_io": float("nan")}, "target_io=nan"),
        ({"target_io": "half"}, "target_io='half'"),
        ({"p_min": 0.0}, "p_min=0.0"),
        ({"p_min": 0.3}, "p_min=0.3 is above target_io=0.25"),
        ({"beta": 0}, "beta=0"),
        ({"prune": 1.0}, "prune=1.0"),
        ({"max_age": 0}, "max_age=0: give a whole number, 1 or more"),
        ({"warm_up": -1}, "warm_up=-1: give a whole number, 0 or more"),
        ({"full_every": 0}, "full_every=0"),
        ({"num_epochs": 0}, "num_epochs=0"),
        ({"on_miss": "skip"}, "on_miss='skip' is unknown: use one of 'swap', 'substitute', 'fetch'"),
        ({"plan": "icache", "on_miss": "swap"}, "on_miss='swap' needs a cache"),
        ({"plan": "icache", "on_miss": "substitute"}, "on_miss='substitute' needs a cache"),
        ({"on_miss": "substitute", "cache": Residents(10)}, "on_miss='substitute' serves samples that were not drawn"),
    ],
    ids=named,
)
def test_arguments_that_cannot_be_used(given: dict[str, Any], said: str) -> None:
    with pytest.raises(sf.InputError) as caught:
        sf.ImportanceSampler(**{"num_samples": 10, **given})
    assert said in str(caught.value)
    assert "\n" not in text_of(caught.value)


def test_arguments_that_can_be_used() -> None:
    sampler = sf.ImportanceSampler(
        np.int64(10), seed=-(2**80), max_age=np.int32(3), target_io=np.float64(0.5), p_min=0.5, full_every=2
    )
    assert len(sampler.plan(2).ids) == 10
    for wrong in (-1, True, 1.0, "1", None):
        with pytest.raises(sf.InputError, match="epoch="):
            sampler.plan(wrong)  # type: ignore[arg-type]
        with pytest.raises(sf.InputError, match="epoch="):
            sampler.set_epoch(wrong)  # type: ignore[arg-type]


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
    plan = sampler.plan(1)
    expected = dict(zip(plan.ids.tolist(), (plan.weights * len(plan.ids) / 200).tolist(), strict=True))
    found: dict[int, float] = {}
    for ids, weights in Served(sampler).epoch(1):
        found |= dict(zip(ids.tolist(), weights.tolist(), strict=True))
        len(sampler), sampler.plan(5), sampler.plan(0)
    assert found == pytest.approx(expected)


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 8), st.booleans())
def test_parts_of_ranks(count: int, ranks: int, batch_size: int, drop_last: bool) -> None:
    """All ranks have as many batches, of about the same size, and together each sample once."""
    parts = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(ranks):
            patch.setattr(importance, "ranks_of_job", lambda rank=rank: (rank, ranks))  # but nothing to agree on
            sampler = sf.ImportanceSampler(count, seed=5)
            mine = list(sampler)
            assert len(mine) == len(sampler) == -(-count // ranks)  # padded, as torch's own
            parts.append([ids.tolist() for ids in sampler.batches(0, batch_size, drop_last=drop_last)])
            assert len(parts[-1]) == sampler.num_batches(0, batch_size, drop_last=drop_last)
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


@pytest.mark.parametrize("plan", ["unbiased", "icache", "infobatch"])
def test_a_run_that_is_resumed_again_and_again_is_the_same(plan: str) -> None:
    """A state after each few updates, into a fresh sampler by way of JSON."""

    def run(*, resume: bool) -> list[Any]:
        def make() -> sf.ImportanceSampler:
            cache = Residents(1500, range(0, 1500, 4))
            return sf.ImportanceSampler(1500, plan=plan, seed=8, cache=cache, max_age=3, on_miss="fetch")

        sampler, told = make(), []
        rng = np.random.default_rng(1)
        for epoch in range(5):
            drawn = sampler.plan(epoch)
            told.append((drawn.epoch, drawn.ids.tolist(), None if drawn.weights is None else drawn.weights.tolist()))
            for ids in np.array_split(drawn.ids, 5):
                sampler.update(ids, rng.exponential(size=len(ids)) * (1 + ids))
                if resume:
                    state = json.loads(json.dumps(sampler.state_dict()))
                    sampler = make()
                    sampler.load_state_dict(state)
                    assert sampler.state_dict() == state
        return told

    assert run(resume=True) == run(resume=False)


def test_states_that_cannot_be_loaded() -> None:
    sampler = knowing(sf.ImportanceSampler(50, seed=3), np.arange(50))
    state = sampler.state_dict()
    assert json.loads(json.dumps(state)) == state
    wrong: list[tuple[Any, str]] = [
        (None, "the state has version None"),
        ({}, "the state has version None"),
        ({**state, "version": 99}, "the state has version 99, expected"),
        ({key: value for key, value in state.items() if key != "drawn"}, "the state lacks drawn"),
        ({**state, "plan": "icache"}, "taken with plan='icache', this sampler has 'unbiased'"),
        ({**state, "seed": 4}, "taken with seed=4, this sampler has 3"),
        ({**state, "losses": {**state["losses"], "last": "nothing"}}, "the state is damaged"),
        (sf.ImportanceSampler(51, seed=3).state_dict(), "the state is of 51 samples; this sampler has 50"),
    ]
    for value, said in wrong:
        with pytest.raises(sf.InputError) as caught:
            sampler.load_state_dict(value)
        assert said in str(caught.value)
    sampler.load_state_dict(state)
    assert sampler.state_dict() == state
