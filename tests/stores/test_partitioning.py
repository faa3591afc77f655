"""Who owns a sample: compared with rendezvous hashing written in plain integers."""

from __future__ import annotations

import random

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree.stores.partitioning import owners

WORD = (1 << 64) - 1
names = st.lists(st.text(max_size=12), min_size=1, max_size=9, unique=True)
sizes = st.integers(1, 200)


def mixed(number: int) -> int:
    """The finaliser of SplitMix64."""
    number &= WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB & WORD
    return number ^ number >> 31


def score(id: int, node: str) -> int:
    """How much a node wants an id."""
    return mixed(id * 0x9E3779B97F4A7C15 + xxhash.xxh3_64_intdigest(node.encode()))


def highest(id: int, nodes: list[str]) -> str:
    """The node that wants an id most."""
    return max(nodes, key=lambda node: score(id, node))


def by_name(count: int, nodes: list[str]) -> list[str]:
    """The name of the owner of each id."""
    return [nodes[place] for place in owners(count, nodes).tolist()]


def excess(count: int, nodes: list[str]) -> int:
    """How many ids have to leave the node that wants them most, so that no node has more than its share."""
    wanted = [highest(id, nodes) for id in range(count)]
    most = -(-count // len(nodes))
    return sum(max(0, wanted.count(node) - most) for node in nodes)


def moves(before: list[str], after: list[str]) -> int:
    return sum(one != other for one, other in zip(before, after, strict=True))


@given(sizes, names)
@settings(deadline=None, max_examples=20)
def test_shares_are_equal_and_no_more_ids_give_way_than_must(count: int, nodes: list[str]) -> None:
    found = by_name(count, nodes)
    assert max(found.count(node) for node in nodes) <= -(-count // len(nodes))
    assert moves(found, [highest(id, nodes) for id in range(count)]) == excess(count, nodes)


@given(sizes, names, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=20)
def test_the_order_of_nodes_does_not_matter(count: int, nodes: list[str], chance: random.Random) -> None:
    other = chance.sample(nodes, len(nodes))
    assert by_name(count, nodes) == by_name(count, other)


@given(sizes, names, st.text(max_size=12))
@settings(deadline=None, max_examples=20)
def test_a_node_more_or_less_moves_its_own_ids_and_those_that_even_out_the_shares(
    count: int, nodes: list[str], guest: str
) -> None:
    with_guest = [*(node for node in nodes if node != guest), guest]
    without = with_guest[:-1] or ["another"]
    many, few = by_name(count, with_guest), by_name(count, without)
    between = sum(one != other and one != guest for one, other in zip(many, few, strict=True))
    if without != ["another"]:
        assert between <= excess(count, with_guest) + excess(count, without)


def test_in_a_large_data_set_few_ids_move_beside_those_of_the_node_that_is_lost() -> None:
    ids, count = 100_000, 3
    nodes = [f"node-{number}.cluster" for number in range(count + 1)]
    for lost in (0, count // 2, count):
        rest = [node for node in nodes if node != nodes[lost]]
        before, after = np.array(nodes)[owners(ids, nodes)], np.array(rest)[owners(ids, rest)]
        its_own = before == nodes[lost]
        assert its_own.sum() <= -(-ids // len(nodes))
        assert (before != after)[~its_own].sum() <= 0.02 * ids
        taken = np.array([(after[its_own] == node).sum() for node in rest])
        assert np.all(abs(taken - its_own.sum() / count) <= 0.02 * ids)  # all others take their part of it


def test_owners_are_those_of_every_release() -> None:
    """Processes of one job that run different releases have to agree."""
    nodes = ["node0", "node1", "node2"]
    assert owners(24, nodes).tolist() == PINNED
    assert owners(24, nodes).dtype == np.int16


def test_one_node_owns_all_and_more_nodes_than_ids_own_one_at_most() -> None:
    assert owners(5, ["only"]).tolist() == [0] * 5
    assert owners(0, ["a", "b"]).tolist() == []
    assert len(set(owners(3, [f"n{number}" for number in range(40)]).tolist())) == 3


PINNED = [1, 1, 1, 2, 0, 1, 2, 2, 0, 2, 1, 0, 0, 2, 2, 1, 2, 0, 2, 0, 1, 1, 0, 0]
