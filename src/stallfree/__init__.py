"""Keeps the accelerator fed while a neural network trains on PyTorch."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from stallfree.errors import (
    BatchError,
    CapacityError,
    CodecError,
    FingerprintError,
    IdError,
    InputError,
    MissingExtraError,
    MissingServerError,
    PlatformError,
    ProducerError,
    StallfreeError,
    StallfreeWarning,
    StorageError,
    WaitError,
    WorkerError,
)

if TYPE_CHECKING:
    from stallfree import clara, testing, vision
    from stallfree.analysis.analyze import analyze
    from stallfree.analysis.metrics import Hook, Metrics, PrometheusCollector, PrometheusServer, TensorBoardHook
    from stallfree.analysis.predict import Prediction
    from stallfree.analysis.replay import Replay, replay
    from stallfree.analysis.report import Report
    from stallfree.cache.redis.store import RedisStore
    from stallfree.cache.store import DiskTier
    from stallfree.datasets.cache_loader import CacheLoader
    from stallfree.datasets.cached_dataset import CachedDataset, LocalSampler
    from stallfree.datasets.smart_cache import SmartCacheDataset
    from stallfree.device.prefetcher import DevicePrefetcher
    from stallfree.device.process import ProcessPrefetcher
    from stallfree.importance.sampler import ImportanceSampler
    from stallfree.loader.dataloader import DataLoader
    from stallfree.loader.run import Batch
    from stallfree.pipeline.classify import Split, split
    from stallfree.pipeline.compose import Compose, OnItem, mark_deterministic, mark_random
    from stallfree.ray.workers import RayWorkers
    from stallfree.shared.shared_loader import SharedLoader
    from stallfree.sources.cut import cut
    from stallfree.sources.files import DecodeImage, FileDataset, ImageFolder
    from stallfree.sources.tar import TarDataset
    from stallfree.stats import CacheStats, ImportanceStats, LoaderStats, SharedStats, SmartCacheStats
    from stallfree.vision.crops import DecodeRandomResizedCrop

_PLACES = {
    "analysis.analyze": "analyze",
    "analysis.predict": "Prediction",
    "analysis.replay": "Replay replay",
    "analysis.report": "Report",
    "cache.store": "DiskTier",
    "cache.redis.store": "RedisStore",
    "datasets.cache_loader": "CacheLoader",
    "datasets.cached_dataset": "CachedDataset LocalSampler",
    "datasets.smart_cache": "SmartCacheDataset",
    "device.prefetcher": "DevicePrefetcher",
    "device.process": "ProcessPrefetcher",
    "loader.dataloader": "DataLoader",
    "loader.run": "Batch",
    "analysis.metrics": "Hook Metrics PrometheusCollector PrometheusServer TensorBoardHook",
    "pipeline.classify": "Split split",
    "pipeline.compose": "Compose OnItem mark_deterministic mark_random",
    "importance.sampler": "ImportanceSampler",
    "shared.shared_loader": "SharedLoader",
    "sources.cut": "cut",
    "sources.files": "DecodeImage FileDataset ImageFolder",
    "sources.tar": "TarDataset",
    "stats": "CacheStats ImportanceStats LoaderStats SharedStats SmartCacheStats",
    "vision.crops": "DecodeRandomResizedCrop",
    "ray.workers": "RayWorkers",
}
"""Where the public names are that come with their first use: all of them together take half a second to import."""

_PACKAGES = ("clara", "testing", "vision")

__version__ = _version("stallfree")

__all__ = ["Prediction", "Replay", "Report", "analyze", "clara", "replay", "testing", "vision"]
__all__ += ["CacheLoader", "CachedDataset", "LocalSampler", "SmartCacheDataset"]
__all__ += ["Batch", "DataLoader", "ImportanceSampler", "RayWorkers", "SharedLoader"]
__all__ += ["DevicePrefetcher", "DiskTier", "ProcessPrefetcher", "RedisStore"]
__all__ += ["Hook", "Metrics", "PrometheusCollector", "PrometheusServer", "TensorBoardHook"]
__all__ += ["Compose", "OnItem", "Split", "StallfreeWarning", "mark_deterministic", "mark_random", "split"]
__all__ += ["DecodeImage", "DecodeRandomResizedCrop", "FileDataset", "ImageFolder", "TarDataset", "cut"]
__all__ += ["CacheStats", "ImportanceStats", "LoaderStats", "SharedStats", "SmartCacheStats"]
__all__ += ["BatchError", "CapacityError", "CodecError", "FingerprintError", "IdError", "InputError"]
__all__ += ["MissingExtraError", "MissingServerError", "PlatformError", "ProducerError", "StallfreeError"]
__all__ += ["StorageError", "WaitError", "WorkerError"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in (*_PACKAGES, "cache"):  # which is for caches of one's own
            return _import_module(f"stallfree.{name}")
        for package, names in _PLACES.items():
            if name in names.split():
                value = globals()[name] = getattr(_import_module(f"stallfree.{package}"), name)
                return value
        raise AttributeError(f"module 'stallfree' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
