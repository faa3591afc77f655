"""Which node owns a sample: rendezvous hashing, with shares as equal as they can be.

Every node has a score for every id, a hash of both, and the id belongs to the node of the highest (Thaler and
Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998, section
III). So any process can compute the owner, no directory is kept, and when a node comes or goes nothing moves between
the others. Chance makes the shares uneven, by 2% for 2,000 ids on two nodes, and a cache that is just large enough
would lack room on one of them. So a node that has more than its share gives away those ids for which the node they go
to has the highest scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Array = npt.NDArray[Any]

MOST_NODES = 1 << 15
_STEP = 1 << 20
"""Ids that are hashed at a time, which bounds the memory that it takes."""


def owners(num_ids: int, nodes: Sequence[str]) -> Array:
    """The owner of each id from 0 to `num_ids` - 1: its place in `nodes`, int16.

    No node owns more than `num_ids` / number of nodes, rounded up. The order of `nodes` does not matter, but for the
    places that are given.

    Args:
        num_ids: number of samples of the data set.
        nodes: names of the nodes, all different: they decide, not the places.
    """
    found = np.zeros(num_ids, np.int16)
    if len(nodes) == 1:
        return found
    seeds = _seeds(nodes)
    for start in range(0, num_ids, _STEP):
        ids = np.arange(start, min(start + _STEP, num_ids), dtype=np.uint64)
        best = np.zeros(len(ids), np.uint64)
        for place, seed in enumerate(seeds):
            score = mixed(ids, seed)
            higher = score > best
            best[higher] = score[higher]
            found[start : start + len(ids)][higher] = place
    _level(found, nodes, seeds)
    return found


def _level(found: Array, nodes: Sequence[str], seeds: Sequence[int]) -> None:
    """Have nodes with more than their share give the rest to those with less."""
    most = -(-len(found) // len(nodes))
    room = most - np.bincount(found, minlength=len(nodes))
    for giver in sorted(np.flatnonzero(room < 0).tolist(), key=lambda place: nodes[place]):
        ids = np.flatnonzero(found == giver)
        while room[giver] < 0:
            takers = np.flatnonzero(room > 0)
            takers = takers[np.argsort([nodes[place] for place in takers.tolist()])]
            scores = np.stack([mixed(ids.astype(np.uint64), seeds[place]) for place in takers.tolist()])
            wanted, by = scores.max(axis=0), takers[scores.argmax(axis=0)]
            for at in np.argsort(wanted)[::-1].tolist():
                taker = by[at]
                if room[giver] == 0 or room[taker] == 0:
                    break  # those who wanted it have others to choose from now
                found[ids[at]] = taker
                room[taker] -= 1
                room[giver] += 1
            ids = ids[found[ids] == giver]


def _seeds(nodes: Sequence[str]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(node.encode()) for node in nodes]


def mixed(ids: Array, seed: int) -> Array:
    """A hash of each id with the seed: the finaliser of SplitMix64, which lets every bit decide on every other."""
    mixed = ids * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))  # type: ignore[no-any-return]
