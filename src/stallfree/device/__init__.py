"""Batches on the device before they are needed."""

from stallfree.device.prefetcher import DevicePrefetcher

__all__ = ["DevicePrefetcher"]
