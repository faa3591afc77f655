"""Redis or Valkey servers of several hosts behind the cache."""

from stallfree.cache.redis.store import RedisStore
from stallfree.cache.redis.tier import RedisTier, ServerStatus

__all__ = ["RedisStore", "RedisTier", "ServerStatus"]
