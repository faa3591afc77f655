"""The cache of a data set over several hosts, on servers of Redis or Valkey."""

from typing import Union

from stallfree.cache import SampleCache
from stallfree.stores.partition import PartitionedCache
from stallfree.stores.servers import ServerCache
from stallfree.stores.store import RedisStore, open_cache, wished_store

AnyCache = Union[SampleCache, PartitionedCache, ServerCache]  # noqa: UP007 - it is read at run time
"""The cache of a data set: of one host, of the nodes of a job, or in servers."""

SpreadCache = (PartitionedCache, ServerCache)
"""Those of several hosts, of which some are asked for samples."""

__all__ = ["AnyCache", "PartitionedCache", "RedisStore", "ServerCache", "SpreadCache", "open_cache", "wished_store"]
