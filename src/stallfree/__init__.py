"""Keeps the accelerator fed while a neural network trains on PyTorch."""

from importlib.metadata import version as _version

from stallfree import clara, testing
from stallfree.analysis import Prediction, Replay, Report, analyze, replay
from stallfree.device import DevicePrefetcher, ProcessPrefetcher
from stallfree.errors import (
    CapacityError,
    CodecError,
    FingerprintError,
    InputError,
    MissingExtraError,
    MissingServerError,
    ProducerError,
    SampleError,
    StallfreeError,
    StorageError,
    WaitError,
    WorkerError,
)
from stallfree.loader import (
    Batch,
    CachedDataset,
    CacheLoader,
    DataLoader,
    LocalSampler,
    SmartCacheDataset,
    measure_benefit,
)
from stallfree.observe import Hook, Metrics, PrometheusCollector, PrometheusServer, TensorBoardHook
from stallfree.pipeline import Compose, OnItem, Split, StallfreeWarning, mark_deterministic, mark_random, split
from stallfree.plans import BySamples, ImportanceSampler
from stallfree.shared import SharedLoader
from stallfree.sources import DecodeImage, FileDataset, ImageFolder
from stallfree.stats import CacheStats, ImportanceStats, LoaderStats, SharedStats, SmartCacheStats, StoreStats
from stallfree.stores import RedisStore

__version__ = _version("stallfree")

__all__ = [
    "Batch",
    "BySamples",
    "CacheLoader",
    "CacheStats",
    "CachedDataset",
    "CapacityError",
    "CodecError",
    "Compose",
    "DataLoader",
    "DecodeImage",
    "DevicePrefetcher",
    "FileDataset",
    "FingerprintError",
    "Hook",
    "ImageFolder",
    "ImportanceSampler",
    "ImportanceStats",
    "InputError",
    "LoaderStats",
    "LocalSampler",
    "Metrics",
    "MissingExtraError",
    "MissingServerError",
    "OnItem",
    "Prediction",
    "ProcessPrefetcher",
    "ProducerError",
    "PrometheusCollector",
    "PrometheusServer",
    "RedisStore",
    "Replay",
    "Report",
    "SampleError",
    "SharedLoader",
    "SharedStats",
    "SmartCacheDataset",
    "SmartCacheStats",
    "Split",
    "StallfreeError",
    "StallfreeWarning",
    "StorageError",
    "StoreStats",
    "TensorBoardHook",
    "WaitError",
    "WorkerError",
    "analyze",
    "clara",
    "mark_deterministic",
    "mark_random",
    "measure_benefit",
    "replay",
    "split",
    "testing",
]
