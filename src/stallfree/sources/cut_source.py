"""The source that `cut` returns: what a data set calls its transforms with, and the transforms as steps.

The transforms of a shallow copy of the data set are replaced by stand-ins. A stand-in records what it is called with,
and returns an `Output`, which stands for the output of that call. A data set may place an output in its sample, pass it
to another transform, take an item of it or unpack it. Everything else needs the real output, and is refused.

What the transforms are called with is the record, which has one of two forms:

- Flat: the sample with the argument of each transform in the place of its output. That is possible if each transform
  is called with one argument and its output stands in the sample as it is. The transforms are then steps on these
  places, and each of their steps is classified by itself.
- Planned: `{plan: values}`, with the arguments of each call and the sample, and None in the place of each output. One
  step calls all transforms. The plan is a text, so it belongs to the structure of the record.
"""

import copy
import json
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import is_
from typing import Any, NoReturn

from torch.utils import _pytree as pytree

from stallfree.errors import StallfreeError, cut_refused
from stallfree.pipeline import compose
from stallfree.pipeline.classify import known
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.pipeline.objects import attributes
from stallfree.pipeline.values import private
from stallfree.platform import at_fork
from stallfree.sources.mapped import BaseSource, directory_of, value_at

_FORMAT = 3

_thread = threading.local()
"""The recorder of each source in this thread. Each process and thread opens the files of a data set for itself."""

at_fork(after_in_child=lambda: vars(_thread).clear())

Unpacked = dict[tuple[int, tuple[Any, ...]], list[Any]]
"""The keys of outputs that are unpacked, by the number of the transform and the parts."""

RETURN_IT = "let __getitem__ return the output as it is, and move what follows into the transform"

# --- recording ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """One call: the number of the transform, and its arguments as they were."""

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder:
    """A copy of a data set with stand-ins for its transforms, whose calls it records. For one thread.

    Args:
        source: of the data set.
        learns: whether the keys of an output that is unpacked are noted in `source`; the transform is called for that.

    Attributes:
        calls: of the last sample, in order.
        state: attributes of the data set when it was copied.
    """

    def __init__(self, source: "CutSource", *, learns: bool = False) -> None:
        self._names, self._transforms, self._unpacked = source.names, source.transforms, source.unpacked
        self._kind, self._learns, self.calls = type(source.dataset).__name__, learns, list[Call]()
        stand_ins = {name: StandIn(self, number) for number, name in enumerate(source.names)}
        self._dataset, self.state = with_values(source.dataset, stand_ins), [*attributes(source.dataset).values()]

    def make(self, id: int) -> Any:
        """Return sample `id` with outputs in it. Raises `InputError` if a use of one was refused, even if caught."""
        self.id, self.calls = id, []
        self._refusal: StallfreeError | None = None
        try:
            return self._dataset[id]
        finally:
            if self._refusal is not None:
                raise self._refusal

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Output":
        """Record a call of transform `number`."""
        self.calls.append(Call(number, *_as_now((args, kwargs))))
        return Output(self, self.calls[-1])

    def keys_of(self, output: "Output") -> list[Any]:
        """Return the keys or indices of an output that is unpacked, as they were when the samples were compared."""
        path = output.number, output.parts
        if self._learns and path not in self._unpacked:
            value = self._value_of(output)
            self._unpacked[path] = [*value] if isinstance(value, Mapping) else [*range(len(value))]
        if path not in self._unpacked:
            output.refuse("its output was unpacked, as it was for no sample that was compared")
        return self._unpacked[path]

    def _value_of(self, output: "Output") -> Any:
        args, kwargs = pytree.tree_map_only(Output, self._value_of, (output.call.args, output.call.kwargs))
        args, kwargs = _as_now((args, kwargs))
        return _part_of(self._transforms[output.number](*args, **kwargs), output.parts)

    def refuse(self, number: int, use: str) -> NoReturn:
        """Raise `InputError`, and remember it: the data set may catch it."""
        error = cut_refused(
            f"{self._kind} cannot be cut at {self._names[number]!r}: when sample {self.id} was made, {use}, which "
            f"needs the real one: {RETURN_IT}"
        )
        self._refusal = self._refusal or error
        raise error

    def flat(self, sample: Any) -> "tuple[FlatPlan, Any] | None":
        """Return the plan and the flat record of a sample; None if it has none."""
        paths, spec = pytree.tree_flatten_with_path(sample)
        steps, leaves = {}, []
        for path, leaf in paths:
            keys = [getattr(key, "idx", getattr(key, "key", None)) for key in path]
            while type(leaf) is Output:
                call, by_name = leaf.call, compose.is_albumentations(self._transforms[leaf.number])
                form = (0, ["image"], ("image",)) if by_name else (1, [], ())
                one_place = None not in keys and call in self.calls and call not in steps
                if not one_place or (len(call.args), list(call.kwargs), leaf.parts) != form:
                    return None
                steps[call] = leaf.number, keys
                leaf = call.kwargs["image"] if by_name else call.args[0]
            leaves.append(leaf)
        if len(steps) < len(self.calls):
            return None
        return [steps[call] for call in self.calls], pytree.tree_unflatten(leaves, spec)

    def planned(self, sample: Any) -> "tuple[Plan, list[Any]]":
        """Return the plan of a sample, and the arguments of each call and the sample with None for each output."""
        plan: Plan = []
        values = []
        for number, value in [*((call.number, (call.args, call.kwargs)) for call in self.calls), (None, sample)]:
            leaves, spec = pytree.tree_flatten(value)
            outputs = [(at, leaf) for at, leaf in enumerate(leaves) if type(leaf) is Output]
            for at, output in outputs:
                if output.call not in self.calls:
                    output.refuse("an output that was kept from another sample was in it")
                leaves[at] = None
            plan.append((number, [(at, self.calls.index(output.call), output.parts) for at, output in outputs]))
            values.append(pytree.tree_unflatten(leaves, spec))
        return plan, values


class StandIn:
    """Stands for transform `number`: it can be called, and nothing else."""

    _what = "the transform"

    def __init__(self, recorder: Recorder, number: int) -> None:
        self.recorder, self.number = recorder, number

    def __call__(self, *args: Any, **kwargs: Any) -> "Output":
        return self.recorder.call(self.number, args, kwargs)

    def refuse(self, use: str) -> NoReturn:
        """Raise `InputError`: `use` needs what does not exist yet."""
        recorder: Recorder = vars(self)["recorder"]  # none in a copy that is not finished
        recorder.refuse(self.number, use)

    def __getattr__(self, name: str) -> Any:
        self.refuse(f"the attribute {name!r} of {self._what} was read")


class Output(StandIn):
    """Stands for the output of a call, or for a part of it.

    Python itself raises `TypeError` for arithmetic and for what else it does not know.

    Attributes:
        parts: the way to the part: keys, and `(key, number of keys)` where the output was unpacked.
    """

    _what = "its output"

    def __init__(self, recorder: Recorder, call: Call, parts: tuple[Any, ...] = ()) -> None:
        super().__init__(recorder, call.number)
        self.call, self.parts = call, parts

    def __getitem__(self, key: Any) -> "Output":
        if type(key) not in (str, int):
            self.refuse(f"an item of its output was taken with a key of type {type(key).__name__}")
        return Output(self.recorder, self.call, (*self.parts, key))

    def items(self) -> list[tuple[Any, "Output"]]:
        """Return the keys of a mapping, or the indices of a sequence, each with that part."""
        keys = self.recorder.keys_of(self)
        return [(key, Output(self.recorder, self.call, (*self.parts, (key, len(keys))))) for key in keys]

    def __iter__(self) -> Iterator["Output"]:
        return iter([part for _, part in self.items()])


def _refusing(name: str) -> Callable[..., Any]:
    return lambda output, *_, **__: output.refuse(f"{name} was applied to its output")


for _name in ("array", "bool", "call", "contains", "eq", "format", "hash", "ne", "reduce_ex", "str"):
    setattr(Output, f"__{_name}__", _refusing(f"__{_name}__"))


def _as_now(arguments: Any) -> Any:
    """Return copies of arguments, since a data set may use its buffers again or close its files. Images are read."""

    def keep(leaf: Any) -> Any:
        if type(leaf).__module__.startswith("PIL.") and hasattr(leaf, "load"):
            leaf.load()
            return leaf
        return leaf if type(leaf) is Output else private(leaf)

    return pytree.tree_map(keep, arguments)


# --- plans ----------------------------------------------------------------------------------------------------------

FlatPlan = list[tuple[int, list[Any]]]
"""For each call, in order: the number of the transform, and the keys to its output in the sample."""

Plan = list[tuple[int | None, list[tuple[int, int, tuple[Any, ...]]]]]
"""For each call, and for the sample: the number of the transform (None for the sample), and the outputs in it.

Of each output: the leaf that it replaces, which call it is from, and its parts.
"""

_plan_of = lru_cache(1024)(json.loads)


def _part_of(output: Any, parts: Sequence[Any]) -> Any:
    """Return the part of an output that `parts` lead to. Raises `InputError` if it was unpacked to another length."""
    for part in parts:
        key, length = part if isinstance(part, (list, tuple)) else (part, None)
        if length not in (None, len(output)):
            raise cut_refused(
                f"a transform returned {len(output)} values, and {length} when the data set was cut: let it return "
                "equally many for each sample"
            )
        output = output[key]
    return output


class CallTransforms:
    """Calls the transforms of a data set as it did, and puts their outputs into the sample.

    It is random if one of them is known to be, and may be cached if that is known of all.
    """

    def __init__(self, transforms: Sequence[compose.Transform]) -> None:
        self.transforms = tuple(transforms)
        signs = [known(transform) for transform in transforms]
        if any(sign is not None and sign[0] for sign in signs):
            compose.mark_random(self)
        elif all(sign in ((False, "mark"), (False, "albumentations")) for sign in signs):
            compose.mark_deterministic(self)

    def __call__(self, record: Mapping[str, Any]) -> Any:
        ((plan, values),) = record.items()
        made: list[Any] = []
        for (number, outputs), value in zip(_plan_of(plan), values, strict=True):
            leaves, spec = pytree.tree_flatten(value)
            for at, call, parts in outputs:
                leaves[at] = _part_of(made[call], parts)
            value = pytree.tree_unflatten(leaves, spec)
            made.append(value if number is None else self.transforms[number](*value[0], **value[1]))
        return made[-1]


# --- the source -----------------------------------------------------------------------------------------------------


class CutSource(BaseSource):
    """The records of a data set without its transforms, which are in `pipeline`. The samples are the same.

    Each thread of each process reads a copy of its own, so that files which the data set opens are never shared.

    Args:
        dataset: the data set.
        names: the dotted attributes that hold a transform.
        unpacked: keys of outputs.
        plan: of all samples, for flat records.

    Attributes:
        words: what was done, such as "cut at transform".
        without: the data set with None for its transforms.
    """

    threads = False

    def __init__(
        self, dataset: Any, names: Sequence[str], unpacked: Unpacked | None = None, plan: FlatPlan | None = None
    ) -> None:
        self.dataset, self.names = dataset, list(names)
        self.watched = [(dataset, name, value_at(dataset, name)) for name in names]
        self.transforms: list[compose.Transform] = [transform for *_, transform in self.watched]
        self.unpacked, self.plan = unpacked or {}, plan
        self.words = f"cut at {' and '.join(names)}"
        self.without = with_values(dataset, dict.fromkeys(names))
        steps: list[compose.Transform] = [CallTransforms(self.transforms)] if plan is None else []
        for number, keys in plan or ():
            step: compose.Transform = self.transforms[number]
            for key in reversed(keys):
                step = compose.OnItem(key, step)
            steps += compose.flatten(step)
        self.pipeline = compose.Compose(steps)

    def __len__(self) -> int:
        return len(self.dataset)

    def _record(self, id: int) -> Any:
        recorders = vars(_thread).setdefault("recorders", weakref.WeakKeyDictionary())
        recorder, state = recorders.get(self), [*attributes(self.dataset).values()]
        if recorder is None or len(recorder.state) != len(state) or not all(map(is_, recorder.state, state)):
            recorder = recorders[self] = Recorder(self)
        sample = recorder.make(id)
        if self.plan is None:
            plan, values = recorder.planned(sample)
            return {json.dumps(plan, separators=(",", ":")): values}
        flat_plan, record = recorder.flat(sample) or (None, None)
        if flat_plan != self.plan:
            raise cut_refused(
                f"for sample {id}, {type(self.dataset).__name__} calls its transforms in another way than for the "
                f"samples that cut has compared: name it there, as in cut(dataset, {self.names[0]!r}, check=[{id}])"
            )
        return record

    def fingerprint(self) -> str:
        """The fingerprint of the data set without its transforms, and the form of the records."""
        of = self.without, self.names, str(self.plan), directory_of(self.dataset)
        return f"CutSource {_FORMAT} {fingerprint(*of)}"


def with_values(holder: Any, values: Mapping[str, Any]) -> Any:
    """Return a shallow copy of a data set with `values` at their dotted attributes. Objects on the way are copied too.

    Raises `AttributeError` if an attribute cannot be set.
    """
    inner: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in values.items():
        first, _, name_within = name.partition(".")
        inner[first][name_within] = value
    copied = copy.copy(holder)
    for first, rest_of in inner.items():
        value = rest_of[""] if "" in rest_of else with_values(value_at(holder, first), rest_of)
        if isinstance(holder, (list, tuple, dict)):
            copied = compose.with_item(copied, first if isinstance(holder, dict) else int(first), value)
        else:
            object.__setattr__(copied, first, value)  # of a frozen dataclass too
    return copied
