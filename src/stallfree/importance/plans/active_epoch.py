"""The active epoch of an `ImportanceSampler`, and the record of which samples were served."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stallfree.datasets.epoch_source import Plan
from stallfree.importance.plans.retention import Retention
from stallfree.importance.plans.sampling_plans import Draw
from stallfree.importance.plans.states import pack, pack_mask, unpack, unpack_mask

Array = npt.NDArray[Any]


class Marks:
    """The samples that were actually served, where they differ from the plan.

    A plan counts as served when it is drawn, which is correct if the sampler is only iterated. If a loader marks the
    samples that it serves, the next plan corrects the difference.

    Attributes:
        served: bool per id: delivered for training in the active epoch.
        ended: whether that epoch has ended; array of one bool.
        begun: number of epochs started.
    """

    def __init__(self, count: int) -> None:
        self.served = np.zeros(count, bool)
        self.ended = np.zeros(1, bool)
        self.begun = 0
        # Of the active epoch, and of the plan drawn last: epoch, planned samples, last epoch that served each before.
        self._epoch, self._planned, self._before = -1, np.zeros(count, bool), np.full(count, -1, np.int32)
        self._newest = self._epoch, self._planned, self._before

    def plan(self, plan: Plan, drawn: Array) -> None:
        """Record all samples of a plan as served, in `drawn`: int32 per id, the last epoch that served it."""
        planned = np.zeros(len(drawn), bool)
        planned[plan.ids] = True
        self._newest = plan.epoch, planned, drawn.copy()
        drawn[plan.ids] = np.maximum(drawn[plan.ids], plan.epoch)

    def begin(self) -> None:
        """Begin the epoch of the plan drawn last."""
        self.begun += 1
        self._epoch, self._planned, self._before = self._newest
        self.served[:] = self.ended[:] = False

    def apply(self, drawn: Array) -> None:
        """Correct `drawn`, if the active epoch has ended."""
        if self.ended.all():
            left, extra = self._planned & ~self.served, self.served & ~self._planned
            left &= drawn == self._epoch
            drawn[left] = self._before[left]
            drawn[extra] = np.maximum(drawn[extra], self._epoch)
            self.ended[:] = False

    def state(self) -> dict[str, Any]:
        """The state, serializable as JSON."""
        plans = (self._epoch, self._planned, self._before), self._newest
        return {
            "served": pack_mask(self.served),
            "ended": bool(self.ended.all()),
            "plans": [[epoch, pack_mask(planned), pack(before)] for epoch, planned, before in plans],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
        count = len(self.served)
        self.served[:], self.ended[:] = unpack_mask(state["served"], count), state["ended"]
        (self._epoch, self._planned, self._before), self._newest = (
            (epoch, unpack_mask(planned, count), unpack(before, np.int32)) for epoch, planned, before in state["plans"]
        )


class ActiveEpoch:
    """An epoch that is being served.

    Args:
        draw: the plan and its L-samples.
        batches: the ids of each batch of this rank, as planned.
        weights: float32 per id.
        marks: records the served samples.
        retention: controls what the cache keeps, or None.
        rank, count: rank of this process, and number of processes that serve the plan.

    Attributes:
        draw, batches: as given.
        excluded: ids that only other ranks may serve: those of their batches, and their part of the ids in no batch.
    """

    def __init__(
        self,
        draw: Draw,
        batches: list[Array],
        weights: Array,
        marks: Marks,
        retention: Retention | None,
        rank: int,
        count: int,
    ) -> None:
        self.draw, self.batches = draw, batches
        self._weights = weights
        self._marks, self._number, self._retention = marks, marks.begun, retention
        others = np.arange(len(weights)) % count != rank
        others[draw.plan.ids] = True
        for ids in batches:
            others[ids] = False
        self.excluded = np.flatnonzero(others)

    def served(self, ids: Array) -> torch.Tensor:
        """Mark `ids` as delivered. Returns their weights, float32."""
        self._marks.served[ids] = True
        if self._retention is not None:
            self._retention.served(ids)
        return torch.from_numpy(self._weights[ids])

    def end(self) -> None:
        """End the epoch: nothing more of it is served, here or after a resume. Idempotent."""
        if self._number == self._marks.begun:  # else another epoch has begun since
            self._marks.ended[:] = True
