"""Records of a data set without its transforms, and the steps that make samples of them.

A record is the sample with the arguments of the transforms in the places of their outputs, if each transform is called
with one argument and its output stands in the sample as it is: then the transforms are steps on these places. Any other
record is `{plan: (sample, call, ...)}`. A call is `(args, kwargs)`, and there is None wherever an output belongs. The
plan is a text that says where, so it is a part of the structure of the record and not of its data.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from stallfree.errors import cut_refused
from stallfree.pipeline.classify import known
from stallfree.pipeline.compose import (
    OnItem,
    Transform,
    flatten,
    is_albumentations,
    mark_deterministic,
    mark_random,
    with_item,
)
from stallfree.pipeline.objects import attributes
from stallfree.sources.cutting.stand_in import Call, Output
from stallfree.sources.detach import set_attribute

Path = list[list[Any]]
"""From a value to a part of it: `["item", key]` or `["attribute", name]` for each level."""


class Hole(NamedTuple):
    """A place that an output belongs to.

    Attributes:
        path: in `(sample, call, ...)`.
        call: the number of the call.
        parts: of the output of that call.
    """

    path: Path
    call: int
    parts: list[Any]


class Plan(NamedTuple):
    """How a sample follows from the calls of transforms.

    Attributes:
        calls: for each, the number of its transform, how many positional arguments it has, and the names of the others.
        holes: where outputs belong: first those in the arguments of each call, in order, then those in the sample.
    """

    calls: list[tuple[int, int, list[str]]]
    holes: list[Hole]

    def text(self) -> str:
        """The plan as text."""
        return json.dumps(self, separators=(",", ":"))


@lru_cache(1024)
def plan_of(text: str) -> Plan:
    """The plan that `Plan.text` gave."""
    calls, holes = json.loads(text)
    return Plan([tuple(call) for call in calls], [Hole(*hole) for hole in holes])


def taken(sample: Any, calls: Sequence[Call]) -> tuple[Plan, list[Any]]:
    """The plan of a recorded sample, and `[sample, (args, kwargs), ...]` with None in place of each output."""
    order = {id(call): number for number, call in enumerate(calls)}
    parts = [*((call.args, call.kwargs) for call in calls), sample]
    places = [*range(1, len(parts)), 0]
    tree: list[Any] = [None] * len(parts)
    holes: list[Hole] = []
    for place, part in zip(places, parts, strict=True):
        found: list[tuple[Path, Output]] = []
        tree[place] = _without_outputs(part, [["item", place]], found)
        for path, output in found:
            if id(output.call) not in order:
                kind, name = output.recorder.dataset, output.recorder.names[output.call.number]
                raise cut_refused(
                    f"{kind} cannot be cut at {name!r}: sample {output.recorder.id} has an output of the transform "
                    "that was kept from another sample: let __getitem__ call the transform for each sample"
                )
            holes.append(Hole(path, order[id(output.call)], list(output.path)))
    return Plan([(call.number, len(call.args), list(call.kwargs)) for call in calls], holes), tree


def _without_outputs(value: Any, path: Path, found: list[tuple[Path, Output]]) -> Any:
    """`value` with None for each `Output`, which is noted; a new container only where there was one."""
    if type(value) is Output:
        found.append((path, value))
        return None
    for step, child in _children(value):
        count = len(found)
        changed = _without_outputs(child, [*path, step], found)
        if len(found) > count:
            value = _with(value, step, changed)
    return value


def _children(value: Any) -> Iterator[tuple[list[Any], Any]]:
    """The parts of `value` that may be or hold an `Output`: items of containers, attributes of other objects."""
    if type(value) in _WITHOUT_PARTS:
        return
    if isinstance(value, (list, tuple)):
        yield from ((["item", place], child) for place, child in enumerate(value))
    elif isinstance(value, Mapping):
        yield from ((["item", key], value[key]) for key in value if type(key) in (str, int))
    elif not isinstance(value, type) and not callable(value):
        held = (Output, list, tuple, Mapping)
        yield from (
            (["attribute", name], child) for name, child in attributes(value).items() if isinstance(child, held)
        )


_WITHOUT_PARTS = frozenset({int, float, bool, complex, str, bytes, type(None), np.ndarray})


def _with(value: Any, step: list[Any], child: Any) -> Any:
    """A copy of `value` with another part."""
    if step[0] == "item":
        return with_item(value, step[1], child)
    changed = copy.copy(value)
    set_attribute(changed, step[1], child)
    return changed


def _put(value: Any, path: Path, part: Any) -> Any:
    """A copy of `value` with `part` at `path`."""
    if not path:
        return part
    step, *rest = path
    if not rest:
        return _with(value, step, part)
    child = value[step[1]] if step[0] == "item" else getattr(value, step[1])
    return _with(value, step, _put(child, rest, part))


def part_of(output: Any, parts: Sequence[Any]) -> Any:
    """The part of an output that `parts` lead to. Raises `InputError` if it was unpacked to another length."""
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


# --- steps on the places of a sample --------------------------------------------------------------------------------


class Chain(NamedTuple):
    """Transforms whose outputs stand in one place, each made of the output of the one before.

    Attributes:
        path: of the place in the sample.
        calls: their numbers.
        argument: path of the argument of the first one, in its `(args, kwargs)`.
    """

    path: Path
    calls: list[int]
    argument: Path


def chains_of(plan: Plan, transforms: Sequence[Transform]) -> list[Chain] | None:
    """The places of a sample and what is made there; None if the transforms are no steps on places of the sample."""
    arguments = [_only_argument(call, transforms) for call in plan.calls]
    inputs: dict[int, int] = {}
    places: list[tuple[Path, int]] = []
    for path, call, parts in plan.holes:
        if parts != (["image"] if is_albumentations(transforms[plan.calls[call][0]]) else []):
            return None
        if path[0][1] == 0:
            places.append((path[1:], call))
        elif path[1:] == arguments[path[0][1] - 1]:
            inputs[path[0][1] - 1] = call
        else:
            return None
    used = [*inputs.values(), *(call for _, call in places)]
    if None in arguments or sorted(used) != list(range(len(plan.calls))):
        return None
    if any(kind != "item" for path, _ in places for kind, _ in path):
        return None
    chains = []
    for path, call in places:
        calls = [call]
        while calls[0] in inputs:
            calls.insert(0, inputs[calls[0]])
        chains.append(Chain(path, calls, arguments[calls[0]] or []))
    return chains


def _only_argument(call: tuple[int, int, list[str]], transforms: Sequence[Transform]) -> Path | None:
    """The path of the argument if a step of a `Compose` calls the transform in the same way, else None."""
    number, args, names = call
    if is_albumentations(transforms[number]):
        return [["item", 1], ["item", "image"]] if (args, names) == (0, ["image"]) else None
    return [["item", 0], ["item", 0]] if (args, names) == (1, []) else None


def flat_record(tree: Sequence[Any], chains: Sequence[Chain]) -> Any:
    """The sample with the arguments of the transforms in the places of their outputs."""
    record = tree[0]
    for path, calls, argument in chains:
        value = tree[1 + calls[0]]
        for _, key in argument:
            value = value[key]
        record = _put(record, path, value)
    return record


def steps_on_places(plan: Plan, chains: Sequence[Chain], transforms: Sequence[Transform]) -> list[Transform]:
    """The transforms as steps on a `flat_record`, in the order of the calls."""
    place_of = {call: chain.path for chain in chains for call in chain.calls}
    steps: list[Transform] = []
    for call, (number, _, _) in enumerate(plan.calls):
        step = transforms[number]
        for _, key in reversed(place_of[call]):
            step = OnItem(key, step)
        steps += flatten(step)
    return steps


# --- the general step -----------------------------------------------------------------------------------------------


def planned_record(plan: Plan, tree: Sequence[Any]) -> dict[str, Any]:
    """The record that `CallTransforms` takes."""
    return {plan.text(): tuple(tree)}


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

    def __call__(self, record: Mapping[str, tuple[Any, ...]]) -> Any:
        ((text, tree),) = record.items()
        sample, _ = called(plan_of(text), tree, self.transforms)
        return sample

    def __repr__(self) -> str:
        return f"CallTransforms({', '.join(map(repr, self.transforms))})"


def called(plan: Plan, tree: Sequence[Any], transforms: Sequence[Callable[..., Any]]) -> tuple[Any, list[Any]]:
    """The sample, and the outputs of the calls."""
    outputs: list[Any] = []
    whole: Any = list(tree)
    for path, call, parts in plan.holes:
        needed = call + 1 if path[0][1] else len(plan.calls)
        while len(outputs) < needed:
            _call_next(plan, whole, transforms, outputs)
        whole = _put(whole, path, part_of(outputs[call], parts))
    while len(outputs) < len(plan.calls):
        _call_next(plan, whole, transforms, outputs)
    return whole[0], outputs


def _call_next(plan: Plan, whole: Any, transforms: Sequence[Callable[..., Any]], outputs: list[Any]) -> None:
    args, kwargs = whole[1 + len(outputs)]
    outputs.append(transforms[plan.calls[len(outputs)][0]](*args, **kwargs))
