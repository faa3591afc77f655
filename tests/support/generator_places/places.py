"""The places. Each step flips its input if the next number of its generator is small."""

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

GLOBAL, LOOKED_UP, OF_MODULES, _lazy = made(), made(), made(), None


def imported_in_the_function(x: Any) -> Any:
    from generator_places.held import LATE

    return flipped(x, LATE)


def lazy_global(x: Any) -> Any:
    global _lazy
    if _lazy is None:
        _lazy = made()
    return flipped(x, _lazy)


def function_attribute(x: Any) -> Any:
    return flipped(x, function_attribute.source)


function_attribute.source = made()


def default_argument(x: Any, source: Any = made()) -> Any:  # noqa: B008
    return flipped(x, source)


def keyword_only_default(x: Any, *, source: Any = made()) -> Any:  # noqa: B008
    return flipped(x, source)


def _enclosing() -> Callable[[Any], Any]:
    source = made()
    return lambda x: flipped(x, source)


@functools.lru_cache
def _cached() -> Any:
    return made()


def _numbers() -> Iterator[float]:
    draw = method_of(made())
    while True:
        yield draw()


def _flip_by(source: Any, x: Any) -> Any:
    return flipped(x, source)


next_number, stream = method_of(made()), _numbers()

STEPS: dict[str, Callable[[Any], Any]] = {
    "module_level": lambda x: flipped(x, GLOBAL), "imported_by_name": lambda x: flipped(x, IMPORTED),
    "two_dots_away": lambda x: flipped(x, generator_places.sub.held.FAR),
    "imported_in_the_function": imported_in_the_function,
    "through_globals": lambda x: flipped(x, globals()["LOOKED_UP"]),
    "through_sys_modules": lambda x: flipped(x, sys.modules[__name__].OF_MODULES), "lazy_global": lazy_global,
    "function_attribute": function_attribute, "default_argument": default_argument,
    "keyword_only_default": keyword_only_default, "closure": _enclosing(),
    "lru_cached": lambda x: flipped(x, _cached()), "bound_method": lambda x: -x if next_number() < P else x,
    "python_generator": lambda x: -x if next(stream) < P else x, "partial": functools.partial(_flip_by, made()),
}  # fmt: skip


class Config:
    source = made()

    @classmethod
    def get(cls) -> Any:
        return cls.source

    @staticmethod
    def flip(x: Any) -> Any:
        return flipped(x, Config.source)


class Step:
    __slots__ = ()
    source: Any

    def __call__(self, x: Any) -> Any:
        return flipped(x, self.source)


class ClassLevel(Step):
    source = made()


class ClassLevelList:
    sources = (made(),)

    def __call__(self, x: Any) -> Any:
        return flipped(x, self.sources[0])


class Instance(Step):
    def __init__(self) -> None:
        self.source = made()


class WithProperty(Step):
    shared = made()
    source = property(lambda self: WithProperty.shared)


class Descriptor:
    source = made()

    def __get__(self, thing: Any, kind: Any = None) -> Any:
        return self.source


class WithDescriptor(Step):
    source = Descriptor()


class WithSlots(Step):
    __slots__ = ("source",)

    def __init__(self) -> None:
        self.source = made()


class Meta(type):
    source = made()


class WithMeta(metaclass=Meta):
    def __call__(self, x: Any) -> Any:
        return flipped(x, type(self).source)


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = made()

    def forward(self, x: Any) -> Any:
        return flipped(x, self.source)


STEPS |= {
    "class_attribute": lambda x: flipped(x, Config.source), "class_method": lambda x: flipped(x, Config.get()),
    "static_method": Config.flip,
    "own_class_attribute": ClassLevel(), "own_class_level_list": ClassLevelList(), "instance": Instance(),
    "method_of_an_instance": Instance().__call__, "property": WithProperty(), "descriptor": WithDescriptor(),
    "slots": WithSlots(), "metaclass": WithMeta(), "nn_module": Module(),
}  # fmt: skip


class Sources(enum.Enum):
    FIRST = made()


NAMESPACE, TOOLS, QUEUE = types.SimpleNamespace(source=made()), {"sources": [(made(),)]}, collections.deque([made()])
KEPT = Instance()
WEAK, WEAK_VALUES = weakref.ref(KEPT), weakref.WeakValueDictionary({"source": KEPT})
VARIABLE = contextvars.ContextVar("source", default=made())  # noqa: B039
LOCAL = threading.local()


def thread_local(x: Any) -> Any:
    if not hasattr(LOCAL, "source"):
        LOCAL.source = made()
    return flipped(x, LOCAL.source)


STEPS |= {
    "namespace": lambda x: flipped(x, NAMESPACE.source),
    "nested_containers": lambda x: flipped(x, TOOLS["sources"][0][0]), "in_a_deque": lambda x: flipped(x, QUEUE[0]),
    "in_an_enum": lambda x: flipped(x, Sources.FIRST.value),
    "behind_a_weak_reference": lambda x: flipped(x, WEAK().source),  # type: ignore[union-attr]
    "in_a_weak_dictionary": lambda x: flipped(x, WEAK_VALUES["source"].source),
    "context_variable": lambda x: flipped(x, VARIABLE.get()), "thread_local": thread_local,
}  # fmt: skip
