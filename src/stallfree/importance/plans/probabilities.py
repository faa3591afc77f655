"""Selection probabilities and the draw: pure functions of arrays, independent of any cache.

Scores are losses (or ranks of losses): float32 per sample, infinite for a sample without a loss. So samples that were
never seen, or have diverged, count as most important.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.errors import InputError, cache_required, sampler_mismatch

Array = npt.NDArray[Any]

HISTORY = 1024
"""Losses that selective sampling compares with (Chen et al., iCACHE, HPCA 2023)."""

_STRATA = 256
_WIDE = 64
_GRID = 4096


def generator(seed: int, epoch: int, use: int) -> np.random.Generator:
    """A random generator seeded by (seed, epoch, use)."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed & (2**64 - 1), 0x494D504F, epoch, use])))


def ranks(scores: Array) -> Array:
    """The relative rank of each score: above 0, and 1 for the highest. Ties are broken by id, in ascending order.

    Args:
        scores: numbers, not NaN, shape (n,).

    Returns float32, shape (n,). The result is the same on every processor.
    """
    count = len(scores)
    bits = scores.astype(np.float32).view(np.uint32)
    flip = np.where(bits >> 31, np.uint32(0xFFFF_FFFF), np.uint32(0x8000_0000))  # so that they sort as numbers
    keys = (bits ^ flip).astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= np.uint64(0xFFFF_FFFF)
    places = np.empty(count, np.float32)
    places[keys.astype(np.int64)] = np.arange(1, count + 1, dtype=np.float32)
    places /= np.float32(max(1, count))
    return places


def selective(scores: Array, history: Array, beta: float) -> Array:
    """The share of the scores in `history` that are not above a score, to the power `beta`.

    Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", arXiv:1910.00762, section 3.2, as
    iCACHE uses it (Chen et al., HPCA 2023, section III). The highest score has probability 1, and so have all scores
    while none is known.
    """
    if len(history) == 0:
        return np.ones(len(scores))
    share: Array = np.searchsorted(np.sort(history), scores, side="right") / len(history)
    return share**beta


def some_known(scores: Array, rng: np.random.Generator) -> Array:
    """The finite scores of 1,024 samples, drawn at random; all finite scores if there are fewer.

    Chen et al. compare with the last 1,024 losses. These belong to selected samples and are therefore high, so that
    each comparison selects fewer samples.
    """
    known = scores[np.isfinite(scores)]
    return known if len(known) <= HISTORY else known[rng.integers(0, len(known), HISTORY)]


def pruned(scores: Array, share: float) -> Array:
    """1 - `share` for the scores below the mean of the known ones, 1 for the others.

    Qin et al., "InfoBatch: Lossless Training Speed Up by Unbiased Dynamic Data Pruning", ICLR 2024, section 2.2.
    """
    known = scores[np.isfinite(scores)]
    mean = known.mean(dtype=np.float64) if len(known) else -np.inf
    return np.where(scores < mean, 1.0 - share, 1.0)


def leaning(places: Array, some: Array, mean: float, lowest: float, lean: float) -> Array:
    """Probabilities that rise with the rank and are at least `lowest`; those of `some` have the mean `mean`.

    Args:
        places: ranks of all samples, above 0 and up to 1.
        some: bool for each: the samples drawn with these probabilities.
        mean: 0 to 1; `lowest` if it is below that.
        lowest: 0 to 1.
        lean: 0: uniform; 1: proportional to the rank.

    They are `scale * (1 - lean + 2 * lean * rank)`, clipped to `lowest` and 1. The scale is fitted to every n-th rank,
    about 4,096 of them, which gives the mean a relative error of about 1e-3.
    """
    shape = 1 - lean + 2 * lean * places.astype(np.float64)
    step = max(1, int(np.count_nonzero(some)) // _GRID)
    grid = shape[some & ((places * len(places)).astype(np.int64) % step == 0)]
    if len(grid) == 0 or mean >= 1:
        return np.ones(len(places))
    low, high = 0.0, 1.0 / max(float(grid.min()), 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(grid * middle, lowest, 1).mean() < mean else (low, middle)
    return np.clip(shape * high, lowest, 1)


def shares(chances: Array, places: Array) -> Array:
    """For each sample the mean chance of the samples in its stratum of the ranks `places`; there are 64 strata."""
    stratum = np.minimum(places * _WIDE, _WIDE - 1).astype(np.int64)
    sizes = np.bincount(stratum, minlength=_WIDE)
    mean = np.bincount(stratum, chances, minlength=_WIDE) / np.maximum(sizes, 1)
    found: Array = mean[stratum]
    return found


def systematic(chances: Array, order: Array, rng: np.random.Generator) -> Array:
    """The ids drawn from `order`, each with its own chance; their number is the sum of the chances.

    Systematic sampling (Madow, 1949): the chances are accumulated in `order`, and each id whose interval contains one
    of a sequence of points at distance 1 is drawn. The sum is rounded up or down at random. Neighbours in `order` are
    rarely drawn together, so an order by loss represents every range of losses in proportion.

    Args:
        chances: 0 to 1, by id.
        order: ids.
        rng: for the single random number.

    Returns the drawn ids, in the order of `order`.
    """
    ends = np.cumsum(chances[order], dtype=np.float64)
    marks = np.floor(ends + rng.random())
    before = np.empty_like(marks)
    before[:1] = 0
    before[1:] = marks[:-1]
    return order[marks > before]


def draw(chances: Array, places: Array, rng: np.random.Generator) -> Array:
    """Draw each id with its own chance; return the ids, ascending.

    Ids with chance 1 are always drawn. Of the others a fixed number is drawn, spread evenly over the ranks `places`:
    they are ordered by strata of rank, and randomly within each stratum.
    """
    sure = np.flatnonzero(chances >= 1)
    rest = np.flatnonzero(chances < 1)
    if len(rest) == 0:
        return sure
    rest = rest[rng.permutation(len(rest))]
    strata = np.minimum(places[rest] * _STRATA, _STRATA - 1).astype(np.uint8)
    rest = rest[np.argsort(strata, kind="stable")]
    drawn = np.concatenate([sure, systematic(chances, rest, rng)])
    drawn.sort()
    return drawn


def check_share(name: str, value: float, *, low: float = 0.0, high: float = 1.0) -> float:
    """`value` as a float. Raises `InputError` if it is not above `low` and at most `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
        raise InputError(f"{name}={value!r}: give a number above {low:g}, and {high:g} at most")
    return float(value)


def check_cache(cache: Any, samples: int, on_miss: str | None) -> None:
    """Raise `InputError` for a cache that a plan cannot use."""
    if cache is None:
        if on_miss in ("swap", "substitute"):
            raise cache_required(f"on_miss={on_miss!r} needs a cache: give the .cache of a CachedDataset")
        return
    if not callable(getattr(cache, "resident", None)):
        raise cache_required(f"cache={cache!r:.80} has no resident(ids): give the .cache of a CachedDataset")
    known = getattr(cache, "num_ids", samples)
    if known != samples:
        raise sampler_mismatch(f"the cache is of {known} samples, num_samples is {samples}: give those of one data set")
