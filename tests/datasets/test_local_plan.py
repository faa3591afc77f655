"""The samples of ranks that prefer what their node owns: exactly once, and as much at home as there can be."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import stallfree as sf


class Stored:
    """Stands in for a data set that is cached over several nodes."""

    cache = True

    def __init__(self, owner: Any, nodes: int, me: int) -> None:
        self.owner = owner
        self.tier = SimpleNamespace(num_nodes=nodes, me=me, owner=lambda ids: owner[ids])

    def __len__(self) -> int:
        return len(self.owner)


@settings(max_examples=30)
@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.integers(1, 200), st.integers(0, 3), st.booleans())
def test_every_sample_once_and_at_home_where_it_can_be(
    data: st.DataObject, nodes: int, per_node: int, samples: int, epoch: int, drop_last: bool
) -> None:
    owner = np.array(data.draw(st.lists(st.integers(0, nodes - 1), min_size=samples, max_size=samples)), np.int16)
    ranks, shares = nodes * per_node, []
    for rank in range(ranks):
        stored: Any = Stored(owner, nodes, rank // per_node)
        sampler = sf.LocalSampler(stored, rank=rank, num_ranks=ranks, seed=7, drop_last=drop_last)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
    each = samples // ranks if drop_last else -(-samples // ranks)
    assert [len(mine) for mine in shares] == [each] * ranks
    times = Counter(id for mine in shares for id in mine)
    rounds, more = divmod(each * ranks, samples)
    assert Counter(times.values()) == +Counter({rounds + 1: more, rounds: samples - more if rounds else 0})
    for node in range(nodes):
        owned = sum(count for id, count in times.items() if owner[id] == node)
        mine = [id for share in shares[node * per_node : (node + 1) * per_node] for id in share]
        assert int((owner[mine] == node).sum()) == min(owned, each * per_node)


def test_the_order_differs_from_epoch_to_epoch() -> None:
    sampler, orders = sf.LocalSampler(Stored(np.zeros(50, int), 1, 0), rank=0, num_ranks=1), []  # type: ignore[arg-type]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert sorted(orders[0]) == sorted(orders[1]) != orders[0] != orders[1]
