"""Coordinated prep: each batch is prepared once for all jobs of a host."""

from stallfree.shared.shared_loader import SharedLoader

__all__ = ["SharedLoader"]
