"""Redis or Valkey servers of several hosts behind the cache."""

from stallfree.stores.store import RedisStore

__all__ = ["RedisStore"]
