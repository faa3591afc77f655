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
    StorageError,
    WaitError,
    WorkerError,
)

if TYPE_CHECKING:
    from stallfree import clara, testing, vision
    from stallfree.analysis import Prediction, Replay, Report, analyze
    from stallfree.analysis.replay import replay
    from stallfree.cache.disk_tier import DiskTier
    from stallfree.cache.redis import RedisStore
    from stallfree.datasets import CachedDataset, CacheLoader, LocalSampler, SmartCacheDataset
    from stallfree.device import DevicePrefetcher, ProcessPrefetcher
    from stallfree.loader import Batch, DataLoader, measure_benefit
    from stallfree.observe import Hook, Metrics, PrometheusCollector, PrometheusServer, TensorBoardHook
    from stallfree.pipeline import Compose, OnItem, Split, StallfreeWarning, mark_deterministic, mark_random, split
    from stallfree.sampling.plans import BySamples, ImportanceSampler
    from stallfree.shared import SharedLoader
    from stallfree.sources import DecodeImage, FileDataset, ImageFolder, TarDataset, cut
    from stallfree.stats import CacheStats, ImportanceStats, LoaderStats, SharedStats, SmartCacheStats
    from stallfree.vision import DecodeRandomResizedCrop
    from stallfree.workers.ray_workers import RayWorkers

_PLACES = {
    "analysis": "Prediction Replay Report analyze replay",
    "device": "DevicePrefetcher ProcessPrefetcher",
    "datasets": "CachedDataset CacheLoader LocalSampler SmartCacheDataset",
    "loader": "Batch DataLoader measure_benefit",
    "observe": "Hook Metrics PrometheusCollector PrometheusServer TensorBoardHook",
    "pipeline": "Compose OnItem Split StallfreeWarning mark_deterministic mark_random split",
    "sampling.plans": "BySamples ImportanceSampler",
    "shared": "SharedLoader",
    "sources": "DecodeImage FileDataset ImageFolder TarDataset cut",
    "stats": "CacheStats ImportanceStats LoaderStats SharedStats SmartCacheStats",
    "cache.disk_tier": "DiskTier",
    "cache.redis": "RedisStore",
    "vision": "DecodeRandomResizedCrop",
    "workers.ray_workers": "RayWorkers",
}
"""Where the public names are that come with their first use: all of them together take half a second to import."""

_PACKAGES = ("clara", "testing", "vision")

__version__ = _version("stallfree")

__all__ = ["Prediction", "Replay", "Report", "analyze", "clara", "replay", "testing", "vision"]
__all__ += ["CacheLoader", "CachedDataset", "LocalSampler", "SmartCacheDataset"]
__all__ += ["Batch", "BySamples", "DataLoader", "ImportanceSampler", "RayWorkers", "SharedLoader", "measure_benefit"]
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
