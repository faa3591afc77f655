"""`LocalSampler`: a distributed plan that keeps the network quiet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from stallfree.datasets.cached_dataset import CachedDataset
from stallfree.datasets.plan import local_shares
from stallfree.datasets.ranks import find_ranks
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
