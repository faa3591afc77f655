"""Objects that stand for a transform and for its output while a data set makes a sample.

A `StandIn` records what it is called with and returns an `Output`. A data set may place an output in its sample, pass
it to another transform, take an item of it or unpack it. Everything else needs the real output, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from torch.utils import _pytree as pytree

from stallfree.errors import InputError, cut_refused
from stallfree.pipeline.objects import describe
from stallfree.pipeline.values import private

Part = Any
"""A part of an output: a key, or `[index, length]` if the output was unpacked."""


class Call(NamedTuple):
    """One call: the number of the transform, and its arguments as they were."""

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Recorder:
    """Records the calls of the stand-ins of one data set while a sample is made. For one thread.

    Attributes:
        dataset: name of the data set, for messages.
        names: the attribute of each transform.
        length_of: returns the length of the output that an `Output` stands for.
        id: of the sample.
        active: whether a sample is being made. Only then uses are refused.
        calls: of the stand-ins, in order.
        called: the names that were called.
        refusal: the first use of an output that is not possible; None if there was none.
    """

    dataset: str
    names: Sequence[str]
    length_of: Callable[[Output], int]
    id: int = -1
    active: bool = False
    calls: list[Call] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    refusal: InputError | None = None

    def record(self, dataset: Any, id: int) -> Any:
        """Return `dataset[id]`; its calls are in `calls`. Raises `InputError` if a use was refused, even if caught."""
        self.id, self.calls, self.called, self.refusal, self.active = id, [], set(), None, True
        try:
            sample = dataset[id]
        finally:
            self.active = False
            if self.refusal is not None:
                raise self.refusal
        return sample

    def call(self, number: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Output:
        """Record a call of transform `number` by its attribute `name`."""
        self.called.add(name)
        self.calls.append(Call(number, _kept(args), _kept(kwargs)))
        return Output(self, self.calls[-1], ())

    def refuse(self, number: int, what: str) -> NoReturn:
        """Raise `InputError`, and remember it: the data set may catch it."""
        if not self.active:  # something looks at the data set from outside
            raise AttributeError(what)
        error = cut_refused(
            f"{self.dataset} cannot be cut at {self.names[number]!r}: when sample {self.id} was made, {what}, which "
            "needs the real one: let __getitem__ return the output as it is, and move what follows into the transform"
        )
        self.refusal = self.refusal or error
        raise error


class StandIn:
    """Stands for transform `number` in the attribute `name`."""

    def __init__(self, recorder: Recorder, number: int, name: str) -> None:
        vars(self).update(_recorder=recorder, _number=number, _name=name)

    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        return self._recorder.call(self._number, self._name, args, kwargs)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        vars(self)["_recorder"].refuse(vars(self)["_number"], f"the attribute {name!r} of the transform was read")

    def __setattr__(self, name: str, value: Any) -> None:
        self._recorder.refuse(self._number, f"the attribute {name!r} of the transform was set")


class Output:
    """Stands for the output of a call, or for a part of it.

    Attributes:
        recorder: of the call.
        call: that returned it.
        parts: that lead from the output of the call to this one.
    """

    __slots__ = ("call", "parts", "recorder")

    recorder: Recorder
    call: Call
    parts: tuple[Part, ...]

    def __init__(self, recorder: Recorder, call: Call, parts: tuple[Part, ...]) -> None:
        for name, value in (("recorder", recorder), ("call", call), ("parts", parts)):
            object.__setattr__(self, name, value)

    def __getitem__(self, key: Any) -> Output:
        if type(key) not in (str, int):
            refuse(self, f"an item of its output was taken with a key of type {type(key).__name__}")
        return Output(self.recorder, self.call, (*self.parts, key))

    def __iter__(self) -> Iterator[Output]:
        length = self.recorder.length_of(self)
        return iter([Output(self.recorder, self.call, (*self.parts, [index, length])) for index in range(length)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__array", "__cuda_array", "__dlpack")):
            refuse(self, "its output was converted to an array or a tensor")
        refuse(self, f"the attribute {name!r} of its output was read")

    def __setattr__(self, name: str, value: Any) -> None:
        refuse(self, f"the attribute {name!r} of its output was set")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is cls)
        refuse(output, f"torch.{getattr(function, '__name__', function)} was called with its output")

    def __array_function__(self, function: Any, *_: Any) -> Any:
        refuse(self, f"{describe(function)} was called with its output")

    def __array_ufunc__(self, function: Any, *_: Any, **__: Any) -> Any:
        refuse(self, f"numpy.{function.__name__} was called with its output")


def refuse(output: Output, what: str) -> NoReturn:
    """Raise `InputError`: `what` cannot be done with an output that does not exist yet."""
    output.recorder.refuse(output.call.number, what)


def _refusing(name: str) -> Callable[..., Any]:
    what = {"__array__": "its output was converted to an array or a tensor", "__reduce_ex__": "its output was copied"}

    def operation(self: Output, *_: Any, **__: Any) -> Any:
        refuse(self, what.get(name, f"{name} was applied to its output"))

    operation.__name__ = name
    return operation


_BINARY = "add sub mul matmul truediv floordiv mod divmod pow and or xor lshift rshift"
_OTHERS = (
    "neg pos abs invert eq ne lt le gt ge bool int float complex index round trunc floor ceil contains call setitem "
    "delitem enter exit str format bytes hash array reduce_ex"
)
for _name in (*_BINARY.split(), *(f"r{name}" for name in _BINARY.split()), *_OTHERS.split()):
    setattr(Output, f"__{_name}__", _refusing(f"__{_name}__"))


def _kept(value: Any) -> Any:
    """Return `value` as it is now, since a data set may use its buffers again or close its files. Images are read."""

    def keep(leaf: Any) -> Any:
        if type(leaf).__module__.startswith("PIL.") and hasattr(leaf, "load"):
            leaf.load()
            return leaf
        return leaf if type(leaf) is Output else private(leaf)

    return pytree.tree_map(keep, value)
