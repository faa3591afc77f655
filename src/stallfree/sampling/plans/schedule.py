"""Learning-rate schedules that go by the samples seen, because not all epochs have equally many steps."""

from __future__ import annotations

import math
import warnings
from numbers import Real
from typing import Any

from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)

from stallfree.errors import InputError
from stallfree.sampling.plans.states import check_state
from stallfree.units import parse_whole

_STATE_VERSION = 1
_KEYS = ("steps", "seen", "at", "base", "since", "total", "scheduler")

_PERIODIC = (OneCycleLR, CosineAnnealingWarmRestarts, CyclicLR)
"""After the last step of a cycle these go up again."""


class BySamples:
    """Drives `scheduler`, which counts steps, by the samples that were trained on.

    An importance plan makes epochs shorter, and no two need have the same length: a schedule made for a number of steps
    would not come to its end. Wrap it, and give each step the number of its samples:

        schedule = OneCycleLR(optimizer, 0.1, total_steps=1000)
        scheduler = sf.BySamples(schedule, samples=sampler.expected_samples(epochs))
        for epoch in range(epochs):
            later = sampler.expected_samples(epochs, start=epoch + 1)
            scheduler.expect(len(sampler.plan(epoch).ids) + later)
            for batch in loader:
                ...
                optimizer.step()
                scheduler.step(len(batch.ids))

    After `seen` samples the schedule has made `steps * seen / samples` of its steps, rounded down. So it has the very
    values that torch gives it, those of momentum included, and any scheduler will do that is stepped without arguments.
    With batches of equal length, `steps` of them in all, it is torch's own schedule. It may count steps of any size:
    one made for epochs goes from value to value where each epoch's share of the samples ends.

    The last value is reached when all `samples` were seen, whatever their epochs and batches were, and is kept from
    then on: `samples` is often an expectation, and going on after it is no error, but a warning from a 20th beyond. It
    is the value after `steps` steps; of schedules that go up again there (`OneCycleLR`, `CyclicLR`,
    `CosineAnnealingWarmRestarts`), that of the step before. Where it turns out how many samples are still to come, say
    so with `expect`, as above.

    Args:
        scheduler: a new one, of the optimizer that is used. It must not be stepped by anyone else.
        samples: in the whole training, at least 1; a fraction is rounded. In a job of several ranks give here and in
            `step` those of one rank, or those of all.
        steps: how many steps `scheduler` was made for. None: `total_steps` of a `OneCycleLR`, `T_max` of a
            `CosineAnnealingLR`; of others it must be given.

    Attributes:
        scheduler: the one that is driven.
        steps: that it was made for.
        seen: samples so far.

    Raises `InputError` for arguments that cannot be used, among them a `ReduceLROnPlateau`, which goes by a metric.
    """

    def __init__(self, scheduler: LRScheduler, *, samples: float, steps: int | None = None) -> None:
        if isinstance(scheduler, ReduceLROnPlateau) or not callable(getattr(scheduler, "step", None)):
            raise InputError(
                f"scheduler={scheduler!r:.80} does not count steps: give a scheduler of torch.optim.lr_scheduler "
                "that is stepped without arguments"
            )
        if getattr(scheduler, "last_epoch", 0) > 0:
            raise InputError(
                f"the scheduler has made {scheduler.last_epoch} steps: give a new one, and go on with load_state_dict"
            )
        self.scheduler = scheduler
        self.steps = _steps_of(scheduler) if steps is None else parse_whole(steps, "steps", 1)
        if isinstance(scheduler, OneCycleLR) and self.steps > scheduler.total_steps:
            raise InputError(
                f"steps={self.steps}: this OneCycleLR was made for total_steps={scheduler.total_steps}: give the same"
            )
        self.seen = 0
        self._last = self.steps - 1 if _periodic(scheduler) else self.steps
        self._at = 0  # steps made
        self._warned = False
        # The course is at step `base` when `since` samples were seen, and at its end `total` samples later.
        self._base, self._since, self._total = 0, 0, _samples(samples)

    def step(self, samples: int) -> None:
        """An optimizer step on so many samples was made. Raises `InputError` if that is no whole number."""
        self.seen += parse_whole(samples, "samples", 0)
        share = min(self.seen - self._since, self._total)
        if not self._warned and 20 * (self.seen - self._since) > 21 * self._total:
            self._warned = True
            warnings.warn(
                f"{self.seen} samples were trained on, {self._since + self._total} expected: the schedule is at its "
                "end, training goes on with the last learning rate. Call expect(samples) with the number to come",
                RuntimeWarning,
                stacklevel=2,
            )
        due = self._base + (self.steps - self._base) * share // self._total
        while self._at < min(due, self._last):
            self.scheduler.step()
            self._at += 1

    def expect(self, samples: float) -> None:
        """So many samples are still to come: the rest of the schedule is spread over them.

        Say it at the beginning of each epoch, and the last value is reached at the end of the last one even if
        `samples` was a bad guess at first. The learning rate does not jump. Not in an epoch that is resumed in its
        midst: the state knows it.
        """
        self._total = _samples(samples)
        self._base, self._since = self._at, self.seen

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each group of parameters."""
        return list(self.scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is, and the state of `scheduler`. The learning rate itself is in the optimizer's state."""
        values = (self.steps, self.seen, self._at, self._base, self._since, self._total, self.scheduler.state_dict())
        return {"version": _STATE_VERSION, **dict(zip(_KEYS, values, strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises `InputError` for a state of another schedule or release."""
        check_state(state, _STATE_VERSION, *_KEYS)
        if state["steps"] != self.steps:
            raise InputError(f"the state is of {state['steps']} steps, this schedule has {self.steps}: give the same")
        self.scheduler.load_state_dict(state["scheduler"])
        self.seen, self._at = state["seen"], state["at"]
        self._base, self._since, self._total = state["base"], state["since"], state["total"]


def _steps_of(scheduler: LRScheduler) -> int:
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps)
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max)
    raise InputError(f"how many steps a {type(scheduler).__name__} is made for cannot be seen: give steps=")


def _periodic(scheduler: Any) -> bool:
    parts = getattr(scheduler, "_schedulers", ())  # of a SequentialLR or a ChainedScheduler
    return isinstance(scheduler, _PERIODIC) or any(_periodic(part) for part in parts)


def _samples(value: float) -> int:
    if isinstance(value, bool) or not isinstance(value, Real) or not 1 <= value < math.inf:
        raise InputError(f"samples={value!r}: give how many samples are trained on, 1 or more")
    return round(value)
