"""The cache of a data set over several hosts, on servers of Redis or Valkey, or in memory over a local disk."""

from typing import Union

from stallfree.cache import SampleCache
from stallfree.stores.disk_tier import DiskTier
from stallfree.stores.partition import PartitionedCache
from stallfree.stores.servers import ServerCache
from stallfree.stores.store import RedisStore, open_cache, wished_store
from stallfree.stores.tiered import TieredCache

AnyCache = Union[SampleCache, PartitionedCache, ServerCache, TieredCache]  # noqa: UP007 - it is read at run time
"""The cache of a data set: of one host, of the nodes of a job, in servers, or in memory over a disk."""

SpreadCache = (PartitionedCache, ServerCache, TieredCache)
"""Those with samples that are asked for ahead: of other hosts, or on a disk."""

__all__ = [
    "AnyCache",
    "DiskTier",
    "PartitionedCache",
    "RedisStore",
    "ServerCache",
    "SpreadCache",
    "TieredCache",
    "open_cache",
    "wished_store",
]
