"""Prefetching: copies batches to the device before they are needed."""

from stallfree.device.prefetcher import DevicePrefetcher
from stallfree.device.process import ProcessPrefetcher

__all__ = ["DevicePrefetcher", "ProcessPrefetcher"]
