"""The draw of each importance sampling plan, as a function of losses, residency and (seed, epoch).

Scores are losses (or ranks of losses): float32 per sample, infinite for a sample without a loss. So samples that were
never seen, or have diverged, count as most important. Nothing here depends on a cache.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from stallfree.datasets.epoch_source import Plan
from stallfree.errors import InputError, cache_required, sampler_mismatch
from stallfree.importance.losses import pack, pack_mask, unpack, unpack_mask
from stallfree.units import parse_whole

Array = np.ndarray[Any, np.dtype[Any]]

HISTORY = 1024
"""Losses that selective sampling compares with (Chen et al., iCACHE, HPCA 2023)."""

_LEAN = 0.8
"""Dependence of a missing sample's probability on the rank of its loss; see docs/decisions/importance.md."""

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
    quantiles = np.empty(count, np.float32)
    quantiles[keys.astype(np.int64)] = np.arange(1, count + 1, dtype=np.float32)
    quantiles /= np.float32(max(1, count))
    return quantiles


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


def leaning(quantiles: Array, some: Array, mean: float, lowest: float, lean: float) -> Array:
    """Probabilities that rise with the rank and are at least `lowest`; those of `some` have the mean `mean`.

    Args:
        quantiles: ranks of all samples, above 0 and up to 1.
        some: bool for each: the samples drawn with these probabilities.
        mean: 0 to 1; `lowest` if it is below that.
        lowest: 0 to 1.
        lean: 0: uniform; 1: proportional to the rank.

    They are `scale * (1 - lean + 2 * lean * rank)`, clipped to `lowest` and 1. The scale is fitted to every n-th rank,
    about 4,096 of them, which gives the mean a relative error of about 1e-3.
    """
    shape = 1 - lean + 2 * lean * quantiles.astype(np.float64)
    step = max(1, int(np.count_nonzero(some)) // _GRID)
    grid = shape[some & ((quantiles * len(quantiles)).astype(np.int64) % step == 0)]
    if len(grid) == 0 or mean >= 1:
        return np.ones(len(quantiles))
    low, high = 0.0, 1.0 / max(float(grid.min()), 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(grid * middle, lowest, 1).mean() < mean else (low, middle)
    return np.clip(shape * high, lowest, 1)


def shares(chances: Array, quantiles: Array) -> Array:
    """For each sample the mean chance of the samples in its stratum of the ranks `quantiles`; there are 64 strata."""
    stratum = np.minimum(quantiles * _WIDE, _WIDE - 1).astype(np.int64)
    sizes = np.bincount(stratum, minlength=_WIDE)
    mean = np.bincount(stratum, chances, minlength=_WIDE) / np.maximum(sizes, 1)
    return mean[stratum]  # type: ignore[no-any-return]


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
    return order[np.diff(np.floor(ends + rng.random()), prepend=0) > 0]


def draw(chances: Array, quantiles: Array, rng: np.random.Generator) -> Array:
    """Draw each id with its own chance; return the ids, ascending.

    Ids with chance 1 are always drawn. Of the others a fixed number is drawn, spread evenly over the ranks `quantiles`:
    they are ordered by strata of rank, and randomly within each stratum.
    """
    sure = np.flatnonzero(chances >= 1)
    rest = np.flatnonzero(chances < 1)
    if len(rest) == 0:
        return sure
    rest = rest[rng.permutation(len(rest))]
    strata = np.minimum(quantiles[rest] * _STRATA, _STRATA - 1).astype(np.uint8)
    rest = rest[np.argsort(strata, kind="stable")]
    return np.sort(np.concatenate([sure, systematic(chances, rest, rng)]))


def check_share(name: str, value: float, *, high: float = 1.0) -> float:
    """`value` as a float. Raises `InputError` if it is not above 0 and at most `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= high:
        raise InputError(f"{name}={value!r}: give a number above 0, and {high:g} at most")
    return float(value)


def check_cache(cache: Any, samples: int, on_miss: str | None) -> None:
    """Raise `InputError` for a cache that a plan cannot use."""
    if cache is None:
        if on_miss in ("swap", "substitute"):
            raise cache_required(f"on_miss={on_miss!r} needs a cache: give the .cache of a CachedDataset")
        return
    if not callable(getattr(cache, "resident", None)):
        raise cache_required(f"cache={cache!r:.80} has no resident(ids): give the .cache of a CachedDataset")
    if (known := getattr(cache, "num_ids", samples)) != samples:
        raise sampler_mismatch(f"the cache is of {known} samples, num_samples is {samples}: give those of one data set")


PLANS = ("unbiased", "icache", "infobatch", "full")


@dataclass(frozen=True)
class Known:
    """The snapshot that, with (seed, epoch), determines a plan.

    Attributes:
        losses: float32 per id; infinite if unknown.
        drawn: int32 per id, the last epoch that served the sample; -1 for none.
        resident: bool per id.
    """

    losses: Array
    drawn: Array
    resident: Array


@dataclass(frozen=True)
class Draw:
    """A plan, and the classification of samples from its draw.

    Attributes:
        plan: ids and weights, which are 1 / probability in "unbiased" and "infobatch".
        low: bool per id: the L-samples, whose probability is below 1/2.
        resident: bool per id, at the time of the draw.
    """

    plan: Plan
    low: Array
    resident: Array

    def state(self) -> dict[str, Any]:
        """The draw, serializable as JSON."""
        weights = None if self.plan.weights is None else pack(self.plan.weights)
        masks = {"low": pack_mask(self.low), "resident": pack_mask(self.resident)}
        return {"epoch": self.plan.epoch, "ids": pack(self.plan.ids), "weights": weights, **masks}

    @classmethod
    def load(cls, state: dict[str, Any] | None, count: int) -> Self | None:
        """Restore the draw of a state, if it has one, for `count` samples."""
        if state is None:
            return None
        weights = None if state["weights"] is None else unpack(state["weights"], np.float32)
        plan = Plan(unpack(state["ids"], np.int64), weights, state["epoch"])
        return cls(plan, unpack_mask(state["low"], count), unpack_mask(state["resident"], count))


@dataclass(frozen=True)
class Rule:
    """The parameters of a draw: arguments of the user, or the defaults of the plan.

    Attributes:
        plan: its name.
        beta: power of the selection probability ("icache").
        prune: share left out of the samples below the mean loss ("infobatch").
        target_io: storage operations of an epoch as a share of those of the full plan ("unbiased").
        p_min: lowest probability ("unbiased").
        max_age: a sample that was not drawn for this many epochs is drawn.
        warm_up: number of full epochs at the start.
        full_every: interval of full epochs; 0 for none.
        full_from: all epochs are full from this one on; -1 for never.
        rotating: whether the residents change randomly between epochs.
    """

    plan: str
    beta: float
    prune: float
    target_io: float
    p_min: float
    max_age: int
    warm_up: int
    full_every: int
    full_from: int
    rotating: bool

    def full(self, epoch: int) -> bool:
        """Whether an epoch takes all samples."""
        return (
            self.plan == "full"
            or epoch < self.warm_up
            or (self.full_every > 0 and epoch % self.full_every == 0)
            or 0 <= self.full_from <= epoch
        )

    def chances(self, known: Known, quantiles: Array, seed: int, epoch: int) -> tuple[Array, Array]:
        """The probability with which each sample is drawn, and the one that determines its weight.

        The two are equal unless the residents rotate: a resident is always drawn, but residency among samples of about
        the same rank is itself random. The weight then depends on the drawn share of such samples
        (post-stratification), and varies little between samples. `quantiles` are the ranks of the losses, which are not
        needed in a full epoch.
        """
        if self.full(epoch):
            return np.ones(len(known.losses)), np.ones(len(known.losses))
        overdue = epoch - known.drawn > self.max_age - 1 - _early(len(known.drawn), self.max_age // 2)
        if self.plan == "unbiased":
            return self._unbiased(known, quantiles, overdue)
        if self.plan == "infobatch":
            chances = pruned(known.losses, self.prune)
        else:
            history = some_known(known.losses, generator(seed, epoch, 4))
            chances = selective(known.losses, history, self.beta)
        chances[overdue] = 1
        return chances, chances

    def _unbiased(self, known: Known, quantiles: Array, overdue: Array) -> tuple[Array, Array]:
        """1 for resident or overdue samples; the others share the remaining storage operations by loss."""
        left = ~(known.resident | overdue)
        missing, others = len(left) - int(np.count_nonzero(known.resident)), int(np.count_nonzero(left))
        mean = (self.target_io * missing - (missing - others)) / max(1, others)
        chances = leaning(quantiles, left, max(self.p_min, mean), self.p_min, _LEAN)
        chances[~left] = 1
        return chances, chances if not self.rotating else shares(chances, quantiles)


def _early(count: int, most: int) -> Array:
    """An offset of 0 to `most` - 1 epochs per id, which spreads the epochs in which overdue samples are drawn."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    return ((mixed >> np.uint64(40)) % np.uint64(max(1, most))).astype(np.int32)


def draw_plan(rule: Rule, known: Known, seed: int, epoch: int) -> Draw:
    """Draw the plan of an epoch."""
    quantiles = np.empty(0) if rule.full(epoch) else ranks(known.losses)
    chances, by = rule.chances(known, quantiles, seed, epoch)
    ids = draw(chances, quantiles, generator(seed, epoch, 0))
    ids = ids[generator(seed, epoch, 1).permutation(len(ids))]
    weights = (1 / by[ids]).astype(np.float32) if rule.plan in ("unbiased", "infobatch") else None
    return Draw(Plan(ids, weights, epoch), chances < 0.5, known.resident)


def last_eighth(epochs: int | None, plan: str) -> int:
    """The first epoch of the last eighth, rounded up to whole epochs; -1 if unknown or not used by the plan."""
    count = -1 if epochs is None else parse_whole(epochs, "num_epochs", 1)
    return count - -(-count // 8) if count > 0 and plan == "infobatch" else -1
