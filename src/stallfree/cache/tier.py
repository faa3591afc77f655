"""Tiers: slower stores of samples between the memory cache and the source.

A tier is not a cache: threads that fetch ask it first and the source for the rest. What it returns is stored in memory,
if admitted there. New samples are written to it in the background.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Record = npt.NDArray[np.uint8]
"""An encoded sample (`stallfree.pipeline.codec`): contiguous bytes, valid only during the call that passes them."""


class Tier(Protocol):
    """The samples of one data set in a slower store. `stallfree.testing.TierContract` tests a class against this.

    Ids are arrays of distinct int64 within the data set. Methods may be called from several threads, and in forked
    children. Any exception only costs hits: after three in a row, the tier is not used for ten seconds.
    A tier can be pickled if the data set is used in processes that are started by "spawn" or "forkserver".
    """

    def get_many(self, ids: Array) -> list[Any]:
        """Return the values of `ids`, `MISS` for absent ones. The caller owns them; they may share memory."""

    def put_many(self, ids: Array, records: Sequence[Record]) -> Array:
        """Store `records`. Return which of `ids` are stored now, as an array of bool."""

    def drop(self, ids: Array) -> None:
        """Remove `ids`."""

    def close(self) -> None:
        """Detach from the store. Idempotent."""


class TierStore(Protocol):
    """A place for the tiers of several data sets: what `store=` of `CachedDataset` accepts (`DiskTier`, `RedisStore`)."""

    def attach(self, num_ids: int, *, fingerprint: str, name: str, example: Any) -> Tier:
        """Return the tier of one data set.

        Args:
            num_ids: number of its ids; they are 0 to `num_ids` - 1.
            fingerprint: identifies its samples. Samples with another fingerprint must not be returned.
            name: of the data set, for people: part of file names or keys. Data sets of equal names may have different
                fingerprints.
            example: one value, for the layout.
        """
