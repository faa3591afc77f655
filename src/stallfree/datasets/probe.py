"""The first look at a data set and its pipeline: some samples, made twice in a child process."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stallfree.cache.layout import plan_layout
from stallfree.datasets.reader import plain_beneath
from stallfree.errors import CapacityError, CodecError, StallfreeError, dataset_random, text_of
from stallfree.ipc.process import call_in_child
from stallfree.pipeline import classify
from stallfree.pipeline.classify import SOURCE, Found, Split, StepError, Trust
from stallfree.pipeline.codec import encode, read_record, record_of, record_size
from stallfree.pipeline.compose import Compose, Source, Transform, drew, mark_of
from stallfree.pipeline.objects import random_name
from stallfree.pipeline.randomness import States, find_generators
from stallfree.pipeline.values import private
from stallfree.raising import note_sample
from stallfree.sources.mapped import MapSource
from stallfree.units import format_size

LOOKS = 8
"""Samples of the first look, spread over the data set."""

_LEAST, _SECONDS = 2, 1.0
"""After `_LEAST` samples a look ends when it took so long."""


@dataclass(frozen=True)
class Sample:
    """A sample of the first look.

    Attributes:
        id: of the sample.
        record: as it was fetched. A `CodecError` in its place, or in that of `prepared`, says why it cannot be stored.
        prepared: the output of the deterministic steps.
    """

    id: int
    record: Any
    prepared: Any

    def __reduce__(self) -> Any:
        values = [self.record] if self.prepared is self.record else [self.record, self.prepared]
        return _sample_of, (self.id, [*map(_packed, values)])


def _packed(value: Any) -> Any:
    """Return the record of a value, or the `CodecError` that says why it cannot be stored."""
    try:
        return record_of(*encode(value, allow_pickle=True))
    except CodecError as error:
        return error


def _sample_of(id: int, packed: list[Any]) -> Sample:
    values = [*map(_unpacked, packed)]
    return Sample(id, values[0], values[-1])


def _unpacked(record: Any) -> Any:
    try:
        return record if isinstance(record, CodecError) else read_record(record, copy=False, allow_pickle=True)
    except CodecError as error:
        return error


@dataclass(frozen=True)
class FirstLook:
    """Some samples, and how the pipeline splits.

    Attributes:
        samples: samples spread over the data set; at least one. The first stands for all.
        parts: of the pipeline.
    """

    samples: list[Sample]
    parts: Split

    def values(self, *, prepared: bool) -> dict[int, Any]:
        """Return the cached values by id, of samples that can be stored, in this form.

        Raises `CodecError` if the first one cannot be stored.
        """
        values = {sample.id: sample.prepared if prepared else sample.record for sample in self.samples}
        if isinstance(first := values[self.samples[0].id], CodecError):
            raise first
        return {id: value for id, value in values.items() if not isinstance(value, CodecError)}


def look(source: Source, steps: Compose, run: Callable[..., Any] = call_in_child) -> FirstLook:
    """Make some samples spread over a data set twice, to see which part of the pipeline may be cached.

    This happens in a child process, so that what the data set opens is not shared with processes forked later. A plain
    data set is also fetched twice. Raises the error of the first of these samples if all fail, `InputError` for a data
    set with random samples.

    Args:
        source: the data set.
        steps: applied to its records.
        run: returns the result of a call, made in such a process; gets the call, and what it does.
    """
    plain = plain_beneath(source)
    origin = source if plain is None else plain.dataset
    if mark_of(origin):
        raise dataset_random(f"{type(origin).__name__} is marked as random; {_FREEZE}")
    if mark_of(origin) is None and drew(origin):
        raise _refused(origin, "its samples proved random while a cache was filled", certain=True)
    call = partial(_look, source, plain, tuple(steps))
    random_part, samples = run(call, f"the first look at {type(origin).__name__}")
    if random_part is not None and random_part.at == SOURCE:
        raise _refused(origin, random_part.why, certain=random_part.certain)
    classify.warn_of_doubt(steps.transforms, random_part)
    return FirstLook(samples, classify.divide(tuple(steps), random_part))


def _look(source: Source, plain: MapSource | None, steps: Sequence[Transform]) -> tuple[Found | None, list[Sample]]:
    """Return what is random, and the samples, in a child process. Raises the first error if all fail."""
    origin = source if plain is None else plain.dataset
    checked = steps[: classify.declared(steps)]
    trust = [*map(Trust.of, (origin, *checked))]
    random_part = classify.named(checked)
    if plain is not None and not trust[0].outputs and (names := random_name(origin)):
        random_part = Found(SOURCE, f"its code names {names}", certain=False)
    states = States(find_generators([*checked, origin]))
    records: dict[int, Any] = {}
    problem, began = None, time.monotonic()
    for id in classify.spread(len(source), LOOKS):
        if len(records) >= _LEAST and time.monotonic() - began > _SECONDS:
            break
        fetch, again = partial(_fetch, source, id, records), None if plain is None else partial(source.fetch, id)
        before = checked if random_part is None else checked[: random_part.at + (not random_part.certain)]
        try:
            _, differs = classify.make_twice(fetch, again, before, trust, states)
        except StepError as failed:
            records.pop(id, None)
            if problem is None:
                problem = failed.error
                note_sample(problem, source, id, "fetching" if failed.at == SOURCE else "preparing")
            continue
        if differs is not None and differs.at == SOURCE:
            differs = replace(differs, why=f"{differs.why} at sample {id}")
        random_part = classify.earliest(random_part, differs)
        if random_part is not None and random_part.at == SOURCE and random_part.certain:
            break
    if problem is not None and not records:
        raise problem
    if random_part is not None and random_part.at == SOURCE:
        return random_part, []
    prepare = classify.divide(steps, random_part).deterministic
    return random_part, [
        Sample(id, record, private(prepare(private(record))) if len(prepare) else record)
        for id, record in records.items()
    ]


def _fetch(source: Source, id: int, records: dict[int, Any]) -> Any:
    records[id] = private(source.fetch(id))
    return records[id]


_FREEZE = (
    "a cache would freeze its augmentation. Give form='files', which caches the files that it opens, not the result; "
    "or make the data set without its random transforms and give them as CachedDataset(..., transform=...); or give "
    "stallfree.cut(dataset, 'transform') if an attribute holds them"
)
_INSIST = "if its samples are always the same, say so with stallfree.mark_deterministic(dataset)"


def reason_in(error: StallfreeError) -> str:
    """Why samples are random, without advice, if that is what an error of `look` says; else ""."""
    why, advice, _ = text_of(error).partition(f"; {_FREEZE}")
    return why if advice else ""


def _refused(origin: object, why: str, *, certain: bool) -> StallfreeError:
    gives = "gives" if certain else "may give"
    return dataset_random(f"{type(origin).__name__} {gives} random samples: {why}; {_FREEZE}; or, {_INSIST}")


def choose_form(
    form: str, first: FirstLook, samples: int, capacity: int, *, scored: bool, on_disk: bool
) -> tuple[str, str]:
    """Return the form to cache, "fetched" or "prepared", and the line that explains it."""
    if form != "auto":
        return form, f"caching samples as {form}, as asked"
    if len(first.parts.deterministic) == 0:
        return "fetched", "caching samples as fetched: no deterministic step comes first"
    fetched = _room(first.samples[0].record, samples, capacity, scored, on_disk)
    prepared = _room(first.samples[0].prepared, samples, capacity, scored, on_disk)
    if prepared is None or fetched is None:
        chosen, other = ("fetched", "prepared") if prepared is None else ("prepared", "fetched")
        return chosen, f"caching samples as {chosen}: {other} they cannot be stored"
    chosen = "prepared" if prepared[1] or prepared[0] <= fetched[0] else "fetched"
    return chosen, (
        f"caching samples as {chosen}: prepared they take about {format_size(prepared[0])} "
        f"({'all fit' if prepared[1] else 'not all fit'}), as fetched {format_size(fetched[0])} "
        f"({'all fit' if fetched[1] else 'not all fit'}), and there are {format_size(capacity)}"
    )


def example_for(values: Sequence[Any]) -> Any:
    """Return an example for the layout of a cache of samples like `values`.

    If their sizes differ, it is bytes as long as the longest record; so they are for encoded pictures, whose size
    varies by its nature.
    """
    with suppress(CodecError):
        structure, _ = encode(values[0], allow_pickle=True)
        if structure.fixed and structure.has_views:
            forms = [encode(value, allow_pickle=True) for value in values]
            if any(other is not structure for other, _ in forms):
                return bytes(max(record_size(*form) for form in forms))
    return values[0]


def _room(value: Any, samples: int, capacity: int, scored: bool, on_disk: bool) -> tuple[int, bool] | None:
    """Bytes that all samples take if they are like `value`, and whether all fit; None if it cannot be stored."""
    if isinstance(value, CodecError):
        return None
    try:
        structure, arrays = encode(value, allow_pickle=True)
    except CodecError:
        return None
    size = record_size(structure, arrays)
    layout = {"fingerprint": "", "policy": "", "scored": scored, "on_disk": on_disk}
    try:
        meta = plan_layout(samples, capacity, structure=structure, typical=size, **layout)  # type: ignore[arg-type]
    except CapacityError:
        return samples * size, False
    blocks = 1 if meta.common else -(-size // meta.block)
    return samples * size, samples * blocks <= (1.0 if meta.common else 0.98) * meta.num_blocks
