"""The sample cache: protocol, policies, records in memory or on disk, and tiers."""

# `np.unique` imports this module at its first call, here in a thread: a fork at that time would copy a locked import.
import numpy.ma  # noqa: F401

from stallfree.cache.admin import CacheInfo, collect_garbage, list_caches, remove
from stallfree.cache.base import BaseCache
from stallfree.cache.policies import POLICIES, Policy
from stallfree.cache.protocol import Cache, Lends, Reading
from stallfree.cache.records import MISS, Aim, Borrowed
from stallfree.cache.sample_cache import SampleCache
from stallfree.cache.serial import one_thread, stay_alone

__all__ = [
    "MISS",
    "POLICIES",
    "Aim",
    "BaseCache",
    "Borrowed",
    "Cache",
    "CacheInfo",
    "Lends",
    "Policy",
    "Reading",
    "SampleCache",
    "collect_garbage",
    "list_caches",
    "one_thread",
    "remove",
    "stay_alone",
]
