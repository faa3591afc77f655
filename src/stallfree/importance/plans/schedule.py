"""Learning-rate schedules that advance by samples seen, for epochs with different numbers of steps."""

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

from stallfree.datasets.epoch_source import check_state
from stallfree.errors import InputError, argument_conflict, state_mismatch
from stallfree.units import parse_whole

_STATE_VERSION = 1
_KEYS = ("steps", "seen", "at", "base", "since", "total", "scheduler")

_PERIODIC = (OneCycleLR, CosineAnnealingWarmRestarts, CyclicLR)
"""Schedules that rise again after the last step of a cycle."""


class BySamples:
    """Drives `scheduler`, which counts steps, by the number of samples trained on.

    An importance plan shortens epochs by varying amounts, so a schedule for a fixed number of steps would not reach its
    end. Wrap it, and pass the number of samples of each step:

        schedule = OneCycleLR(optimizer, 0.1, total_steps=1000)
        scheduler = sf.BySamples(schedule, samples=sampler.expected_samples(epochs))
        for epoch in range(epochs):
            batches = iter(loader)  # draws the plan
            later = sampler.expected_samples(epochs, start=epoch + 1)
            scheduler.expect(len(sampler.plan(epoch).ids) + later)
            for batch in batches:
                ...
                optimizer.step()
                scheduler.step(len(batch.ids))

    After `seen` samples the schedule has made `steps * seen / samples` of its steps, rounded down. It takes exactly
    torch's values, those of momentum included, and works with any scheduler that is stepped without arguments. With
    `steps` batches of equal length it is torch's own schedule. Its steps may have any size: a schedule per epoch
    changes value where each epoch's share of the samples ends.

    The last value is reached when all `samples` were seen, and is kept from then on. `samples` is often an estimate:
    exceeding it is no error, but logs a warning from 5% beyond. The last value is that after `steps` steps; for
    schedules that rise again there (`OneCycleLR`, `CyclicLR`, `CosineAnnealingWarmRestarts`), that of the step before.
    Pass better estimates of the remaining samples to `expect`, as above.

    Args:
        scheduler: a new scheduler of the optimizer in use. Other code must not step it.
        samples: of the whole training, at least 1; a fraction is rounded. In a job of several ranks pass, here and to
            `step`, either those of one rank or those of all.
        steps: total number of steps of `scheduler`. None: `total_steps` of a `OneCycleLR`, `T_max` of a
            `CosineAnnealingLR`; required for others.

    Attributes:
        scheduler: the wrapped scheduler.
        steps: its total number of steps.
        seen: number of samples so far.

    Raises `InputError` for invalid arguments, among them a `ReduceLROnPlateau`, which depends on a metric.

    Example:
        ```python
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        scheduler = sf.BySamples(schedule, samples=1600)
        optimizer.step()  # on a batch of 64 samples
        scheduler.step(64)
        assert schedule.last_epoch == 4
        ```
    """

    def __init__(self, scheduler: LRScheduler, *, samples: float, steps: int | None = None) -> None:
        if isinstance(scheduler, ReduceLROnPlateau) or not callable(getattr(scheduler, "step", None)):
            raise InputError(
                f"scheduler={scheduler!r:.80} does not count steps: give a scheduler of torch.optim.lr_scheduler "
                "that is stepped without arguments"
            )
        if getattr(scheduler, "last_epoch", 0) > 0:
            raise argument_conflict(
                f"the scheduler has made {scheduler.last_epoch} steps: give a new one, and go on with load_state_dict"
            )
        self.scheduler = scheduler
        self.steps = _steps_of(scheduler) if steps is None else parse_whole(steps, "steps", 1)
        if isinstance(scheduler, OneCycleLR) and self.steps > scheduler.total_steps:
            raise argument_conflict(
                f"steps={self.steps}: this OneCycleLR was made for total_steps={scheduler.total_steps}: give the same"
            )
        self.seen = 0
        self._last = self.steps - 1 if _periodic(scheduler) else self.steps
        self._at = 0  # steps made
        self._warned = False
        # The schedule is at step `base` after `since` samples, and ends `total` samples later.
        self._base, self._since, self._total = 0, 0, _samples(samples)

    def step(self, samples: int) -> None:
        """Record an optimizer step on `samples` samples.

        Raises `InputError` if that is not a whole number.
        """
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
        """Spread the rest of the schedule over `samples` remaining samples.

        Call it at the beginning of each epoch: the last value is then reached at the end of the last epoch even if
        `samples` was a poor estimate at first. The learning rate does not jump. Do not call it in an epoch that is
        resumed midway: the state contains it.
        """
        self._total = _samples(samples)
        self._base, self._since = self._at, self.seen

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each parameter group."""
        return list(self.scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """The position and the state of `scheduler`.

        The learning rate itself is in the optimizer's state.
        """
        values = (self.steps, self.seen, self._at, self._base, self._since, self._total, self.scheduler.state_dict())
        return {"version": _STATE_VERSION, **dict(zip(_KEYS, values, strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises `InputError` for a state of another schedule or release."""
        check_state(state, _STATE_VERSION, *_KEYS)
        if state["steps"] != self.steps:
            raise state_mismatch(
                f"the state is of {state['steps']} steps, this schedule has {self.steps}: give the same"
            )
        self.scheduler.load_state_dict(state["scheduler"])
        self.seen, self._at = state["seen"], state["at"]
        self._base, self._since, self._total = state["base"], state["since"], state["total"]


def _steps_of(scheduler: LRScheduler) -> int:
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps)
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max)
    raise argument_conflict(f"how many steps a {type(scheduler).__name__} is made for cannot be seen: give steps=")


def _periodic(scheduler: Any) -> bool:
    parts = getattr(scheduler, "_schedulers", ())  # of a SequentialLR or a ChainedScheduler
    return isinstance(scheduler, _PERIODIC) or any(_periodic(part) for part in parts)


def _samples(value: float) -> int:
    if isinstance(value, bool) or not isinstance(value, Real) or not 1 <= value < math.inf:
        raise InputError(f"samples={value!r}: give how many samples are trained on, 1 or more")
    return round(value)
