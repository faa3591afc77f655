"""Splits a pipeline into its deterministic prefix, which may be cached, and the rest."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stallfree.errors import StallfreeWarning, text_of
from stallfree.frames import users_level
from stallfree.ipc.forked import call_in_child
from stallfree.pipeline.classify.libraries import known
from stallfree.pipeline.classify.names import random_name
from stallfree.pipeline.classify.outcomes import Found, States, StepError, Trust, earliest, make_twice
from stallfree.pipeline.compose import Compose, Transform, describe_step, flatten, halves_of
from stallfree.pipeline.generators import find_generators
from stallfree.pipeline.marks import mark_deterministic, mark_random, note_drew

__all__ = ["Split", "Verdict", "mark_deterministic", "mark_random", "split"]


@dataclass(frozen=True)
class Verdict:
    """The classification of one step."""

    step: str
    """Name of the step."""
    random: bool
    """Whether the output may differ for the same input."""
    reason: str
    """Source of the verdict: `"mark"`, `"torchvision"`, `"albumentations"`, `"monai"` or `"probe"` (two runs, and the
    names in its code); `"seen"` for a step that proved random while a cache was filled, `"halves"` for the two that
    replace one random step, `"undecided"` without evidence, and `"after"` for a step behind the first random one, which
    is neither cached nor run."""


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
    library's declaration. Any other step is random if it draws random numbers, or if two runs on `probe` differ. A step
    whose code names a source of randomness, such as `default_rng` or `shuffle`, counts as random too, with a
    `StallfreeWarning` if its runs did not differ. The steps run in a child process, so that they and the generators are
    left unchanged.

    The verdict holds for this value. A step that proves random for another sample while a cache is filled becomes
    random then; see `CachedDataset`.

    If the first random step has a method `halves() -> (deterministic, random)`, where `random(deterministic(x))` equals
    the step's result for `x`, the two replace it; the first one ends the part that may be cached.

    Args:
        transform: the pipeline.
        probe: a value for the first step, for instance what a source's `fetch` returned. None: nothing is run, and
            steps that are not declared by a mark or a library count as random, with a `StallfreeWarning`.

    Example:
        ```python
        parts = sf.split(sf.Compose([resize, flip]), image)
        assert parts.deterministic.transforms == (resize,)
        assert parts.random.transforms == (flip,)
        ```
    """
    steps = flatten(transform)
    count = declared(steps)
    if all(known(step) is not None for step in steps[:count]) and probe is None:
        found = None
    elif probe is None:
        at = next(at for at, step in enumerate(steps) if known(step) is None)
        found = Found(at, "there is no sample to try it on", certain=False)
    else:
        found = call_in_child(lambda: _trial(steps[:count], probe), "the trial of the transform")
    warn_of_doubt(steps, found)
    return divide(steps, found)


def declared(steps: Sequence[Transform]) -> int:
    """Return how many steps come before the first one that a mark or a library declares random."""
    return next((at for at, step in enumerate(steps) if (known(step) or (False,))[0]), len(steps))


def named(steps: Sequence[Transform]) -> Found | None:
    """Return the first of `steps` whose code names a source of randomness, unless a mark or library declares it."""
    for at, step in enumerate(steps):
        if known(step) is None and (name := random_name(step)):
            return Found(at, f"its code names {name}", certain=False)
    return None


def _trial(steps: Sequence[Transform], probe: Any) -> Found | None:
    """Run `steps` on `probe`, in a child process."""
    found = named(steps)
    try:
        trust = [Trust(), *map(Trust.of, steps)]
        _, differs = make_twice(lambda: probe, None, steps, trust, States(find_generators(steps)))
    except StepError as problem:
        text = f"raised {type(problem.error).__name__}: {text_of(problem.error)}"
        at = next((at for at in range(problem.at, len(steps)) if known(steps[at]) is None), None)
        who = "it" if at == problem.at else "a step before it"
        differs = None if at is None else Found(at, f"{who} {text}", certain=False)
    return earliest(found, differs)


def divide(steps: Sequence[Transform], found: Found | None) -> Split:
    """Return the split of `steps`, of which `found` is the first random one that no mark or library declares."""
    count = declared(steps) if found is None else found.at
    verdicts: list[Verdict] = []
    parts: list[Transform] = []
    end = count
    for at, step in enumerate(steps):
        name, sign = describe_step(step), known(step)
        if found is not None and at == count:
            sign = _sign_of(step, found)
        halves = halves_of(step) if at == count else None
        if halves is not None:
            verdicts += (Verdict(describe_step(half), half is halves[1], "halves") for half in halves)
            parts += halves
            end = count + 1
            continue
        verdicts.append(Verdict(name, *(sign or ((True, "after") if at > count else (False, "probe")))))
        parts.append(step)
    return Split(Compose(parts[:end]), Compose(parts[end:]), tuple(verdicts))


def _sign_of(step: Transform, found: Found) -> tuple[bool, str]:
    """Return the verdict on the step that `found` is about."""
    if not found.certain:
        return True, "undecided"
    if known(step) is None:
        return True, "probe"
    note_drew(step)  # its library declares it deterministic
    return True, "seen"


def warn_of_doubt(steps: Sequence[Transform], found: Found | None) -> None:
    """Warn of the step that `found` is about if it is not certain that it is random."""
    if found is None or found.certain:
        return
    warnings.warn(
        f"cannot tell whether the transform {describe_step(steps[found.at])} gives the same output for the same input: "
        f"{found.why}. It counts as random, so it and all steps after it run again in each epoch. If it is "
        "deterministic, mark it with stallfree.mark_deterministic(transform), otherwise with "
        "stallfree.mark_random(transform)",
        StallfreeWarning,
        stacklevel=users_level(),
    )
