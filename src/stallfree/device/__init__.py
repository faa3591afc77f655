"""Prefetching: copies batches to the device before they are needed."""
