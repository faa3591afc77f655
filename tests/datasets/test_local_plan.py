"""The plan in which nodes prefer what they own: exactly once, and as much at home as there can be."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree.datasets.cached_dataset import local_shares
from stallfree.datasets.epoch_source import make_plan


@settings(max_examples=30)
@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.integers(1, 200), st.integers(0, 3), st.booleans())
def test_every_sample_once_and_at_home_where_it_can_be(
    data: st.DataObject, nodes: int, per_node: int, samples: int, epoch: int, drop_last: bool
) -> None:
    owner = np.array(data.draw(st.lists(st.integers(0, nodes - 1), min_size=samples, max_size=samples)), np.int16)
    ranks = nodes * per_node
    shares = local_shares(owner, nodes, per_node, shuffle=True, seed=7, epoch=epoch, drop_last=drop_last)
    each = samples // ranks if drop_last else -(-samples // ranks)
    assert shares.shape == (ranks, each)

    plan = make_plan(samples, shuffle=True, seed=7, epoch=epoch).ids.tolist()
    wanted = Counter(plan[: each * ranks] if drop_last else [plan[at % samples] for at in range(each * ranks)])
    assert Counter(shares.ravel().tolist()) == wanted

    quota = each * per_node
    for node in range(nodes):
        owned = sum(count for id, count in wanted.items() if owner[id] == node)
        mine = shares[node * per_node : (node + 1) * per_node]
        assert int((owner[mine] == node).sum()) == min(owned, quota)
