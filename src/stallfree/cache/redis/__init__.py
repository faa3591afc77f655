"""Redis or Valkey servers as a tier of the sample cache."""

from stallfree.cache.redis.store import RedisStore
from stallfree.cache.redis.tier import RedisTier, ServerStatus

__all__ = ["RedisStore", "RedisTier", "ServerStatus"]
