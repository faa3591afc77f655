"""The plan of an epoch as a pure function of (seed, epoch), and rank shares that prefer samples of the rank's node."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stallfree.cache.serial import one_thread
from stallfree.datasets.ranks import share
from stallfree.pipeline.randomness import sample_seed

Array = npt.NDArray[Any]

_SERIAL = 32_768
"""Most elements for which torch starts no threads."""


@dataclass(frozen=True)
class Plan:
    """The ids of an epoch, in order.

    Attributes:
        ids: int64, one per draw.
        weights: float32 of the same length, or None where all are 1.
        epoch: number of the epoch.
    """

    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None
    epoch: int


def make_plan(num_samples: int, *, shuffle: bool, seed: int, epoch: int) -> Plan:
    """Every sample once: in order, or shuffled by (seed, epoch).

    Any process computes the same plan from the two integers, so a resume needs only them.
    """
    if not shuffle:
        return Plan(np.arange(num_samples, dtype=np.int64), None, epoch)
    generator = torch.Generator()  # takes half the time of NumPy's
    generator.manual_seed(sample_seed(seed, epoch, 0))
    with one_thread() if num_samples > _SERIAL else nullcontext():
        ids = torch.randperm(num_samples, generator=generator).numpy()
    return Plan(ids, None, epoch)


def local_shares(
    owner: Array, nodes: int, ranks_per_node: int, *, shuffle: bool, seed: int, epoch: int, drop_last: bool
) -> Array:
    """The ids of each rank, int64 of shape (ranks, ids per rank): every sample once, in the order of the epoch's plan.

    A node's ranks get the samples that the node owns, up to an equal number per rank. Surplus samples of a node go to
    nodes with too few, the last ones of the plan first. If the number of samples is not a multiple of the number of
    ranks, the first samples of the plan are repeated, as by torch's `DistributedSampler`, or with `drop_last` the last
    ones are omitted.

    A pure function of its arguments; it does not query residency.

    Args:
        owner: node of each id, from 0.
        nodes: number of nodes.
        ranks_per_node: number of ranks, the same for all nodes. Rank r is on node r // `ranks_per_node`.
        shuffle: whether (seed, epoch) determines the order; else ids ascend.
        seed, epoch: of the plan.
        drop_last: see above.
    """
    ranks = nodes * ranks_per_node
    ids = make_plan(len(owner), shuffle=shuffle, seed=seed, epoch=epoch).ids
    each = share(len(ids), ranks, drop_last=drop_last)
    ids = np.resize(ids, each * ranks)
    node = owner[ids].astype(np.int64)
    quota = each * ranks_per_node
    order = np.argsort(node, kind="stable")
    counts = np.bincount(node, minlength=nodes)
    within = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    surplus = np.sort(order[within >= quota])
    node[surplus] = np.repeat(np.arange(nodes), np.maximum(0, quota - counts))
    order = np.argsort(node, kind="stable")
    shares = ids[order].reshape(nodes, each, ranks_per_node)
    return shares.transpose(0, 2, 1).reshape(ranks, each)
