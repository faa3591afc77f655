"""The sample cache: arena, index, policies, the life of a cache."""

from stallfree.cache.admin import CacheInfo, collect_garbage, list_caches, remove
from stallfree.cache.checks import MISS
from stallfree.cache.packages import Packages, PackageStats
from stallfree.cache.policies import POLICIES, Policy
from stallfree.cache.records import Aim
from stallfree.cache.sample_cache import SampleCache
from stallfree.cache.serial import stay_alone

__all__ = [
    "MISS",
    "POLICIES",
    "Aim",
    "CacheInfo",
    "PackageStats",
    "Packages",
    "Policy",
    "SampleCache",
    "collect_garbage",
    "list_caches",
    "remove",
    "stay_alone",
]
