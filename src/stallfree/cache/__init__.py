"""The sample cache in memory or on a disk, its policies, and the tiers behind it."""

# `np.unique` imports this module at its first call, here in a thread: a fork at that time would copy a locked import.
import numpy.ma  # noqa: F401

from stallfree.cache.admin import CacheInfo, collect_garbage, list_caches, remove
from stallfree.cache.disk_tier import DiskTier
from stallfree.cache.policies import POLICIES, Policy
from stallfree.cache.records import MISS, Aim, Borrowed
from stallfree.cache.sample_cache import SampleCache
from stallfree.cache.serial import one_thread, stay_alone
from stallfree.cache.tier import Tier, TierStore, decode

__all__ = [
    "MISS",
    "POLICIES",
    "Aim",
    "Borrowed",
    "CacheInfo",
    "DiskTier",
    "Policy",
    "SampleCache",
    "Tier",
    "TierStore",
    "collect_garbage",
    "decode",
    "list_caches",
    "one_thread",
    "remove",
    "stay_alone",
]
