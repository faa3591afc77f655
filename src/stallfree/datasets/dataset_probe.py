"""What a data set and its pipeline are like, found out on one of the first samples before anything is cached."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import ConcatDataset

from stallfree.batches.batch_state import raise_from
from stallfree.batches.sample_access import plain_beneath, untouched
from stallfree.cache.memory.layout import plan_layout
from stallfree.errors import CapacityError, CodecError, InputError, SampleError, dataset_random, text_of
from stallfree.frames import users_level
from stallfree.pipeline.classify.determinism import Split, split
from stallfree.pipeline.classify.libraries import may_draw
from stallfree.pipeline.classify.probe import run_step, try_calls
from stallfree.pipeline.classify.scan import scan
from stallfree.pipeline.classify.watch import Watch, find_draw
from stallfree.pipeline.codec import encode, record_size
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.marks import drew, mark_of, note_drew
from stallfree.pipeline.protocol import Source, sample_error
from stallfree.pipeline.values import private
from stallfree.sources.mapped import MapSource
from stallfree.units import format_size

ATTEMPTS = 4
"""Samples that are tried in turn when the first cannot be read."""

_PARTS = 16
"""Parts of a `ConcatDataset` of which one sample each is tried."""


@dataclass(frozen=True)
class FirstLook:
    """One sample, and how the pipeline splits.

    Attributes:
        id: of the sample.
        record: as it was fetched.
        prepared: what the deterministic part made of it.
        parts: of the pipeline.
    """

    id: int
    record: Any
    prepared: Any
    parts: Split


def look(source: Source, steps: Compose) -> FirstLook:
    """Fetch and prepare the first sample that can be had.

    A plain data set is read once more, to see whether its samples stay the same; that reading does not pass a
    `ThrottledSource`. Raises `SampleError` when none of the first samples can be had, `InputError` for a plain data
    set with random samples.
    """
    problems: list[SampleError] = []
    for id in range(min(ATTEMPTS, len(source))):
        with warnings.catch_warnings(record=True) as caught, untouched(source):
            warnings.simplefilter("always")
            try:
                found = _look_at(source, steps, id)
            except SampleError as error:
                problems.append(error)
                continue
        for warning in caught:
            warnings.warn(warning.message, stacklevel=users_level())
        return found
    raise problems[0]


def _look_at(source: Source, steps: Compose, id: int) -> FirstLook:
    record = private(_read(source, id))
    try:
        while True:
            parts = split(steps, probe=record)
            with Watch(parts.deterministic) as watch:
                prepared = parts.deterministic(private(record))
                moved = watch.moved()
            ignored = list(map(may_draw, parts.deterministic))
            place = find_draw(parts.deterministic, private(record), ignored) if moved else None
            if place is None or not note_drew(parts.deterministic.transforms[place]):
                break  # of a library whose base classes say that it is deterministic
        tried = len(parts.deterministic)
        if tried < len(parts.verdicts) and parts.verdicts[tried].reason == "undecided":
            run_step(parts.random.transforms[0], prepared)  # raises what the trial met, if it met anything
    except Exception as error:
        raise_from(sample_error(error, source, id, "preparing"), error)
    return FirstLook(id, record, prepared, parts)


def _read(source: Source, id: int) -> Any:
    beneath = plain_beneath(source, id)
    if beneath is not None:
        mark = mark_of(beneath[0].dataset)
        if mark:
            raise dataset_random(f"{_name(beneath[0])} is marked as random; {_FREEZE}")
        if mark is None and drew(beneath[0].dataset):
            raise _refused(beneath[0], "it drew random numbers while a cache was filled", certain=True)
        if mark is None:
            return _read_watched(source, id, *beneath)
    try:
        return source.fetch(id)
    except Exception as error:
        raise_from(sample_error(error, source, id, "fetching"), error)


_FREEZE = (
    "a cache would freeze its augmentation. Give form='reads', which caches the files that it reads, not the result; "
    "or make the data set without its random transforms and give them as CachedDataset(..., transform=...); or give "
    "stallfree.cut(dataset, 'transform') if an attribute holds them"
)
_INSIST = "if its samples are always the same, say so with stallfree.mark_deterministic(dataset)"


def _read_watched(source: Source, id: int, plain: MapSource, inner: int) -> Any:
    """The record of `id`, after a look at whether the data set gives random samples. Reads the sample twice."""
    dataset = plain.dataset
    code = scan(dataset)
    if code.finding is not None:
        raise _refused(plain, f"its code uses {code.finding.what}", certain=code.finding.certain)

    calls = (lambda: private(source.fetch(id)), lambda: private(plain.fetch(inner)))
    trial = try_calls(dataset, calls, code.read)
    if trial.random is not False:
        raise _refused(plain, f"when sample {id} was read, {trial.why}", certain=trial.random is True)
    for other in _other_parts(dataset):
        with suppress(SampleError), Watch(dataset) as watch:
            plain.fetch(other)
            if watch.moved():
                raise _refused(plain, f"when sample {other} was read, it drew random numbers", certain=True)
    return trial.output


def reason_in(error: InputError) -> str:
    """Why samples are random, without advice, if that is what an error of `look` says; else ""."""
    why, found, _ = text_of(error).partition(f"; {_FREEZE}")
    return why if found else ""


def _refused(plain: MapSource, why: str, *, certain: bool) -> InputError:
    what = "gives random samples" if certain else "may give random samples"
    return dataset_random(f"{_name(plain)} {what}: {why}; {_FREEZE}; or, {_INSIST}")


def _other_parts(dataset: Any) -> Iterator[int]:
    """The first ids of the parts of a `ConcatDataset` but the first: others may be augmented where that one is not."""
    if isinstance(dataset, ConcatDataset):
        yield from dataset.cumulative_sizes[: min(_PARTS, len(dataset.datasets)) - 1]


def _name(plain: MapSource) -> str:
    return type(plain.dataset).__name__


def choose_form(
    form: str | float, first: FirstLook, samples: int, capacity: int, *, scored: bool, on_disk: bool
) -> tuple[str | float, str]:
    """The form to cache, "fetched" or "prepared" or the share to cache prepared, and the line that explains it."""
    if isinstance(form, (int, float)):
        if 0 < form < 1 and len(first.parts.deterministic):
            return float(form), f"caching {form:.0%} of the samples prepared and the others as fetched, as asked"
        form = "prepared" if form == 1 else "fetched"
    if form != "auto":
        return form, f"caching samples as {form}, as asked"
    if len(first.parts.deterministic) == 0:
        return "fetched", "caching samples as fetched: no deterministic step comes first"
    fetched = _room(first.record, samples, capacity, scored, on_disk)
    prepared = _room(first.prepared, samples, capacity, scored, on_disk)
    if prepared is None or fetched is None:
        chosen, other = ("fetched", "prepared") if prepared is None else ("prepared", "fetched")
        return chosen, f"caching samples as {chosen}: {other} they cannot be stored"
    chosen = "prepared" if prepared[1] or prepared[0] <= fetched[0] else "fetched"
    return chosen, (
        f"caching samples as {chosen}: prepared they take about {format_size(prepared[0])} "
        f"({'all fit' if prepared[1] else 'not all fit'}), as fetched {format_size(fetched[0])} "
        f"({'all fit' if fetched[1] else 'not all fit'}), and there are {format_size(capacity)}"
    )


@dataclass(frozen=True)
class Sample:
    """A sample that was read to learn how samples are stored.

    Attributes:
        id: of the sample.
        record: as it was fetched.
        value: what the cache is to hold.
    """

    id: int
    record: Any
    value: Any


def look_again(source: Source, before: Compose, first: Sample) -> tuple[Sample | None, Any]:
    """Another sample, if there is one, and an example for the layout of a new cache.

    One sample does not show whether all have its size, so the last one is read too, unless the first one's size is
    variable by its nature, as that of encoded pictures is.
    """
    id = len(source) - 1
    with suppress(CodecError, RecursionError):
        structure, arrays = encode(first.value, allow_pickle=True)
        if id == first.id or not (structure.fixed and structure.has_views):
            return None, first.value
        with suppress(Exception), untouched(source):  # it will come again when the sample is asked for
            with Watch(before, source) as watch:
                record = private(source.fetch(id))
                second = Sample(id, record, before(private(record)))
                if watch.moved() or watch.made():
                    return None, first.value  # it will be found out what draws when the sample is asked for
            other, other_arrays = encode(second.value, allow_pickle=True)
            if other is structure:
                return second, first.value
            size = max(record_size(structure, arrays), record_size(other, other_arrays))
            return second, bytes(size)  # of no fixed size
    return None, first.value


def example_of_both(first: FirstLook) -> Any:
    """An example for the layout of a cache that holds both forms: of no fixed size, as long as the shorter."""
    sizes = [record_size(*encode(value, allow_pickle=True)) for value in (first.record, first.prepared)]
    return bytes(min(sizes))


def _room(value: Any, samples: int, capacity: int, scored: bool, on_disk: bool) -> tuple[int, bool] | None:
    """Bytes that all samples take if they are like `value`, and whether all fit; None if it cannot be stored."""
    try:
        structure, arrays = encode(value, allow_pickle=True)
    except (CodecError, RecursionError):
        return None
    size = record_size(structure, arrays)
    layout = {"fingerprint": "", "policy": "", "scored": scored, "on_disk": on_disk}
    try:
        meta = plan_layout(samples, capacity, structure=structure, typical=size, **layout)  # type: ignore[arg-type]
    except CapacityError:
        return samples * size, False
    blocks = 1 if meta.common else -(-size // meta.block)
    return samples * size, samples * blocks <= (1.0 if meta.common else 0.98) * meta.num_blocks
