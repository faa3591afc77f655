"""The owner node of each sample: rendezvous hashing with equalized shares.

Every node has a score for every id, a hash of both, and the node with the highest score owns the id (Thaler and
Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998, section
III). So any process can compute the owner without a directory, and no ids move between the other nodes when a node
joins or leaves. Random shares are uneven, by 2% for 2,000 ids on two nodes, and a cache of exactly the required size
would overflow on one of them. So a node with more than its share passes on the ids with the highest scores at their new
owners.
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
"""Ids hashed per step, which bounds the memory."""


def owners(num_ids: int, nodes: Sequence[str]) -> Array:
    """The owner of each id from 0 to `num_ids` - 1: its index in `nodes`, int16.

    No node owns more than `num_ids` / number of nodes, rounded up. The order of `nodes` affects only the returned
    indices.

    Args:
        num_ids: number of samples of the data set.
        nodes: distinct names of the nodes, which determine the owners.
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
    """Reassign the surplus ids of nodes with more than their share to nodes with less."""
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
                    break  # other nodes must choose again
                found[ids[at]] = taker
                room[taker] -= 1
                room[giver] += 1
            ids = ids[found[ids] == giver]


def _seeds(nodes: Sequence[str]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(node.encode()) for node in nodes]


def mixed(ids: Array, seed: int) -> Array:
    """A hash of each id with the seed: the finaliser of SplitMix64, in which every bit affects every other."""
    mixed = ids * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))  # type: ignore[no-any-return]
