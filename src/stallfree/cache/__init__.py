"""The sample cache: protocol, policies, records in memory or on disk, and tiers."""

# `np.unique` imports this module at its first call, here in a thread: a fork at that time would copy a locked import.
import numpy.ma  # noqa: F401

from stallfree.cache.base import BaseCache
from stallfree.cache.checks import MISS
from stallfree.cache.memory.admin import CacheInfo, collect_garbage, list_caches, remove
from stallfree.cache.memory.records import Aim, Borrowed
from stallfree.cache.memory.sample_cache import SampleCache
from stallfree.cache.memory.serial import one_thread, stay_alone
from stallfree.cache.policies import POLICIES, Policy
from stallfree.cache.protocol import Cache, Lends, Reading

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
