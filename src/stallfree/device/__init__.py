"""Prefetching: copies batches to the device before they are needed."""

from stallfree.device.consumer import Consumer
from stallfree.device.prefetcher import DevicePrefetcher
from stallfree.device.process import ProcessPrefetcher

__all__ = ["Consumer", "DevicePrefetcher", "ProcessPrefetcher"]
