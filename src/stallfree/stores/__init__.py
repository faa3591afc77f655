"""Tiers of the cache below memory: a local disk, and Redis or Valkey servers of several hosts."""

from typing import Any

from stallfree.cache.tiers.tiered import TieredCache
from stallfree.stores.disk_tier import DiskTier
from stallfree.stores.redis_cache import RedisCache
from stallfree.stores.store import RedisStore, Store, default_store, open_cache, parse_capacity, room_of, stores_in

__all__ = [
    "DiskTier",
    "RedisCache",
    "RedisStore",
    "Store",
    "TieredCache",
    "default_store",
    "held",
    "open_cache",
    "parse_capacity",
    "room_of",
    "servers_of",
    "stores_in",
]


def servers_of(cache: Any) -> RedisCache | None:
    """The tier of `cache` in servers, if it has one."""
    found: RedisCache | None = getattr(cache, "servers", None)
    return found


def held(cache: Any, ids: Any) -> Any:
    """Which of `ids` are in memory, or assumed to be in servers: an array of bool."""
    servers, there = servers_of(cache), cache.resident(ids)
    return there if servers is None else there | servers.known(ids)
