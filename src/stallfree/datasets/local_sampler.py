"""`LocalSampler`: a distributed plan that keeps the network quiet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DistributedSampler

from stallfree.datasets.cached_dataset import CachedDataset
from stallfree.datasets.epoch_source import make_plan
from stallfree.datasets.ranks import find_ranks, share
from stallfree.errors import cache_required, launch_environment
from stallfree.units import parse_whole


class LocalSampler(DistributedSampler[Any]):
    """Samples of this rank, those that its own node stores first.

    For a data set that is cached over several nodes.

    Every sample comes exactly once per epoch over all ranks, as with torch's `DistributedSampler`, of which this is
    one; stallfree's loader sets the epoch. Almost nothing comes over the network then. The price: a sample is
    always seen by the same node, so batches mix a node's share and not the whole data set. Data that lie sorted in the
    data set are mixed all the same, since ownership is a hash.

    Args:
        dataset: a `CachedDataset` with a `RedisStore`; with another store every node owns all, and this is a
            `DistributedSampler`.
        shuffle: whether (seed, epoch) decides the order.
        seed: of the order, the same in all ranks.
        drop_last: leave out the last samples rather than repeat the first ones if the number of samples is no multiple
            of the number of ranks.
        rank: of this process; None for that of `torch.distributed`, or else of the variables that torchrun sets.
        num_ranks: of the job, likewise.

    Raises `InputError` when the nodes of the store do not have equally many ranks, or for a data set of another kind.

    Example:
        ```python
        cached = sf.CachedDataset(dataset, capacity="8MiB")  # with several nodes: store=sf.RedisStore(...)
        sampler = sf.LocalSampler(cached, rank=0, num_ranks=2)
        loader = sf.DataLoader(cached, batch_size=4, sampler=sampler)
        assert len(loader) == 2
        ```
    """

    def __init__(
        self,
        dataset: CachedDataset,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        cache = getattr(dataset, "cache", None)
        if cache is None:
            raise cache_required(f"LocalSampler was given {type(dataset).__name__}: give it a CachedDataset")
        ranks = find_ranks()
        seed = parse_whole(seed, "seed")
        number = ranks.rank if rank is None else parse_whole(rank, "rank")
        count = ranks.count if num_ranks is None else parse_whole(num_ranks, "num_ranks", 1)
        if not 0 <= number < count:
            raise launch_environment(f"rank {number} of {count}: give a rank from 0 to {count - 1}")
        sized: Any = dataset  # of which only the length is asked for
        super().__init__(sized, num_replicas=count, rank=number, shuffle=shuffle, seed=seed, drop_last=drop_last)
        servers: Any = dataset.tier
        nodes: int = getattr(servers, "num_nodes", 1)
        if count % nodes:
            raise launch_environment(f"{count} ranks on {nodes} nodes: every node needs as many ranks as any other")
        self._per_node = count // nodes
        self._owner = np.zeros(len(dataset), np.int16)
        if nodes == 1:
            return
        self._owner = servers.owner(np.arange(len(dataset)))
        if number // self._per_node != servers.me:
            raise launch_environment(
                f"rank {number} of {count} should be on node {number // self._per_node} of {nodes} and is on node "
                f"{servers.me}: ranks have to be numbered node by node, as torchrun does"
            )

    def __repr__(self) -> str:
        return (
            f"LocalSampler({len(self._owner)} samples, rank={self.rank}, num_ranks={self.num_replicas}, "
            f"shuffle={self.shuffle})"
        )

    def __iter__(self) -> Iterator[int]:
        shares = local_shares(
            self._owner,
            self.num_replicas // self._per_node,
            self._per_node,
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=self.epoch,
            drop_last=self.drop_last,
        )
        return iter(shares[self.rank].tolist())


def local_shares(
    owner: npt.NDArray[Any], nodes: int, ranks_per_node: int, *, shuffle: bool, seed: int, epoch: int, drop_last: bool
) -> npt.NDArray[Any]:
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
