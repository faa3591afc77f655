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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.utils import _pytree as pytree

from stallfree.errors import InputError, cut_refused
from stallfree.pipeline import compose
from stallfree.pipeline.classify import known
from stallfree.pipeline.compose import Compose, OnItem, Transform
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.pipeline.values import private
from stallfree.platform import at_fork
from stallfree.sources.mapped import BaseSource, value_at

_FORMAT = 3

_thread = threading.local()
"""The recorder of each source in this thread. Each process and thread opens the files of a data set for itself."""

at_fork(after_in_child=lambda: vars(_thread).clear())

# --- recording ------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call: the number of the transform, and its arguments as they were."""

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder:
    """A copy of a data set with stand-ins for its transforms, whose calls it records. For one thread.

    Args:
        source: of the data set.
        learns: whether the length of an output that is unpacked is noted in `source`; the transform is called for that.

    Attributes:
        calls: of the last sample, in order.
    """

    def __init__(self, source: "CutSource", *, learns: bool = False) -> None:
        self._names, self._transforms, self._lengths = source.names, source.transforms, source.lengths
        self._kind, self._learns, self.calls = type(source.dataset).__name__, learns, list[Call]()
        stand_ins = {name: StandIn(self, number) for number, name in enumerate(source.names)}
        self._dataset = with_values(source.without, stand_ins)

    def make(self, id: int) -> Any:
        """Return sample `id` with outputs in it. Raises `InputError` if a use of one was refused, even if caught."""
        self.id, self.calls = id, []
        self._refusal: InputError | None = None
        try:
            return self._dataset[id]
        finally:
            if self._refusal is not None:
                raise self._refusal

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Output":
        """Record a call of transform `number`."""
        self.calls.append(Call(number, *_as_now((args, kwargs))))
        return Output(self, self.calls[-1])

    def length_of(self, output: "Output") -> int:
        """Return the length of an output that is unpacked, as it was when the samples were compared."""
        key = output.call.number, output.parts
        if self._learns and key not in self._lengths:
            value = self._value_of(output)
            if not isinstance(value, (tuple, list, np.ndarray, torch.Tensor)):
                output.refuse(f"its output, of type {type(value).__name__}, was iterated over")
            self._lengths[key] = len(value)
        if key not in self._lengths:
            output.refuse("its output was unpacked, as it was for no sample that was compared")
        return self._lengths[key]

    def _value_of(self, output: "Output") -> Any:
        arguments = pytree.tree_map_only(Output, self._value_of, (output.call.args, output.call.kwargs))
        args, kwargs = _as_now(arguments)
        return _part_of(self._transforms[output.call.number](*args, **kwargs), output.parts)

    def refuse(self, number: int, what: str) -> NoReturn:
        """Raise `InputError`, and remember it: the data set may catch it."""
        error = cut_refused(
            f"{self._kind} cannot be cut at {self._names[number]!r}: when sample {self.id} was made, {what}, which "
            "needs the real one: let __getitem__ return the output as it is, and move what follows into the transform"
        )
        self._refusal = self._refusal or error
        raise error

    def flat(self, sample: Any) -> "tuple[FlatPlan, Any] | None":
        """Return the plan and the flat record of a sample; None if it has none."""
        order = {id(call): at for at, call in enumerate(self.calls)}
        paths, spec = pytree.tree_flatten_with_path(sample)
        steps, leaves = [], []
        for path, leaf in paths:
            keys = [getattr(key, "idx", getattr(key, "key", None)) for key in path]
            while type(leaf) is Output:
                (number, args, kwargs), parts = leaf.call, leaf.parts
                by_name = compose.is_albumentations(self._transforms[number])
                form = (0, ["image"], ("image",)) if by_name else (1, [], ())
                if None in keys or id(leaf.call) not in order or (len(args), list(kwargs), parts) != form:
                    return None
                steps.append((order[id(leaf.call)], number, keys))
                leaf = kwargs["image"] if by_name else args[0]
            leaves.append(leaf)
        steps.sort(key=lambda step: step[0])
        if [at for at, *_ in steps] != list(range(len(self.calls))):  # each output stands in one place
            return None
        return [(number, keys) for _, number, keys in steps], pytree.tree_unflatten(leaves, spec)

    def planned(self, sample: Any) -> "tuple[Plan, list[Any]]":
        """Return the plan of a sample, and the arguments of each call and the sample with None for each output."""
        order = {id(call): at for at, call in enumerate(self.calls)}
        plan: Plan = []
        values = []
        for number, value in [*((call.number, (call.args, call.kwargs)) for call in self.calls), (None, sample)]:
            leaves, spec = pytree.tree_flatten(value)
            outputs = []
            for at, leaf in enumerate(leaves):
                if type(leaf) is Output:
                    if id(leaf.call) not in order:
                        leaf.refuse("an output that was kept from another sample was in it")
                    outputs.append((at, order[id(leaf.call)], leaf.parts))
                    leaves[at] = None
            plan.append((number, outputs))
            values.append(pytree.tree_unflatten(leaves, spec))
        return plan, values


class StandIn:
    """Stands for transform `number`."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        vars(self).update(recorder=recorder, number=number)

    def __call__(self, *args: Any, **kwargs: Any) -> "Output":
        return self.recorder.call(self.number, args, kwargs)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        vars(self)["recorder"].refuse(self.number, f"the attribute {name!r} of the transform was read")

    def __setattr__(self, name: str, value: Any) -> None:
        self.recorder.refuse(self.number, f"the attribute {name!r} of the transform was set")


class Output:
    """Stands for the output of a call, or for a part of it.

    Attributes:
        parts: the way to the part: keys, and `(index, length)` where the output was unpacked.
    """

    recorder: Recorder
    call: Call
    parts: tuple[Any, ...]

    def __init__(self, recorder: Recorder, call: Call, parts: tuple[Any, ...] = ()) -> None:
        vars(self).update(recorder=recorder, call=call, parts=parts)

    def refuse(self, what: str) -> NoReturn:
        """Raise `InputError`: `what` cannot be done with an output that does not exist yet."""
        self.recorder.refuse(self.call.number, what)

    def __getitem__(self, key: Any) -> "Output":
        if type(key) not in (str, int):
            self.refuse(f"an item of its output was taken with a key of type {type(key).__name__}")
        return Output(self.recorder, self.call, (*self.parts, key))

    def __iter__(self) -> Iterator["Output"]:
        length = self.recorder.length_of(self)
        return iter([Output(self.recorder, self.call, (*self.parts, (index, length))) for index in range(length)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__array", "__cuda_array", "__dlpack")):
            self.refuse("its output was converted to an array or a tensor")
        self.refuse(f"the attribute {name!r} of its output was read")

    def __setattr__(self, name: str, value: Any) -> None:
        self.refuse(f"the attribute {name!r} of its output was set")


def _refusing(name: str) -> Callable[..., Any]:
    what = {"__array__": "its output was converted to an array or a tensor", "__reduce_ex__": "its output was copied"}

    def operation(self: Output, *_: Any, **__: Any) -> Any:
        self.refuse(what.get(name, f"{name} was applied to its output"))

    return operation


_BINARY = "add sub mul matmul truediv floordiv mod divmod pow and or xor lshift rshift"
_OTHERS = (
    "neg pos abs invert eq ne lt le gt ge bool int float complex index round trunc floor ceil contains call setitem "
    "delitem enter exit str format bytes hash array reduce_ex"
)
for _name in (*_BINARY.split(), *(f"r{name}" for name in _BINARY.split()), *_OTHERS.split()):
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

    def __repr__(self) -> str:
        return f"CallTransforms({', '.join(map(repr, self.transforms))})"


# --- the source -----------------------------------------------------------------------------------------------------


class CutSource(BaseSource):
    """The records of a data set without its transforms, which are in `pipeline`. The samples are the same.

    Each thread of each process reads a copy of its own, so that files which the data set opens are never shared.

    Args:
        dataset: the data set.
        names: the dotted attributes that hold a transform.
        lengths: of outputs that are unpacked, by the number of the transform and the parts.
        plan: of all samples, for flat records.

    Attributes:
        words: what was done, such as "cut at transform".
        without: the data set with None for its transforms.
    """

    threads = False

    def __init__(
        self,
        dataset: Any,
        names: Sequence[str],
        lengths: dict[tuple[int, tuple[Any, ...]], int] | None = None,
        plan: FlatPlan | None = None,
    ) -> None:
        self.dataset, self.names = dataset, list(names)
        self.watched = [(dataset, name, value_at(dataset, name)) for name in names]
        self.transforms: list[Transform] = [transform for *_, transform in self.watched]
        self.lengths, self.plan = lengths or {}, plan
        self.words = f"cut at {' and '.join(names)}"
        self.without = with_values(dataset, dict.fromkeys(names))
        steps: list[Transform] = [CallTransforms(self.transforms)] if plan is None else []
        for number, keys in plan or ():
            step: Transform = self.transforms[number]
            for key in reversed(keys):
                step = OnItem(key, step)
            steps += compose.flatten(step)
        self.pipeline = Compose(steps)

    def __len__(self) -> int:
        return len(self.dataset)

    def _record(self, id: int) -> Any:
        recorders = vars(_thread).setdefault("recorders", weakref.WeakKeyDictionary())
        recorder = recorders.get(self) or recorders.setdefault(self, Recorder(self))
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
        return f"CutSource {_FORMAT} {fingerprint(self.without, self.names, str(self.plan))}"


def with_values(dataset: Any, values: Mapping[str, Any]) -> Any:
    """Return a shallow copy of `dataset` with `values` at their dotted attributes. Objects on the way are copied too.

    Raises `AttributeError` if an attribute cannot be set.
    """
    copies: dict[str, Any] = {"": copy.copy(dataset)}

    def put(name: str, value: Any) -> None:
        path, _, last = name.rpartition(".")
        if path not in copies:
            copies[path] = copy.copy(value_at(dataset, path))
            put(path, copies[path])
        if isinstance(copies[path], list):
            copies[path][int(last)] = value
        else:
            object.__setattr__(copies[path], last, value)  # of a frozen dataclass too

    for name, value in values.items():
        put(name, value)
    return copies[""]
