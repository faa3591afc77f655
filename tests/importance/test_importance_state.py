"""A sampler by itself: arguments, iteration under any loader, parts of ranks, states."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stallfree as sf
from importance_tools import Served, knowing
from stallfree.importance import sampler as importance


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
