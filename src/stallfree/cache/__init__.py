"""The sample cache in memory or on a disk, its policies, and the tiers behind it."""

# `np.unique` imports this module at its first call, here in a thread: a fork at that time would copy a locked import.
import numpy.ma  # noqa: F401

from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.cache.tier import Tier, TierStore, decode

__all__ = ["MISS", "SampleCache", "Tier", "TierStore", "decode"]
