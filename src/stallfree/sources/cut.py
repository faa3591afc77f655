"""`cut` and `cut_any`: a child process makes eight samples with and without the cut, and compares them bit for bit."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from stallfree.errors import InputError, cut_attribute, cut_random, cut_refused, text_of
from stallfree.ipc.process import call_in_child
from stallfree.pipeline.classify import Trust, make_twice, spread
from stallfree.pipeline.compose import Compose, Source, Transform, mark_of
from stallfree.pipeline.fingerprint import same
from stallfree.pipeline.objects import VALUES, attribute, comes_from, random_name
from stallfree.pipeline.randomness import Randomness, States
from stallfree.raising import described, short_traceback
from stallfree.sources import mapped
from stallfree.sources.cut_source import RETURN_IT, CutSource, FlatPlan, Recorder, Unpacked

_SAMPLES = 8
"""Samples that are compared, spread over the data set."""

_TRIES = 6
"""Combinations of attributes that `cut_any` tries."""

_LAST = r"[^.]*(\.\d+)?$"
_TRANSFORM = re.compile(f"(transform|aug|norm|process|crop|resize|tensor){_LAST}", re.IGNORECASE)
_READER = re.compile(f"(load|open|read|decode|fetch|collate|callback){_LAST}", re.IGNORECASE)
"""Names of attributes that are likely to hold a transform, and of those that hold none."""

_MOST_ITEMS = 256
"""Lists and dicts of more items are searched for transforms only if they hold data sets."""

_LIBRARIES = ("torchvision.datasets", "datasets.")
"""Their data sets are cut without being asked for."""

_Cut = tuple[list[str], Unpacked, FlatPlan | None]
"""The arguments of a `CutSource` after the data set."""


@short_traceback
def cut(dataset: Any, *attributes: str, check: Sequence[int] = ()) -> CutSource:
    """Split a data set at the attributes that hold its transform.

    What comes before the transform can then be cached.

    The result is a source. Its `fetch(id)` is `dataset[id]` without the transform: the decoded image, the label. Its
    `pipeline` is the transform. A `CachedDataset` of it caches decoded images, or what the deterministic steps of the
    transform make of them, and runs the random steps in each epoch.

    To find out what the transform is called with, a copy of the data set has an object in its place that notes each
    call. `dataset` itself is not changed. A transform may be called several times and with several arguments, its
    output may be unpacked, an item of it taken, or be passed to another of `attributes`. Anything else that
    `__getitem__` does with the output needs the output itself, and is refused.

    The first and the last sample and six others are made with and without `cut` from equal states of the random
    generators, in a child process, and must be equal bit for bit.

    Args:
        dataset: a map-style data set.
        attributes: names of attributes that hold a transform, such as `"transform"` and `"target_transform"`. A name
            may be dotted: `"inner.transform"`, `"datasets.0.transform"`.
        check: ids of further samples to compare.

    Returns:
        A source for `DataLoader` and `CachedDataset`. Its samples are those of `dataset`.

    Raises:
        InputError: an attribute does not exist or holds no transform; `__getitem__` uses the output of a transform,
            draws random numbers itself, or makes another sample if the transform runs later.
        Exception: the error of a sample, if none can be read.

    Example:
        ```python
        data = sf.cut(images, "transform")  # whose `__getitem__` opens, decodes and transforms
        image, label = data.fetch(0)  # without the transform
        cached = sf.CachedDataset(data, capacity="8MiB")
        ```
    """
    source = mapped.as_source(dataset, divide=False)
    if not isinstance(source, mapped.MapSource):
        raise cut_attribute(
            f"{type(dataset).__name__} has its transform apart already: give it to a loader or a CachedDataset as it is"
        )
    if not attributes:
        raise cut_attribute("cut got no attribute: name the one that holds the transform: cut(dataset, 'transform')")
    ids = [mapped.normalize_id(id, len(source)) for id in check]
    call = partial(_Check(dataset, ids), attributes)
    return CutSource(dataset, *call_in_child(call, f"the cut of {type(dataset).__name__}"))


# --- any data set ---------------------------------------------------------------------------------------------------


def cut_any(dataset: Any, run: Callable[..., Any] | None = None) -> tuple[Source | None, str]:
    """Cut a data set at the transforms among its attributes; return it and its words, or None and the reason.

    The attributes of nested data sets count too. Those whose names suggest a transform are tried together, then with
    all others that can be called, then one by one.

    Args:
        dataset: the data set.
        run: gets a call, which it makes in a child process and whose result it returns, and a function that makes the
            cut source from this result, there too.
    """
    names = tuple(name for name in _callables(dataset) if not _READER.search(name))
    likely = tuple(name for name in names if _TRANSFORM.search(name))
    tries = [each for each in dict.fromkeys([likely, names, *zip((*likely, *names))]) if each][:_TRIES]
    if not tries:
        return None, f"no attribute of {type(dataset).__name__} holds a transform"

    def build(arguments: _Cut) -> CutSource:
        return CutSource(dataset, *arguments)

    try:
        call, what = partial(_try, dataset, tries), f"the cut of {type(dataset).__name__}"
        source = build(call_in_child(call, what) if run is None else run(call, build))
    except Exception as error:
        return None, text_of(error) if isinstance(error, InputError) else described(error)
    return source, source.words


def as_cut_source(dataset: Any) -> Source:
    """Return a data set as a source; one of torchvision or Hugging Face is cut at its transforms, if possible."""
    source, inner = mapped.as_source(dataset), dataset
    while type(inner).__name__ == "Subset":
        inner = inner.dataset
    reads = str(getattr(getattr(type(inner), "__getitem__", None), "__module__", ""))
    if isinstance(source, mapped.MapSource) and reads.startswith(_LIBRARIES) and mark_of(inner) is None:
        return cut_any(dataset)[0] or source
    return source


def _try(dataset: Any, tries: Sequence[Sequence[str]]) -> _Cut:
    """Return how the data set is cut at the first of `tries` that can be; the error is that of the first one."""
    errors = []
    for names in tries:
        try:
            return _Check(dataset)(names, leave_out=True)
        except InputError as error:
            errors.append(error)
    raise errors[0]


def _callables(holder: Any, prefix: str = "", depth: int = 4) -> Iterator[str]:
    """Yield what can be called in the attributes of a data set, and of the data sets, lists and dicts in them."""
    if isinstance(holder, (list, tuple)):
        holder = dict(enumerate(holder))
    for name, value in (holder if isinstance(holder, dict) else attribute(holder, "__dict__") or {}).items():
        joint = type(value).__name__ == "StandardTransform" and comes_from(type(value), "torchvision.datasets")
        if callable(value) and not isinstance(value, type) and not joint:  # a composition may have a length and items
            yield f"{prefix}{name}"
        elif depth and (joint or _may_hold_transforms(value)):
            yield from _callables(value, f"{prefix}{name}.", depth - 1)


def _may_hold_transforms(value: Any) -> bool:
    """Return whether it is a data set, a list of them, or a short list or dict that does not begin with plain data."""
    if isinstance(value, (list, tuple, dict)):
        first = next(iter(value.values() if isinstance(value, dict) else value), None)
        short = len(value) <= _MOST_ITEMS and not isinstance(first, VALUES)
        return short or (not isinstance(first, (list, tuple, dict)) and _may_hold_transforms(first))
    return hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__") and hasattr(value, "__dict__")


# --- comparing, in a child process ----------------------------------------------------------------------------------


class _Check:
    """Compares samples that a data set makes itself with those that are made of its records.

    Args:
        dataset: the data set.
        ids: of further samples.
    """

    def __init__(self, dataset: Any, ids: Sequence[int] = ()) -> None:
        self._dataset, self._kind = dataset, type(dataset).__name__
        self._ids = list(dict.fromkeys([*spread(len(dataset), _SAMPLES), *ids]))

    def __call__(self, names: Sequence[str], *, leave_out: bool = False) -> _Cut:
        """Return how the data set is cut at `names`; with `leave_out`, at those that are called.

        Raises `InputError` if it cannot be cut, and the error of the first sample if all fail.
        """
        self._what = f"{self._kind} cannot be cut at {' and '.join(map(repr, names))}"
        transforms = [self._transform_at(name) for name in names]
        with Randomness(Compose(transforms), [self._dataset, *transforms]) as self._randomness:
            self._samples = dict(mapped.samples_of(self._dataset, self._ids, self._make))
            try:
                source = CutSource(self._dataset, names)
            except Exception as error:
                raise cut_refused(f"{self._what}: make the transform a plain attribute ({described(error)})") from error
            plans, called = self._record(Recorder(source, learns=True))
            if leave_out:  # the transform of another attribute may be one that is called
                used = [transforms[at] for at in called]
                called = {at for at, one in enumerate(transforms) if any(mapped.is_same(one, by) for by in used)}
            idle = [name for at, name in enumerate(names) if at not in called]
            if idle and called and leave_out:
                return self([names[at] for at in sorted(called)], leave_out=True)
            if idle:
                raise cut_refused(
                    f"{self._kind} does not call its {idle[0]} for any of the samples {[*self._samples]}: leave it "
                    "out, or name one with check=[id]. A data set that keeps its samples cannot be cut"
                )
            self._require_steady(source)
            for plan in [plans[0], None] if plans[0] and plans.count(plans[0]) == len(plans) else [None]:
                why = self._difference(CutSource(self._dataset, names, source.unpacked, plan))
                if not why:
                    return list(names), source.unpacked, plan
            raise cut_refused(f"{self._what}: {why}")

    def _transform_at(self, name: str) -> Transform:
        with suppress(AttributeError, LookupError, ValueError):
            transform: Transform = mapped.value_at(self._dataset, name)
            if callable(transform):
                return transform
        raise cut_attribute(
            f"{self._kind} has no attribute {name!r} that can be called: name one that holds a transform, such as "
            f"{', '.join(sorted(_callables(self._dataset))) or 'self.transform'}"
        )

    def _make(self, id: int) -> Any:
        self._randomness.seed(0, 0, id)
        return self._dataset[id]

    def _record(self, recorder: Recorder) -> tuple[list[FlatPlan | None], set[int]]:
        """Return the plan of each sample if it is flat, and which transforms are called.

        Raises `InputError` if a sample needs the outputs themselves.
        """
        plans, called = [], set[int]()
        for id in self._samples:
            self._randomness.seed(0, 0, id)
            try:
                sample = recorder.make(id)
                recorder.planned(sample)
            except InputError:
                raise
            except Exception as error:
                raise cut_refused(
                    f"{self._what}: sample {id} cannot be made without the output of the transform "
                    f"({described(error)}): {RETURN_IT}"
                ) from error
            called |= {call.number for call in recorder.calls}
            plans.append((recorder.flat(sample) or [None])[0])
        return plans, called

    def _require_steady(self, source: CutSource) -> None:
        """Raise `InputError` if what is read depends on chance."""
        if mark_of(self._dataset) is False:
            return
        states, name = States(), random_name(source.without)
        why = f"its code names {name}" if name else ""
        for id in self._samples:
            fetch = partial(source.fetch, id)
            _, random = make_twice(fetch, fetch, (), [Trust()], states)
            if random is not None:
                why = f"when sample {id} was read, {random.why}"
                break
        if why:
            raise cut_random(
                f"{self._what}: outside of the transform it draws random numbers or may give something else each "
                f"time, which a cache would freeze: {why}. Make all random changes in the transform; or, if what is "
                "read is always the same, say so with stallfree.mark_deterministic(dataset)"
            )

    def _difference(self, source: CutSource) -> str:
        """Return which sample is another one if it is made of its record, and why; "" if all are equal."""
        for id, sample in self._samples.items():
            self._randomness.seed(0, 0, id)
            try:
                equal = same(sample, source.pipeline(source.fetch(id)))
            except Exception as error:
                why = f"the transform fails if it runs afterwards ({described(error)})"
                return f"sample {id} differs: {why}: call it with values that stay as they are"
            if equal is None:
                return (
                    f"sample {id} of type {type(sample).__name__} cannot be compared: return tensors, arrays, numbers"
                )
            if not equal and same(sample, self._make(id)):
                why = "if the transform runs after the rest of __getitem__"
                return f"sample {id} differs {why}: call it with what it needs, and return its output as it is"
            if not equal:
                why = "each time, also from equal states of all generators"
                return (
                    f"sample {id} differs {why}: let the transform draw from a global generator, or one that it keeps"
                )
        return ""
