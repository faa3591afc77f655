"""An epoch of an `ImportanceSampler` that is being served."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stallfree.plans.keeping import Ranked, Rotating
from stallfree.plans.losses import pack, unpack
from stallfree.plans.plan import Plan
from stallfree.plans.rules import Draw

Array = npt.NDArray[Any]


class Marks:
    """Where what was served differs from the plan. A plan is marked as served when it is drawn; this puts it right.

    Attributes:
        left: bool per id: in the plan, and not served after all.
        extra: bool per id: served, and not in the plan.
    """

    def __init__(self, count: int) -> None:
        self.left = np.zeros(count, bool)
        self.extra = np.zeros(count, bool)
        self._epoch = -1
        self._before = np.full(count, -1, np.int32)

    def plan(self, plan: Plan, drawn: Array) -> None:
        """Mark all of a plan as served in its epoch, in `drawn`: int32 per id, the last epoch that served it."""
        self._epoch = plan.epoch
        self._before = drawn.copy()
        ids = plan.ids if plan.weights is None else plan.ids[plan.weights > 0]
        drawn[ids] = np.maximum(drawn[ids], plan.epoch)

    def apply(self, drawn: Array) -> None:
        """Put `drawn` right, and forget the marks."""
        left = self.left & ~self.extra
        drawn[left] = self._before[left]
        drawn[self.extra] = np.maximum(drawn[self.extra], self._epoch)
        self.left[:] = self.extra[:] = False

    def state(self) -> dict[str, Any]:
        """All of it, fit for JSON."""
        masks = np.packbits(np.stack([self.left, self.extra]), axis=1)
        return {"epoch": self._epoch, "masks": pack(masks), "before": pack(self._before)}

    def load(self, state: dict[str, Any]) -> None:
        """Be as when `state` was taken."""
        masks = unpack(state["masks"], np.uint8).reshape(2, -1)
        self.left[:], self.extra[:] = np.unpackbits(masks, axis=1, count=len(self.left))
        self._before[:] = unpack(state["before"], np.int32)
        self._epoch = state["epoch"]


class Begun:
    """An epoch that is served.

    Args:
        draw: plan and L-samples.
        batches: the ids of each batch of this rank, as planned.
        dropped: the ids that no rank serves.
        weights: float32 per id, those of a batch.
        per_batch: scale the weights of a batch to a mean of 1.
        marks: is told who was not served, and who was beside the plan.
        keeping: is told who was served, or None.

    Attributes:
        draw, batches: as given.
        elsewhere: the ids of the plan that this rank does not serve.
    """

    def __init__(
        self,
        draw: Draw,
        batches: list[Array],
        dropped: Array,
        weights: Array,
        per_batch: bool,
        marks: Marks,
        keeping: Rotating | Ranked | None,
    ) -> None:
        self.draw, self.batches = draw, batches
        self._dropped, self._weights, self._per_batch = dropped, weights, per_batch
        self._marks, self._keeping = marks, keeping
        self._planned = np.zeros(len(draw.low), bool)
        self._planned[draw.plan.ids] = True
        self._waiting = np.zeros(len(draw.low), bool)
        for ids in batches:
            self._waiting[ids] = True
        self.elsewhere = np.flatnonzero(self._planned & ~self._waiting)

    def served(self, ids: Array) -> torch.Tensor:
        """`ids` were handed out. Their weights, for a batch of them: float32, normalized as asked for."""
        self._waiting[ids] = False
        self._marks.left[ids] = False
        self._marks.extra[ids[~self._planned[ids]]] = True
        if self._keeping is not None:
            self._keeping.served(ids)
        weights = self._weights[ids]
        if self._per_batch:
            weights = weights / weights.mean()
        return torch.from_numpy(weights)

    def end(self) -> None:
        """No more of it is served. May be called twice."""
        self._marks.left |= self._waiting
        self._marks.left[self._dropped] = True
