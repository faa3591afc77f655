"""Splits a pipeline into its deterministic prefix, which may be cached, and the rest."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stallfree.errors import text_of
from stallfree.frames import users_level
from stallfree.pipeline.classify.libraries import known
from stallfree.pipeline.classify.probe import run_step, try_step
from stallfree.pipeline.compose import Compose, Transform, describe_step, flatten, halves_of
from stallfree.pipeline.marks import mark_deterministic, mark_random

__all__ = ["Split", "StallfreeWarning", "Verdict", "mark_deterministic", "mark_random", "split"]


class StallfreeWarning(UserWarning):
    """Warns of something that works, but not optimally; the message recommends an action.

    Example:
        ```python
        import warnings

        warnings.simplefilter("error", sf.StallfreeWarning)  # in tests: raise it
        ```
    """


@dataclass(frozen=True)
class Verdict:
    """The classification of one step."""

    step: str
    """Name of the step."""
    random: bool
    """Whether the output may differ for the same input."""
    reason: str
    """Source of the verdict: `"mark"`, `"torchvision"`, `"albumentations"`, `"monai"` or `"probe"` (a scan of the code
    and a trial); `"seen"` for a step that drew random numbers while a cache was filled, `"halves"` for the two that
    replace one random step, `"undecided"` without evidence, and `"after"` for a step behind the first random one, which
    is neither cached nor tried."""


@dataclass(frozen=True)
class Split:
    """A pipeline in two parts: `random(deterministic(value))` equals the whole.

    `str()` gives a table of the steps.

    A step replaced by its `halves` may compute both at once in another way; the results then agree within that
    computation's error, such as a decoder's.

    Attributes:
        deterministic: the longest prefix of steps that always give the same output for the same input.
        random: the remaining steps.
        verdicts: one per step of the flattened pipeline, in order; two for a step that was replaced by its halves.

    Example:
        ```python
        parts = sf.split(sf.Compose([resize, flip]), image)
        print(parts)  # one line per step: cached or fresh, and why
        small = parts.random(parts.deterministic(image))
        ```
    """

    deterministic: Compose
    random: Compose
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        lines = [
            f"{'cached' if place < len(self.deterministic) else 'fresh ':7} "
            f"{'random' if verdict.random else 'deterministic':14} {verdict.reason:15} {verdict.step}"
            for place, verdict in enumerate(self.verdicts)
        ]
        return "\n".join(lines)


def split(transform: Transform | None, probe: Any = None) -> Split:
    """Split `transform` into a deterministic part and a part that runs each time.

    Only the output of the deterministic part may be cached.

    Nested compositions are flattened first (see `flatten`). A step is classified by the user's mark, then by its
    library's declaration. If `probe` is given, its code is then scanned for unseeded generators, clocks and entropy,
    and it is run twice from different states of the random generators. `probe` is a value for the first step, for
    instance what a source's `fetch` returned; it is copied, and generators and steps are left unchanged. The steps
    before a tried step also run on it. None means no probe.

    The verdict holds for this value. While a cache is filled, a step that draws random numbers for another sample
    becomes random; see `CachedDataset`.

    An undecided step counts as random, with a `StallfreeWarning` that names it.

    If the first random step has a method `halves() -> (deterministic, random)`, where `random(deterministic(x))` equals
    the step's result for `x`, the two replace it; the first one ends the part that may be cached.

    Example:
        ```python
        parts = sf.split(sf.Compose([resize, flip]), image)
        assert parts.deterministic.transforms == (resize,)
        assert parts.random.transforms == (flip,)
        ```
    """
    flat = flatten(transform)
    values = _Values(flat, probe)
    steps: list[Transform] = []
    verdicts: list[Verdict] = []
    count: int | None = None  # number of deterministic steps, once the first random one is found
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
    """The input of each step when the first one gets `probe`, computed lazily."""

    def __init__(self, steps: Sequence[Transform], probe: Any) -> None:
        self.given = probe is not None
        self._steps, self._place, self._value = steps, 0, probe

    def before(self, place: int) -> Any:
        while self._place < place:
            self._value = run_step(self._steps[self._place], self._value)
            self._place += 1
        return self._value

    def learn(self, place: int, output: Any) -> None:
        """Record that the step at `place` returned `output`."""
        self._place, self._value = place + 1, output


def _tried(step: Transform, place: int, values: _Values) -> Verdict:
    """Return the verdict of a trial; random, with a warning, if no trial is possible or it is inconclusive."""
    why = "there is no sample to try it on"
    if values.given:
        try:
            value = values.before(place)
        except Exception as error:
            why = f"a step before it raised {type(error).__name__}: {text_of(error)}"
        else:
            trial = try_step(step, value)
            if trial.random is not None:
                values.learn(place, trial.output)
                return Verdict(describe_step(step), trial.random, "probe")
            why = trial.why
    warnings.warn(
        f"cannot tell whether the transform {describe_step(step)} gives the same output for the same input: {why}. It "
        "counts as random, so it and all steps after it run again in each epoch. If it is deterministic, mark it with "
        "stallfree.mark_deterministic(transform), otherwise with stallfree.mark_random(transform)",
        StallfreeWarning,
        stacklevel=users_level(),
    )
    return Verdict(describe_step(step), True, "undecided")
