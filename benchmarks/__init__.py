"""Benchmarks of stallfree: one question per file, one harness, JSON out. Start with `python benchmarks/run.py`."""
