"""The sample cache in memory or on a disk, its policies, and the tiers behind it."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

# `np.unique` imports this module at its first call, here in a thread: a fork at that time would copy a locked import.
import numpy.ma  # noqa: F401

if TYPE_CHECKING:
    from stallfree.cache.records import MISS
    from stallfree.cache.sample_cache import SampleCache
    from stallfree.cache.tier import Tier, TierStore, decode

__all__ = ["MISS", "SampleCache", "Tier", "TierStore", "decode"]

_PLACES = {"MISS": "records", "SampleCache": "sample_cache", "Tier": "tier", "TierStore": "tier", "decode": "tier"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(f"{__name__}.{_PLACES[name]}"), name)
