"""The owner node of each sample: rendezvous hashing with equalized shares.

Every node has a score for every id, a hash of both. The node with the highest score owns the id (Thaler and
Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998, section
III). So any process can compute the owner without a directory, and no ids move between the other nodes when a node
joins or leaves. Random shares are uneven, by 2% for 2,000 ids on two nodes, and a cache of exactly the required size
would overflow on one node. So surplus ids of a node are reassigned, first the ids with the highest scores at their new
owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stallfree.cache.policies import mixed

Array = npt.NDArray[Any]

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
    seeds = [xxhash.xxh3_64_intdigest(node.encode()) for node in nodes]
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
    for source in sorted(np.flatnonzero(room < 0).tolist(), key=lambda place: nodes[place]):
        ids = np.flatnonzero(found == source)
        while room[source] < 0:
            targets = np.flatnonzero(room > 0)
            targets = targets[np.argsort([nodes[place] for place in targets.tolist()])]
            scores = np.stack([mixed(ids.astype(np.uint64), seeds[place]) for place in targets.tolist()])
            highest, by = scores.max(axis=0), targets[scores.argmax(axis=0)]
            for at in np.argsort(highest)[::-1].tolist():
                target = by[at]
                if room[source] == 0 or room[target] == 0:
                    break  # choose again among the other nodes
                found[ids[at]] = target
                room[target] -= 1
                room[source] += 1
            ids = ids[found[ids] == source]
