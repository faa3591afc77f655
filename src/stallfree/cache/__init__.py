"""The sample cache: arena, index, policies, the life of a cache."""

from stallfree.cache.admin import CacheInfo, collect_garbage, list_caches, remove
from stallfree.cache.policies import POLICIES, Policy
from stallfree.cache.sample_cache import MISS, SampleCache

__all__ = ["MISS", "POLICIES", "CacheInfo", "Policy", "SampleCache", "collect_garbage", "list_caches", "remove"]
