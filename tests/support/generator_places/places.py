"""The places. Each step flips its input if the next number of its generator is small."""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

import generator_places.sub.held
from generator_places import P
from generator_places.held import IMPORTED
from generator_places.tools import flipped, made, method_of

Step = Callable[[Any], Any]
STEPS: dict[str, Step] = {}


def place(step: Any) -> Any:
    STEPS[getattr(step, "__name__", type(step).__name__)] = step
    return step


# -- modules and functions -------------------------------------------------------------------------------------------

GLOBAL = made()


@place
def module_level(x: Any) -> Any:
    return flipped(x, GLOBAL)


@place
def imported_by_name(x: Any) -> Any:
    return flipped(x, IMPORTED)


@place
def two_dots_away(x: Any) -> Any:
    return flipped(x, generator_places.sub.held.FAR)


@place
def imported_in_the_function(x: Any) -> Any:
    from generator_places.held import LATE

    return flipped(x, LATE)


LOOKED_UP = made()


@place
def through_globals(x: Any) -> Any:
    return flipped(x, globals()["LOOKED_UP"])


OF_MODULES = made()


@place
def through_sys_modules(x: Any) -> Any:
    return flipped(x, sys.modules[__name__].OF_MODULES)


_lazy: Any = None


@place
def lazy_global(x: Any) -> Any:
    global _lazy
    if _lazy is None:
        _lazy = made()
    return flipped(x, _lazy)


@place
def function_attribute(x: Any) -> Any:
    return flipped(x, function_attribute.source)


function_attribute.source = made()


@place
def default_argument(x: Any, source: Any = made()) -> Any:  # noqa: B008
    return flipped(x, source)


@place
def keyword_only_default(x: Any, *, source: Any = made()) -> Any:  # noqa: B008
    return flipped(x, source)


def _enclosing() -> Step:
    source = made()

    def closure(x: Any) -> Any:
        return flipped(x, source)

    return closure


place(_enclosing())


@functools.lru_cache
def _cached() -> Any:
    return made()


@place
def lru_cached(x: Any) -> Any:
    return flipped(x, _cached())


next_number = method_of(made())


@place
def bound_method(x: Any) -> Any:
    return -x if next_number() < P else x


def _numbers() -> Iterator[float]:
    draw = method_of(made())
    while True:
        yield draw()


stream = _numbers()


@place
def python_generator(x: Any) -> Any:
    return -x if next(stream) < P else x


def _flip_by(source: Any, x: Any) -> Any:
    return flipped(x, source)


STEPS["partial"] = functools.partial(_flip_by, made())


# -- classes and objects ---------------------------------------------------------------------------------------------


class Config:
    source = made()


@place
def class_attribute(x: Any) -> Any:
    return flipped(x, Config.source)


class Single:
    _source = made()

    @classmethod
    def get(cls) -> Any:
        return cls._source


@place
def class_method(x: Any) -> Any:
    return flipped(x, Single.get())


class Static:
    source = made()

    @staticmethod
    def flip(x: Any) -> Any:
        return flipped(x, Static.source)


STEPS["static_method"] = Static.flip


class ClassLevel:
    source = made()

    def __call__(self, x: Any) -> Any:
        return flipped(x, self.source)


STEPS["own_class_attribute"] = ClassLevel()


class ClassLevelList:
    sources = (made(),)

    def __call__(self, x: Any) -> Any:
        return flipped(x, self.sources[0])


STEPS["own_class_level_list"] = ClassLevelList()


class Instance:
    def __init__(self) -> None:
        self.source = made()

    def __call__(self, x: Any) -> Any:
        return flipped(x, self.source)


STEPS["instance"] = Instance()
STEPS["method_of_an_instance"] = Instance().__call__


class WithProperty:
    shared = made()

    @property
    def source(self) -> Any:
        return WithProperty.shared

    def __call__(self, x: Any) -> Any:
        return flipped(x, self.source)


STEPS["property"] = WithProperty()


class Descriptor:
    source = made()

    def __get__(self, thing: Any, kind: Any = None) -> Any:
        return self.source


class WithDescriptor:
    source = Descriptor()

    def __call__(self, x: Any) -> Any:
        return flipped(x, self.source)


STEPS["descriptor"] = WithDescriptor()


class WithSlots:
    __slots__ = ("source",)

    def __init__(self) -> None:
        self.source = made()

    def __call__(self, x: Any) -> Any:
        return flipped(x, self.source)


STEPS["slots"] = WithSlots()


class Meta(type):
    source = made()


class WithMeta(metaclass=Meta):
    def __call__(self, x: Any) -> Any:
        return flipped(x, type(self).source)


STEPS["metaclass"] = WithMeta()


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = made()

    def forward(self, x: Any) -> Any:
        return flipped(x, self.source)


STEPS["nn_module"] = Module()


# -- containers ------------------------------------------------------------------------------------------------------

NAMESPACE = types.SimpleNamespace(source=made())


@place
def namespace(x: Any) -> Any:
    return flipped(x, NAMESPACE.source)


TOOLS = {"sources": [(made(),)]}


@place
def nested_containers(x: Any) -> Any:
    return flipped(x, TOOLS["sources"][0][0])


QUEUE = collections.deque([made()])


@place
def in_a_deque(x: Any) -> Any:
    return flipped(x, QUEUE[0])


class Sources(enum.Enum):
    FIRST = made()


@place
def in_an_enum(x: Any) -> Any:
    return flipped(x, Sources.FIRST.value)


class Holder:
    def __init__(self) -> None:
        self.source = made()


KEPT = Holder()
WEAK = weakref.ref(KEPT)


@place
def behind_a_weak_reference(x: Any) -> Any:
    holder = WEAK()
    assert holder is not None
    return flipped(x, holder.source)


WEAK_VALUES = weakref.WeakValueDictionary({"source": KEPT})


@place
def in_a_weak_dictionary(x: Any) -> Any:
    return flipped(x, WEAK_VALUES["source"].source)


VARIABLE = contextvars.ContextVar("source", default=made())  # noqa: B039


@place
def context_variable(x: Any) -> Any:
    return flipped(x, VARIABLE.get())


LOCAL = threading.local()


@place
def thread_local(x: Any) -> Any:
    if not hasattr(LOCAL, "source"):
        LOCAL.source = made()
    return flipped(x, LOCAL.source)
