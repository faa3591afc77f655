"""The cache of a data set over several hosts, on servers of Redis or Valkey."""

from typing import Union

from stallfree.cache import SampleCache
from stallfree.stores.partition import PartitionedCache
from stallfree.stores.store import RedisStore, wished_store

AnyCache = Union[SampleCache, PartitionedCache]  # noqa: UP007 - it is read at run time
"""The cache of a data set: of one host, or of the nodes of a job."""

__all__ = ["AnyCache", "PartitionedCache", "RedisStore", "wished_store"]
