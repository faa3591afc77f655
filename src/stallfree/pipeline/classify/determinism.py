"""Which part of a pipeline always gives the same output for the same input, and so may be cached."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stallfree.frames import users_level
from stallfree.pipeline.classify.libraries import known
from stallfree.pipeline.classify.probe import run_step, try_step
from stallfree.pipeline.compose import Compose, Transform, describe_step, flatten, halves_of
from stallfree.pipeline.marks import mark_deterministic, mark_random

__all__ = ["Split", "StallfreeWarning", "Verdict", "mark_deterministic", "mark_random", "split"]


class StallfreeWarning(UserWarning):
    """Something works, but not as well as it could; the message says what to do."""


@dataclass(frozen=True)
class Verdict:
    """What is known about one step."""

    step: str
    """Its name."""
    random: bool
    """Whether it may give another output for the same input."""
    reason: str
    """What says so: `"mark"`, `"torchvision"`, `"albumentations"`, `"monai"` or `"probe"` (a scan of its code and a
    trial); `"seen"` for a step that drew while a cache was filled, `"halves"` for the two that stand for one random
    step, `"undecided"` if nothing does, and `"after"` for a step behind the first random one, which is not cached and
    was not tried."""


@dataclass(frozen=True)
class Split:
    """A pipeline in two: `random(deterministic(value))` is the whole. `str()` gives a table of the steps.

    A step with `halves` that was taken apart may do both at once in another way: then the whole is equal within the
    error of that, such as a decoder's.
    """

    deterministic: Compose
    """The longest run of steps, from the first one, that always give the same output for the same input."""
    random: Compose
    """The other steps."""
    verdicts: tuple[Verdict, ...]
    """One per step of the flattened pipeline, in order; two for a step that was taken apart into its halves."""

    def __str__(self) -> str:
        lines = [
            f"{'cached' if place < len(self.deterministic) else 'fresh ':7} "
            f"{'random' if verdict.random else 'deterministic':14} {verdict.reason:15} {verdict.step}"
            for place, verdict in enumerate(self.verdicts)
        ]
        return "\n".join(lines)


def split(transform: Transform | None, probe: Any = None) -> Split:
    """Split `transform` into the part that may be cached and the part that must run anew each time.

    Nested compositions are flattened first (see `flatten`). A step is known to be random or deterministic by the
    user's mark, then by its library's own sign, then, when `probe` is given, by a scan of its code for unseeded
    generators, clocks and entropy, and by running it twice from different states of the random generators. `probe` is
    one value as the first step gets it, for instance what a source's `fetch` returned; it is copied, and generators and
    steps are left as they were. The steps before one that is tried are run on it too. None stands for no probe.

    The verdict holds for this value. While a cache is filled, a step that draws random numbers for another sample
    becomes random; see `CachedDataset`.

    A step that none of these decides counts as random, with a `StallfreeWarning` that names it.

    When the first random step has a method `halves() -> (deterministic, random)`, and `random(deterministic(x))` is
    what the step makes of `x`, these two stand in its place, the first one at the end of the part that may be cached.
    """
    flat = flatten(transform)
    values = _Values(flat, probe)
    steps: list[Transform] = []
    verdicts: list[Verdict] = []
    count: int | None = None  # deterministic steps, as soon as a random one has come
    for place, step in enumerate(flat):
        sign = known(step)
        if sign is not None:
            verdict = Verdict(describe_step(step), *sign)
        elif count is not None:
            verdict = Verdict(describe_step(step), True, "after")
        else:
            verdict = _tried(step, place, values)
        halves = halves_of(step) if count is None and verdict.random else None
        if verdict.random and count is None:
            count = place + (halves is not None)
        steps += halves or [step]
        if halves is None:
            verdicts.append(verdict)
        else:
            verdicts += (Verdict(describe_step(half), half is halves[1], "halves") for half in halves)
    count = len(steps) if count is None else count
    return Split(Compose(steps[:count]), Compose(steps[count:]), tuple(verdicts))


class _Values:
    """The value that each step gets when the first one gets `probe`, worked out only as far as it is asked for."""

    def __init__(self, steps: Sequence[Transform], probe: Any) -> None:
        self.given = probe is not None
        self._steps, self._place, self._value = steps, 0, probe

    def before(self, place: int) -> Any:
        while self._place < place:
            self._value = run_step(self._steps[self._place], self._value)
            self._place += 1
        return self._value

    def learn(self, place: int, output: Any) -> None:
        """Note that the step at `place` returned `output`."""
        self._place, self._value = place + 1, output


def _tried(step: Transform, place: int, values: _Values) -> Verdict:
    """The verdict of a trial; random and with a warning when there can be none or it shows nothing."""
    why = "there is no sample to try it on"
    if values.given:
        try:
            value = values.before(place)
        except Exception as error:
            why = f"a step before it raised {type(error).__name__}: {error}"
        else:
            trial = try_step(step, value)
            if trial.random is not None:
                values.learn(place, trial.output)
                return Verdict(describe_step(step), trial.random, "probe")
            why = trial.why
    warnings.warn(
        f"cannot tell whether the transform {describe_step(step)} gives the same output for the same input: {why}. It "
        "counts as random, so it and all steps after it run anew in each epoch. If it is deterministic, mark it with "
        "stallfree.mark_deterministic(transform), otherwise with stallfree.mark_random(transform)",
        StallfreeWarning,
        stacklevel=users_level(),
    )
    return Verdict(describe_step(step), True, "undecided")
