"""Data sets with a cache, and the cache loader for code without one."""

from stallfree.datasets.cache_loader import CacheLoader
from stallfree.datasets.cached_dataset import CachedDataset
from stallfree.datasets.local_sampler import LocalSampler
from stallfree.datasets.smart_cache import SmartCacheDataset

__all__ = ["CacheLoader", "CachedDataset", "LocalSampler", "SmartCacheDataset"]
