"""The draw of each importance sampling plan, as a function of losses, residency and (seed, epoch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.datasets.epoch_source import Plan
from stallfree.importance.plans.probabilities import (
    draw,
    generator,
    leaning,
    pruned,
    ranks,
    selective,
    shares,
    some_known,
)
from stallfree.importance.plans.states import pack, pack_mask, unpack, unpack_mask
from stallfree.units import parse_whole

Array = npt.NDArray[Any]

PLANS = ("unbiased", "icache", "infobatch", "full")


@dataclass(frozen=True)
class Rule:
    """The parameters of a draw: arguments of the user, or the defaults of the plan.

    Attributes:
        plan: its name.
        beta: power of the selection probability ("icache").
        prune: share left out of the samples below the mean loss ("infobatch").
        target_io: storage operations of an epoch as a share of those of the full plan ("unbiased").
        p_min: lowest probability ("unbiased").
        lean: dependence of a missing sample's probability on its rank ("unbiased").
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
    lean: float
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

    def chances(self, known: Known, places: Array, seed: int, epoch: int) -> tuple[Array, Array]:
        """The probability with which each sample is drawn, and the one that determines its weight.

        The two are equal unless the residents rotate: a resident is always drawn, but residency among samples of about
        the same rank is itself random. The weight then depends on the drawn share of such samples
        (post-stratification), and varies little between samples. `places` are the ranks of the losses; not needed in a
        full epoch.
        """
        if self.full(epoch):
            return np.ones(len(known.losses)), np.ones(len(known.losses))
        overdue = epoch - known.drawn > self.max_age - 1 - _early(len(known.drawn), self.max_age // 2)
        if self.plan == "unbiased":
            return self._unbiased(known, places, overdue)
        if self.plan == "infobatch":
            chances = pruned(known.losses, self.prune)
        else:
            history = some_known(known.losses, generator(seed, epoch, 4))
            chances = selective(known.losses, history, self.beta)
        chances[overdue] = 1
        return chances, chances

    def _unbiased(self, known: Known, places: Array, overdue: Array) -> tuple[Array, Array]:
        """1 for resident or overdue samples; the others share the remaining storage operations by loss."""
        left = ~(known.resident | overdue)
        missing, others = len(left) - int(np.count_nonzero(known.resident)), int(np.count_nonzero(left))
        mean = (self.target_io * missing - (missing - others)) / max(1, others)
        chances = leaning(places, left, max(self.p_min, mean), self.p_min, self.lean)
        chances[~left] = 1
        return chances, chances if not self.rotating else shares(chances, places)


def _early(count: int, most: int) -> Array:
    """An offset of 0 to `most` - 1 epochs per id, which spreads the epochs in which overdue samples are drawn."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    early: Array = ((mixed >> np.uint64(40)) % np.uint64(max(1, most))).astype(np.int32)
    return early


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

    @staticmethod
    def load(state: dict[str, Any] | None, count: int) -> Draw | None:
        """Restore the draw of a state, if it has one, for `count` samples."""
        if state is None:
            return None
        weights = None if state["weights"] is None else unpack(state["weights"], np.float32)
        plan = Plan(unpack(state["ids"], np.int64), weights, state["epoch"])
        return Draw(plan, unpack_mask(state["low"], count), unpack_mask(state["resident"], count))


def draw_plan(rule: Rule, known: Known, seed: int, epoch: int) -> Draw:
    """Draw the plan of an epoch."""
    places = np.empty(0) if rule.full(epoch) else ranks(known.losses)
    chances, by = rule.chances(known, places, seed, epoch)
    ids = np.arange(len(chances))
    if (chances < 1).any():
        ids = draw(chances, places, generator(seed, epoch, 0))
    ids = ids[generator(seed, epoch, 1).permutation(len(ids))]
    weights = (1 / by[ids]).astype(np.float32) if rule.plan in ("unbiased", "infobatch") else None
    return Draw(Plan(ids, weights, epoch), chances < 0.5, known.resident)


def last_eighth(epochs: int | None, plan: str) -> int:
    """The first epoch of the last eighth, rounded up to whole epochs; -1 if unknown or not used by the plan."""
    count = -1 if epochs is None else parse_whole(epochs, "num_epochs", 1)
    return count - -(-count // 8) if count > 0 and plan == "infobatch" else -1
