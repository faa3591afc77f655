"""`cut`: a data set as the source of what it calls its transforms with, and the transforms as steps.

The transforms of a shallow copy are replaced by stand-ins (outputs.py). What these are called with is the record, and
where their outputs stand in the sample is the plan. A record has one of two forms:

- Flat: the sample with the argument of each transform in the place of its output. That is possible if each transform
  is called with one argument and its output stands in the sample as it is. The transforms are then steps on these
  places, and each of their steps is classified by itself.
- Planned: `{plan: (sample, calls)}`, with None in the place of each output. One step calls all transforms. The plan is a
  text, so it belongs to the structure of the record.

Nothing of this runs in the training process: a child process makes eight samples with and without the cut.
"""

from __future__ import annotations

import copy
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import MethodType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.utils import _pytree as pytree

from stallfree.errors import InputError, cut_attribute, cut_random, cut_refused, dataset_changed, text_of
from stallfree.ipc.forked import call_in_child
from stallfree.notes import note_sample
from stallfree.pipeline._objects import attribute, comes_from
from stallfree.pipeline.classify.libraries import known
from stallfree.pipeline.classify.names import random_name
from stallfree.pipeline.classify.outcomes import States, Trust, make_twice, spread
from stallfree.pipeline.classify.same import same
from stallfree.pipeline.compose import Compose, OnItem, Transform, flatten, is_albumentations, with_item
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.pipeline.marks import mark_deterministic, mark_of, mark_random
from stallfree.pipeline.protocol import Source
from stallfree.pipeline.randomness import Randomness
from stallfree.pipeline.values import private
from stallfree.sources.base import BaseSource, normalize_id, require_samples
from stallfree.sources.mapped import is_source, require_map_style
from stallfree.sources.outputs import Output, Recorder, StandIn, refuse

_SAMPLES = 8
"""Samples that are compared, spread over the data set."""

_FORMAT = 2
_TRIES = 6
"""Combinations of attributes that `cut_any` tries."""

_TRANSFORM = re.compile("transform|aug|norm|process|crop|resize|tensor", re.IGNORECASE)
_READER = re.compile("load|open|read|decode|fetch|collate|callback", re.IGNORECASE)


# --- plans ----------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How a sample follows from the calls of transforms.

    Attributes:
        calls: the number of the transform of each call.
        holes: for each output in `(sample, calls)`: the leaf that it belongs to, the number of its call, and the parts.
    """

    calls: list[int]
    holes: list[tuple[int, int, list[Any]]]


@lru_cache(1024)
def _plan_of(text: str) -> Plan:
    calls, holes = json.loads(text)
    return Plan(calls, [tuple(hole) for hole in holes])


def _planned(sample: Any, recorder: Recorder) -> tuple[Plan, Any]:
    """Return the plan of a recorded sample, and `(sample, [(args, kwargs), ...])` with None in place of each output."""
    order = {id(call): number for number, call in enumerate(recorder.calls)}
    leaves, spec = pytree.tree_flatten((sample, [(call.args, call.kwargs) for call in recorder.calls]))
    holes = []
    for at, leaf in enumerate(leaves):
        if type(leaf) is Output:
            if id(leaf.call) not in order:
                raise cut_refused(
                    f"{recorder.dataset} cannot be cut at {recorder.names[leaf.call.number]!r}: sample {recorder.id} "
                    "has an output of the transform that was kept from another sample: let __getitem__ call the "
                    "transform for each sample"
                )
            holes.append((at, order[id(leaf.call)], list(leaf.parts)))
            leaves[at] = None
    return Plan([call.number for call in recorder.calls], holes), pytree.tree_unflatten(leaves, spec)


def _carried_out(plan: Plan, tree: Any, transforms: Sequence[Callable[..., Any]]) -> tuple[Any, list[Any]]:
    """Call the transforms as planned; return the sample and the output of each call."""
    leaves, spec = pytree.tree_flatten(tree)
    outputs: list[Any] = []
    starts = np.cumsum([len(pytree.tree_leaves(part)) for part in (tree[0], *tree[1])]).tolist()
    for call, number in enumerate(plan.calls):
        for at, earlier, parts in plan.holes:
            if starts[call] <= at < starts[call + 1]:
                leaves[at] = _part_of(outputs[earlier], parts)
        args, kwargs = pytree.tree_unflatten(leaves, spec)[1][call]
        outputs.append(transforms[number](*args, **kwargs))
    for at, call, parts in plan.holes:
        if at < starts[0]:
            leaves[at] = _part_of(outputs[call], parts)
    return pytree.tree_unflatten(leaves, spec)[0], outputs


def _part_of(output: Any, parts: Sequence[Any]) -> Any:
    """Return the part of an output that `parts` lead to. Raises `InputError` if it was unpacked to another length."""
    for part in parts:
        if isinstance(part, (list, tuple)):
            part, length = part
            if len(output) != length:
                raise cut_refused(
                    f"a transform returned {len(output)} values, and {length} when the data set was cut: let it return "
                    "equally many for each sample"
                )
        output = output[part]
    return output


class CallTransforms:
    """Calls the transforms of a data set as it did, and puts their outputs into the sample.

    It is random if one of them is known to be, and may be cached if that is known of all.
    """

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = tuple(transforms)
        signs = [known(transform) for transform in transforms]
        if any(sign is not None and sign[0] for sign in signs):
            mark_random(self)
        elif all(sign in ((False, "mark"), (False, "albumentations")) for sign in signs):
            mark_deterministic(self)

    def __call__(self, record: Mapping[str, Any]) -> Any:
        ((text, tree),) = record.items()
        return _carried_out(_plan_of(text), tree, self.transforms)[0]

    def __repr__(self) -> str:
        return f"CallTransforms({', '.join(map(repr, self.transforms))})"


class Place(NamedTuple):
    """Where the output of a chain of transforms stands in a sample: the keys, the calls, the name of the argument."""

    keys: list[Any]
    calls: list[int]
    argument: str | int


def _places(plan: Plan, tree: Any, transforms: Sequence[Transform]) -> list[Place] | None:
    """Return the places of the outputs in flat records; None if the transforms are no steps on places of the sample."""
    paths = [path for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    arguments: list[str | int] = []
    for number, (args, kwargs) in zip(plan.calls, tree[1], strict=True):
        by_name = is_albumentations(transforms[number])
        if (len(args), list(kwargs)) != ((0, ["image"]) if by_name else (1, [])):
            return None
        arguments.append("image" if by_name else 0)
    inputs: dict[Any, int] = {}
    places: list[Place] = []
    for at, call, parts in plan.holes:
        keys = [getattr(key, "idx", getattr(key, "key", None)) for key in paths[at]]
        if parts != (["image"] if arguments[call] == "image" else []) or None in keys:
            return None
        if keys[0] == 0:
            places.append(Place(keys[1:], [call], 0))
        elif len(keys) == 4:  # the whole argument of another call
            inputs[keys[1]] = call
        else:
            return None
    if sorted([*inputs.values(), *(place.calls[0] for place in places)]) != list(range(len(plan.calls))):
        return None
    for place in places:
        while place.calls[0] in inputs:
            place.calls.insert(0, inputs[place.calls[0]])
    return [place._replace(argument=arguments[place.calls[0]]) for place in places]


def _put(value: Any, keys: Sequence[Any], part: Any) -> Any:
    """Return a copy of `value` with `part` at `keys`."""
    return with_item(value, keys[0], _put(value[keys[0]], keys[1:], part)) if keys else part


# --- the source -----------------------------------------------------------------------------------------------------


class CutSource(BaseSource):
    """The records of a data set without its transforms, which are in `pipeline`. The samples are the same.

    Each thread of each process reads a copy of its own, so that files which the data set opens are never shared.
    `fetch` raises `InputError` when a transform of the data set has been replaced since: it would have no effect.

    Args:
        dataset: the data set.
        names: the dotted attributes that hold a transform.

    Attributes:
        dataset: as given.
        words: what was done, such as "cut at transform".
    """

    threads = False

    def __init__(self, dataset: Any, names: Sequence[str]) -> None:
        self.dataset, self.names = dataset, tuple(names)
        self._values = [value_at(dataset, name) for name in names]
        self._transforms: list[Transform] = []
        for value in self._values:
            if not any(_is_same(value, other) for other in self._transforms):
                self._transforms.append(value)
        self.words = f"cut at {' and '.join(self._first_names())}"
        self._without = with_values(dataset, dict.fromkeys(names))
        self._lengths: dict[str, int] = {}
        self._learns = False
        self._local = threading.local()
        self.plan: Plan | None = None
        self._flat: list[Place] | None = None
        self.pipeline = Compose([CallTransforms(self._transforms)])

    def recorded(self, id: int) -> tuple[Plan, Any, set[str]]:
        """Return the plan of sample `id`, the sample and calls without outputs, and the names that were called."""
        own = getattr(self._local, "own", None)
        if own is None or own[0] != os.getpid():
            recorder = Recorder(type(self.dataset).__name__, self._first_names(), self._length_of)
            numbers = [self.number_of(value) for value in self._values]
            values = {name: StandIn(recorder, number, name) for name, number in zip(self.names, numbers, strict=True)}
            own = self._local.own = os.getpid(), recorder, with_values(self._without, values)
        return *_planned(own[1].record(own[2], id), own[1]), own[1].called

    def number_of(self, value: Any) -> int:
        """Return the number of a transform."""
        return next(at for at, transform in enumerate(self._transforms) if _is_same(value, transform))

    def _first_names(self) -> list[str]:
        numbers = list(map(self.number_of, self._values))
        return [self.names[numbers.index(number)] for number in range(len(self._transforms))]

    def _length_of(self, output: Output) -> int:
        """Return the length of an output that is unpacked, as it was when the samples were compared."""
        key = f"{output.call.number} {output.parts}"
        if self._learns and key not in self._lengths:
            calls = output.recorder.calls
            at = next(at for at, call in enumerate(calls) if call is output.call)
            recorder = copy.copy(output.recorder)
            recorder.calls = calls[: at + 1]
            plan, tree = _planned(None, recorder)
            real = _part_of(_carried_out(plan, private(tree), self._transforms)[1][-1], output.parts)
            if not isinstance(real, (tuple, list, np.ndarray, torch.Tensor)):
                refuse(output, f"its output, of type {type(real).__name__}, was iterated over")
            self._lengths[key] = len(real)
        if key not in self._lengths:
            refuse(output, "its output was unpacked, as it was for no sample that was compared")
        return self._lengths[key]

    def make_flat(self, plan: Plan, places: list[Place]) -> None:
        """Make flat records from now on, of samples of this plan."""
        self.plan, self._flat = plan, places
        place_of = {call: place.keys for place in places for call in place.calls}
        steps: list[Transform] = []
        for call, number in enumerate(plan.calls):
            step: Transform = self._transforms[number]
            for key in reversed(place_of[call]):
                step = OnItem(key, step)
            steps += flatten(step)
        self.pipeline = Compose(steps)

    def __len__(self) -> int:
        return len(self.dataset)

    def _record(self, id: int) -> Any:
        for name, value in zip(self.names, self._values, strict=True):
            if not _is_same(value_at(self.dataset, name), value):
                raise dataset_changed(
                    f"the {name} of {type(self.dataset).__name__} was changed after the data set was given away: make "
                    "a new loader (and CachedDataset) with the data set as it is now"
                )
        plan, tree, _ = self.recorded(id)
        if self._flat is None:
            return {json.dumps(plan, separators=(",", ":")): tree}
        if plan != self.plan:
            raise cut_refused(
                f"for sample {id}, {type(self.dataset).__name__} calls its transforms in another way than for the "
                f"samples that cut has compared: name it there, as in cut(dataset, {self.names[0]!r}, check=[{id}])"
            )
        record = tree[0]
        for place in self._flat:
            args, kwargs = tree[1][place.calls[0]]
            record = _put(record, place.keys, kwargs["image"] if place.argument == "image" else args[0])
        return record

    def _where(self, id: int) -> str:
        return ""

    def fingerprint(self) -> str:
        """The fingerprint of the data set without its transforms, and the form of the records."""
        return f"CutSource {_FORMAT} {fingerprint(self._without, self.names, self.plan and json.dumps(self.plan))}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._local = threading.local()

    def __repr__(self) -> str:
        return f"CutSource({type(self.dataset).__name__}, {len(self)} samples)"


# --- copies with other values ---------------------------------------------------------------------------------------


def value_at(dataset: Any, name: str) -> Any:
    """Return the value of a dotted attribute such as `"inner.transform"` or `"datasets.0.transform"`.

    Raises `AttributeError` or `LookupError` if there is none.
    """
    for part in name.split("."):
        dataset = _get(dataset, part)
    return dataset


def with_values(dataset: Any, values: Mapping[str, Any]) -> Any:
    """Return a shallow copy of `dataset` with `values` at their dotted attributes. Objects on the way are copied too.

    Raises `AttributeError`, `LookupError` or `TypeError` if an attribute does not exist or cannot be set.
    """
    copies: dict[str, Any] = {"": copy.copy(dataset)}
    for name, value in values.items():
        above, (*path, last) = "", name.split(".")
        for part in path:
            here = f"{above}.{part}"
            if here not in copies:
                copies[here] = copy.copy(_get(copies[above], part))
                _set(copies[above], part, copies[here])
            above = here
        _set(copies[above], last, value)
    return copies[""]


def _get(thing: Any, part: str) -> Any:
    if isinstance(thing, (list, tuple)):
        return thing[_index(part)]
    return thing[part] if isinstance(thing, dict) else getattr(thing, part)


def _set(thing: Any, part: str, value: Any) -> None:
    if isinstance(thing, list):
        thing[_index(part)] = value
    elif isinstance(thing, dict):
        thing[part] = value
    else:
        try:
            setattr(thing, part, value)
        except AttributeError:  # of a frozen dataclass
            object.__setattr__(thing, part, value)


def _index(part: str) -> int:
    if not part.isdigit():
        raise LookupError(f"{part!r} is no position in a list")
    return int(part)


def _is_same(value: Any, other: Any) -> bool:
    """Return whether both are one object; each access to a bound method makes a new one."""
    return value is other or (isinstance(value, MethodType) and bool(value == other))


# --- comparing ------------------------------------------------------------------------------------------------------


class _Cut(NamedTuple):
    """What the child process returns of a data set that can be cut."""

    names: list[str]
    lengths: dict[str, int]
    plan: Plan | None
    places: list[Place] | None

    def source(self, dataset: Any) -> CutSource:
        source = CutSource(dataset, self.names)
        source._lengths = self.lengths
        if self.plan is not None and self.places is not None:
            source.make_flat(self.plan, self.places)
        return source


class _Check:
    """Compares samples that a data set makes itself with those that are made of its records, in a child process.

    Args:
        dataset: the data set.
        ids: of further samples.
    """

    def __init__(self, dataset: Any, ids: Sequence[int] = ()) -> None:
        self._dataset, self._kind = dataset, type(dataset).__name__
        self._ids = list(dict.fromkeys([*spread(len(dataset), _SAMPLES), *ids]))
        self._samples: dict[int, Any] = {}
        self._what = ""

    def __call__(self, names: Sequence[str], *, leave_out: bool = False) -> _Cut:
        """Return how the data set is cut at `names`; with `leave_out`, at those that are called.

        Raises `InputError` if it cannot be cut, and the error of the first sample if all fail.
        """
        self._what = f"{self._kind} cannot be cut at {' and '.join(map(repr, names))}"
        transforms = [_transform_at(self._dataset, name) for name in names]
        with Randomness(Compose(transforms), [self._dataset, *transforms]) as self._randomness:
            self._make_samples()
            source = self._source(names)
            source._learns = True
            called = {name for id in self._samples for name in self._recorded(source, id)[2]}
            source._learns = False
            if leave_out:  # an attribute that holds the same transform as another one is replaced with it
                numbers = {source.number_of(value_at(self._dataset, name)) for name in called}
                called |= {name for name in names if source.number_of(value_at(self._dataset, name)) in numbers}
            idle = [name for name in names if name not in called]
            if idle and leave_out and len(idle) < len(names):
                return self([name for name in names if name not in idle])
            if idle:
                raise cut_refused(
                    f"{self._kind} does not call its {idle[0]} for any of the samples "
                    f"{', '.join(map(str, self._samples))}: leave it out, or name a sample that it is called for with "
                    "check=[id]. A data set that keeps its samples after the transform cannot be cut"
                )
            states = States()
            plans = []
            for id in self._samples:
                plans.append(self._recorded(source, id, states)[:2])
            self._require_steady(source, names)
            first = plans[0][0]
            places = None if any(plan != first for plan, _ in plans) else _places(*plans[0], source._transforms)
            if places is not None:
                flat = _Cut(list(names), source._lengths, first, places)
                if not any(self._difference(id, flat.source(self._dataset)) for id in self._samples):
                    return flat
            for id in self._samples:
                if why := self._difference(id, source):
                    raise cut_refused(f"{self._what}: {why}")
            return _Cut(list(names), source._lengths, None, None)

    def _source(self, names: Sequence[str]) -> CutSource:
        try:
            return CutSource(self._dataset, names)
        except Exception as error:
            raise cut_refused(
                f"{self._what}: it cannot be copied with another object in that place ({type(error).__name__}: "
                f"{text_of(error)}): make the transform a plain attribute"
            ) from error

    def _make_samples(self) -> None:
        """Make the samples as the data set does, without those that cannot be read."""
        problem: Exception | None = None
        for id in self._ids:
            try:
                self._randomness.seed(0, 0, id)
                self._samples[id] = self._dataset[id]
            except Exception as error:
                if problem is None:
                    problem = error
                    note_sample(error, self._dataset, id, "fetching")
        if not self._samples and problem is not None:
            raise problem

    def _recorded(self, source: CutSource, id: int, states: States | None = None) -> tuple[Plan, Any, set[str]]:
        """Return what `CutSource.recorded` does. Raises `InputError` if it needs the output, or moves the `states`."""
        self._randomness.seed(0, 0, id)
        if states is not None:
            states.moved()
        try:
            found = source.recorded(id)
        except InputError:
            raise
        except Exception as error:
            raise cut_refused(
                f"{self._what}: sample {id} cannot be made without the output of the transform "
                f"({type(error).__name__}: {text_of(error)}): let __getitem__ return the output as it is, and move "
                "what follows into the transform"
            ) from error
        if states is not None and states.moved() and mark_of(self._dataset) is not False:
            self._refuse_random(f"it drew random numbers when sample {id} was read", certain=True)
        return found

    def _require_steady(self, source: CutSource, names: Sequence[str]) -> None:
        """Raise `InputError` if what is read depends on chance."""
        if mark_of(self._dataset) is False:
            return
        bare = with_values(self._dataset, dict.fromkeys(names))
        if name := random_name(bare):
            self._refuse_random(f"its code names {name}", certain=False)
        states = States()
        for id in self._samples:
            fetch = partial(source.fetch, id)
            _, found = make_twice(fetch, fetch, (), [Trust.of(bare)], states)
            if found is not None:
                self._refuse_random(f"when sample {id} was read, {found.why}", certain=found.certain)

    def _refuse_random(self, why: str, *, certain: bool) -> NoReturn:
        draws = "it draws random numbers outside of the transform"
        unsure = "it may give something else each time, also without the transform"
        advice = "; or, if what is read is always the same, say so with stallfree.mark_deterministic(dataset)"
        raise cut_random(
            f"{self._what}: {draws if certain else unsure}, which a cache would freeze: {why}. Make all random changes "
            f"in the transform{'' if certain else advice}"
        )

    def _difference(self, id: int, source: CutSource) -> str:
        """Return why a sample is another one if it is made of its record; "" if it is equal."""
        self._randomness.seed(0, 0, id)
        try:
            made = source.pipeline(source.fetch(id))
        except Exception as error:
            return (
                f"sample {id} is made by the data set, but not if the transform runs afterwards "
                f"({type(error).__name__}: {text_of(error)}): call the transform in __getitem__ with values that stay "
                "as they are"
            )
        sample = self._samples[id]
        equal = same(sample, made)
        if equal:
            return ""
        if equal is None:
            return (
                f"its samples, such as {id} of type {type(sample).__name__}, cannot be compared: return tensors, "
                "arrays, numbers, texts, or containers of these"
            )
        self._randomness.seed(0, 0, id)
        if not same(sample, self._dataset[id]):
            return (
                f"sample {id} differs each time, also from equal states of all generators, so it cannot be compared: "
                "let the transform draw from a generator that it keeps, or from a global one"
            )
        return (
            f"sample {id} differs if the transform runs after the rest of __getitem__: call the transform with what it "
            "needs, and return its output as it is"
        )


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
    if is_source(dataset):
        raise cut_attribute(
            f"{type(dataset).__name__} has its transform apart already: give it to a loader or a CachedDataset as it is"
        )
    require_map_style(dataset)
    require_samples(len(dataset), f"The data set {type(dataset).__name__}", "Give one with at least one sample.")
    if not attributes:
        raise cut_attribute("cut got no attribute: name the one that holds the transform: cut(dataset, 'transform')")
    for name in attributes:
        _transform_at(dataset, name)
    ids = [normalize_id(id, len(dataset)) for id in check]
    call = partial(_Check(dataset, ids), attributes)
    return call_in_child(call, f"the cut of {type(dataset).__name__}").source(dataset)


def _transform_at(dataset: Any, name: str) -> Transform:
    kind = type(dataset).__name__
    try:
        transform = value_at(dataset, name)
    except (AttributeError, LookupError, TypeError) as error:
        callables = sorted(key for key, value in getattr(dataset, "__dict__", {}).items() if callable(value))
        raise cut_attribute(
            f"{kind} has no attribute {name!r}: name one that holds a transform"
            + (f" (callable are {', '.join(callables)})" if callables else "")
        ) from error
    if transform is None:
        raise cut_attribute(f"the {name} of {kind} is None, so there is nothing to cut: leave it out")
    if not callable(transform):
        raise cut_attribute(
            f"the {name} of {kind} is of type {type(transform).__name__}, which cannot be called: name an attribute "
            "that holds a transform"
        )
    return transform  # type: ignore[no-any-return]


# --- any data set ---------------------------------------------------------------------------------------------------


def cut_any(dataset: Any) -> tuple[Source | None, str]:
    """Cut a data set at the transforms among its attributes; return it and its words, or None and the reason.

    The attributes of nested data sets count too. Those whose names suggest a transform are tried together, then one by
    one, then some others.
    """
    names = list(_callables(dataset))
    likely = [name for name in names if _TRANSFORM.search(name.rpartition(".")[2])]
    others = [name for name in names if name not in likely and not _READER.search(name.rpartition(".")[2])]
    tries = [likely, [*likely, *others], *([name] for name in (*likely, *others))][:_TRIES]
    tries = [names for at, names in enumerate(tries) if names and names not in tries[:at]]
    if not tries:
        return None, f"no attribute of {type(dataset).__name__} holds a transform"

    def find() -> _Cut | str:
        reason = ""
        for tried in tries:
            try:
                return _Check(dataset)(tried, leave_out=True)
            except InputError as error:
                reason = reason or text_of(error)
        return reason

    try:
        found = call_in_child(find, f"the cut of {type(dataset).__name__}")
    except Exception as error:  # also one of a sample
        return None, f"{type(error).__name__}: {text_of(error)}"
    if isinstance(found, str):
        return None, found
    source = found.source(dataset)
    return source, source.words


def _callables(dataset: Any, prefix: str = "", depth: int = 4) -> Iterator[str]:
    """Yield the attributes of a data set, and of the data sets in it, that can be called."""
    held: dict[str, Any] = attribute(dataset, "__dict__") or {}
    for name, value in held.items():
        joint = any(
            cls.__name__ == "StandardTransform" and comes_from(cls, "torchvision.datasets")
            for cls in type(value).__mro__
        )
        if joint or (depth and _is_dataset(value)):
            yield from _callables(value, f"{prefix}{name}.", depth - 1)
        elif depth and isinstance(value, (list, tuple)) and value and all(map(_is_dataset, value)):
            for at, inner in enumerate(value):
                yield from _callables(inner, f"{prefix}{name}.{at}.", depth - 1)
        elif callable(value) and not isinstance(value, type):
            yield prefix + name


def _is_dataset(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(kind, "__getitem__")
        and hasattr(kind, "__len__")
        and hasattr(value, "__dict__")
        and not is_source(value)
    )
