"""The source that `cut` returns: what a data set calls its transforms with, and the transforms as steps.

The transforms of a shallow copy are replaced by stand-ins (outputs.py). What these are called with is the record, and
where their outputs stand in the sample is the plan. A record has one of two forms:

- Flat: the sample with the argument of each transform in the place of its output. That is possible if each transform
  is called with one argument and its output stands in the sample as it is. The transforms are then steps on these
  places, and each of their steps is classified by itself.
- Planned: `{plan: (sample, calls)}`, with None in the place of each output. One step calls all transforms. The plan is
  a text, so it belongs to the structure of the record.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from stallfree.errors import cut_refused, dataset_changed
from stallfree.pipeline.classify import known
from stallfree.pipeline.compose import (
    Compose,
    OnItem,
    Transform,
    flatten,
    is_albumentations,
    mark_deterministic,
    mark_random,
    with_item,
)
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.pipeline.values import private
from stallfree.sources.base import BaseSource
from stallfree.sources.outputs import Output, Recorder, StandIn, refuse

_FORMAT = 2


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


def places_of(plan: Plan, tree: Any, transforms: Sequence[Transform]) -> list[Place] | None:
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
        self.transforms: list[Transform] = []
        for value in self._values:
            if not any(is_same(value, other) for other in self.transforms):
                self.transforms.append(value)
        self.words = f"cut at {' and '.join(self._first_names())}"
        self._without = with_values(dataset, dict.fromkeys(names))
        self.lengths: dict[str, int] = {}
        self.learns = False
        self._local = threading.local()
        self.plan: Plan | None = None
        self._flat: list[Place] | None = None
        self.pipeline = Compose([CallTransforms(self.transforms)])

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
        return next(at for at, transform in enumerate(self.transforms) if is_same(value, transform))

    def _first_names(self) -> list[str]:
        numbers = list(map(self.number_of, self._values))
        return [self.names[numbers.index(number)] for number in range(len(self.transforms))]

    def _length_of(self, output: Output) -> int:
        """Return the length of an output that is unpacked, as it was when the samples were compared."""
        key = f"{output.call.number} {output.parts}"
        if self.learns and key not in self.lengths:
            calls = output.recorder.calls
            at = next(at for at, call in enumerate(calls) if call is output.call)
            recorder = copy.copy(output.recorder)
            recorder.calls = calls[: at + 1]
            plan, tree = _planned(None, recorder)
            real = _part_of(_carried_out(plan, private(tree), self.transforms)[1][-1], output.parts)
            if not isinstance(real, (tuple, list, np.ndarray, torch.Tensor)):
                refuse(output, f"its output, of type {type(real).__name__}, was iterated over")
            self.lengths[key] = len(real)
        if key not in self.lengths:
            refuse(output, "its output was unpacked, as it was for no sample that was compared")
        return self.lengths[key]

    def make_flat(self, plan: Plan, places: list[Place]) -> None:
        """Make flat records from now on, of samples of this plan."""
        self.plan, self._flat = plan, places
        place_of = {call: place.keys for place in places for call in place.calls}
        steps: list[Transform] = []
        for call, number in enumerate(plan.calls):
            step: Transform = self.transforms[number]
            for key in reversed(place_of[call]):
                step = OnItem(key, step)
            steps += flatten(step)
        self.pipeline = Compose(steps)

    def __len__(self) -> int:
        return len(self.dataset)

    def _record(self, id: int) -> Any:
        for name, value in zip(self.names, self._values, strict=True):
            if not is_same(value_at(self.dataset, name), value):
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
        if isinstance(dataset, (list, tuple)):
            dataset = dataset[_index(part)]
        else:
            dataset = dataset[part] if isinstance(dataset, dict) else getattr(dataset, part)
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
                copies[here] = copy.copy(value_at(copies[above], part))
                _set(copies[above], part, copies[here])
            above = here
        _set(copies[above], last, value)
    return copies[""]


def _index(part: str) -> int:
    if not part.isdigit():
        raise LookupError(f"{part!r} is no index of a list")
    return int(part)


def _set(thing: Any, part: str, value: Any) -> None:
    if isinstance(thing, (list, dict)):
        key: Any = part if isinstance(thing, dict) else _index(part)
        thing[key] = value
        return
    try:
        setattr(thing, part, value)
    except AttributeError:  # of a frozen dataclass
        object.__setattr__(thing, part, value)


def is_same(value: Any, other: Any) -> bool:
    """Return whether both are one object; each access to a bound method makes a new one."""
    return value is other or (isinstance(value, MethodType) and bool(value == other))
