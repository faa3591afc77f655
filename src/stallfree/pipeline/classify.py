"""Is a step random? By marks, by what libraries declare, by names in the code, and by the outcomes of two runs.

Outcomes show every source of randomness, wherever it is: a generator in a class attribute or another module, one that a
library makes, C code, a clock. They are looked at again while a cache is filled, so that a verdict is never final.
`split` divides a pipeline into its deterministic prefix, which may be cached, and the rest. Classes of torchvision,
albumentations and MONAI are recognised by name and module, so that no library is imported here.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType
from typing import Any, Self

from stallfree.errors import StallfreeWarning
from stallfree.ipc.process import call_in_child
from stallfree.pipeline import compose
from stallfree.pipeline.compose import Compose, OnItem, Transform, describe_step, flatten, mark_of
from stallfree.pipeline.fingerprint import same
from stallfree.pipeline.objects import code_names, comes_from, random_name
from stallfree.pipeline.randomness import States, find_generators, sample_seed
from stallfree.pipeline.values import private
from stallfree.raising import described, users_level

# --- what marks and libraries declare --------------------------------------------------------------------------------

_TORCHVISION_RANDOM = {  # and all names that start with Random
    *("AugMix", "AutoAugment", "ColorJitter", "CutMix", "ElasticTransform", "GaussianBlur", "GaussianNoise", "JPEG"),
    *("MixUp", "RandAugment", "ScaleJitter", "TrivialAugmentWide"),
}
_ALBUMENTATIONS_DRAWS = {"py_random", "random_generator", "random", "random_utils"}
_ALBUMENTATIONS_BY_SETTING = {
    *("CenterCrop", "CenterCrop3D", "Crop", "LongestMaxSize", "PadIfNeeded", "PadIfNeeded3D", "SmallestMaxSize")
}
_MONAI_WRAPPERS = {"Lambda", "Lambdad", "TorchIO", "TorchIOd", "TorchVision", "TorchVisiond"}


def known(transform: Any) -> tuple[bool, str] | None:
    """Return whether `transform` is random, and the mark or library that declares it; None if none does."""
    mark = mark_of(transform)
    if mark is not None:
        return mark, "mark"
    if compose.drew(transform):
        return True, "seen"
    # To these it only passes its value.
    if type(transform) is OnItem:
        return known(transform.transform)
    if isinstance(transform, functools.partial):
        return known(transform.func)
    if type(transform).__name__ == "Lambda" and comes_from(type(transform), "torchvision.transforms"):
        return known(transform.lambd)
    parts = flatten(transform)
    if parts and parts[0] is not transform:
        return _known_of_all(parts)
    for library, sign in (("torchvision", _torchvision), ("albumentations", _albumentations), ("monai", _monai)):
        random = sign(transform)
        if random is not None:
            return random, library
    return None


def _known_of_all(transforms: Iterable[Any]) -> tuple[bool, str] | None:
    """Return the sign of the first random one of `transforms`; else of the first one, or None if not all are known."""
    signs = [known(transform) for transform in transforms] or [(False, "")]
    return next((sign for sign in signs if sign is not None and sign[0]), None if None in signs else signs[0])


def _torchvision(transform: Any) -> bool | None:
    """Random are classes of these names and what is derived from them; deterministic are all its others."""
    bases = [base.__name__ for base in type(transform).__mro__ if comes_from(base, "torchvision.transforms")]
    if any(name.startswith("Random") or name in _TORCHVISION_RANDOM for name in bases):
        return True
    return False if comes_from(type(transform), "torchvision.transforms") else None


def _albumentations(transform: Any) -> bool | None:
    """Deterministic are library transforms that always (`p=1`) or never run, and whose code draws no random numbers."""
    if not compose.is_albumentations(transform):
        return None
    cls, library = type(transform), comes_from(type(transform), "albumentations")
    if 0 < transform.p < 1:
        return True
    if hasattr(transform, "transforms"):
        if not library or cls.__name__ not in ("Compose", "Sequential"):
            return True
        return False if transform.p <= 0 else (_known_of_all(transform.transforms) or (None,))[0]
    if not library or cls.__name__ == "Lambda":
        return None
    if transform.p <= 0:
        return False
    if cls.__name__ in _ALBUMENTATIONS_BY_SETTING:
        positions = (getattr(transform, name, None) for name in ("position", "pad_position"))
        sizes = getattr(transform, "max_size", None)
        several = isinstance(sizes, (list, tuple)) and len(sizes) > 1
        return several or "random" in (str(getattr(position, "value", position)) for position in positions)
    own = cls.__mro__[: [base.__name__ for base in cls.__mro__].index("BasicTransform")]
    members = [member for base in own for member in vars(base).values() if isinstance(member, FunctionType)]
    return any(code_names(function.__code__) & _ALBUMENTATIONS_DRAWS for function in members)


def _monai(transform: Any) -> bool | None:
    """Random are subclasses of `RandomizableTrait`; deterministic are other library transforms, except wrappers."""
    if compose.is_monai_compose(transform):
        return (_known_of_all(transform.transforms) or (None,))[0]
    bases = {base.__name__ for base in type(transform).__mro__ if comes_from(base, "monai")}
    if bases & {"RandomizableTrait", "Randomizable"}:
        return True
    own = comes_from(type(transform), "monai") and type(transform).__name__ not in _MONAI_WRAPPERS
    return False if own and "Transform" in bases else None


# --- outcomes --------------------------------------------------------------------------------------------------------

SOURCE = -1
"""The place of what fetches a sample, before the first step."""

DREW = "it drew random numbers"
DIFFERS = "it returned something else for the same input"


@dataclass(frozen=True)
class Trust:
    """What is known of a step, or of the data set, without a run of it."""

    draws: bool = False
    """Its draws do not affect its output: it is marked as deterministic, or its library draws in any case."""
    outputs: bool = False
    """It is marked as deterministic, so its outputs are not compared."""

    @classmethod
    def of(cls, thing: object) -> Self:
        """Return the trust in a step or data set: its mark, or what its library declares.

        A composition of albumentations draws to decide whether to run, even if it always runs.
        """
        marked = mark_of(thing) is False
        return cls(marked or known(thing) == (False, "albumentations"), marked)


@dataclass(frozen=True)
class Found:
    """A step, or the data set, that proved random."""

    at: int
    """Its place among the steps, or `SOURCE`."""
    why: str
    certain: bool = True
    """False if its outputs cannot be compared, or only a name speaks for it."""


class StepError(Exception):
    """The first run failed at a place, `at`, with an `error`."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__(at, error)
        self.at, self.error = at, error


def make_twice(
    fetch: Callable[[], Any],
    again: Callable[[], Any] | None,
    steps: Sequence[Transform],
    trust: Sequence[Trust],
    states: States | None = None,
) -> tuple[Any, Found | None]:
    """Make a sample twice, step by step, until something is random.

    If the second run fails, as storage may, the rest of the sample is made once.

    Args:
        fetch: fetches the record.
        again: fetches it again; None if fetches are not compared.
        steps: applied to the record in turn.
        trust: in what fetches, and in each of `steps`.
        states: if given, a step is also random if these states change while it runs, or if its outputs cannot be
            compared.

    Returns:
        The output of the last step that ran, and what is random.

    Raises `StepError` if the first run fails.
    """
    output = other = None
    compares = True
    if states is not None:
        states.moved()
    for at in range(SOURCE, len(steps)):
        trusted = trust[at + 1]
        call = None if at == SOURCE else compose.as_call(steps[at])
        first: Callable[[], Any] = fetch if call is None else functools.partial(call, output)
        second = again if call is None else functools.partial(call, other)
        repeats = compares and second is not None and not trusted.outputs
        try:
            output = private(first())  # the result may be a buffer of the step
        except Exception as error:
            raise StepError(at, error) from error
        try:
            other = second() if repeats and second is not None else output
        except Exception:
            compares = repeats = False
        if states is not None and states.moved() and not trusted.draws:
            return output, Found(at, DREW)
        equal = same(output, other) if repeats else True
        if equal is False:
            return output, Found(at, DIFFERS)
        if equal is None and states is not None:
            why = f"its outputs, of type {type(output).__name__}, cannot be compared"
            return output, Found(at, why, certain=False)
        other = private(other) if compares else None
    return output, None


def earliest(*found: Found | None) -> Found | None:
    """Return the finding of the first step; a certain one if there are several of it."""
    return min(filter(None, found), key=lambda one: (one.at, not one.certain), default=None)


def spread(length: int, count: int) -> list[int]:
    """Return up to `count` ids spread over a data set: the first, the last, and some between, always the same."""
    edges = [1 + place * (length - 2) // (count - 2) for place in range(count - 1)]
    between = [low + sample_seed(0, 0, low) % (high - low) for low, high in pairwise(edges) if low < high]
    return list(dict.fromkeys([0, length - 1, *between]))


# --- the split -------------------------------------------------------------------------------------------------------


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
    unknown = [at for at, step in enumerate(steps[:count]) if known(step) is None]
    first_random = Found(unknown[0], "there is no sample to try it on", certain=False) if unknown else None
    if probe is not None:
        first_random = call_in_child(lambda: _trial(steps[:count], probe), "the trial of the transform")
    warn_of_doubt(steps, first_random)
    return divide(steps, first_random)


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
        at = next((at for at in range(problem.at, len(steps)) if known(steps[at]) is None), None)
        who = "it" if at == problem.at else "a step before it"
        differs = None if at is None else Found(at, f"{who} raised {described(problem.error)}", certain=False)
    return earliest(found, differs)


def divide(steps: Sequence[Transform], found: Found | None) -> Split:
    """Return the split of `steps`, of which `found` is the first random one that no mark or library declares."""
    count = declared(steps) if found is None else found.at
    verdicts: list[Verdict] = []
    parts: list[Transform] = []
    end = count
    for at, step in enumerate(steps):
        sign = known(step)
        if found is not None and at == count:
            if found.certain and sign is not None:
                compose.note_drew(step)  # its library declares it deterministic
            sign = True, "undecided" if not found.certain else "probe" if sign is None else "seen"
        halves = compose.halves_of(step) if at == count else None
        if halves is not None:
            verdicts += (Verdict(describe_step(half), half is halves[1], "halves") for half in halves)
            end = count + 1
        else:
            sign = sign or ((True, "after") if at > count else (False, "probe"))
            verdicts.append(Verdict(describe_step(step), *sign))
        parts += halves or (step,)
    return Split(Compose(parts[:end]), Compose(parts[end:]), tuple(verdicts))


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
