"""The loader: cached data sets, staging ring, workers."""

from stallfree.loader.benefit import measure_benefit
from stallfree.loader.cache_loader import CacheLoader
from stallfree.loader.cached_dataset import CachedDataset
from stallfree.loader.dataloader import DataLoader
from stallfree.loader.local_sampler import LocalSampler
from stallfree.loader.output import Batch
from stallfree.loader.smart_cache import SmartCacheDataset

__all__ = [
    "Batch",
    "CacheLoader",
    "CachedDataset",
    "DataLoader",
    "LocalSampler",
    "SmartCacheDataset",
    "measure_benefit",
]
