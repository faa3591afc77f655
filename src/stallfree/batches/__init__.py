"""Batches: reads samples, prepares them, and collates them into a buffer."""
