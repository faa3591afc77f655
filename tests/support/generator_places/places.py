"""The places. Each step flips its input if the next number of its generator is small."""

import contextvars
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

import generator_places
from generator_places import HIDDEN, P

if HIDDEN:
    import generator_places.hidden as tools
else:
    import generator_places.named as tools  # type: ignore[no-redef]

flipped, made = tools.flipped, tools.made
GLOBAL, _lazy = made(), None
LOCAL, VARIABLE = threading.local(), contextvars.ContextVar("source", default=made())  # noqa: B039
NAMESPACE = types.SimpleNamespace(sources=[{"source": (made(),)}])


def lazy_global(x: Any) -> Any:
    global _lazy
    if _lazy is None:
        _lazy = made()
    return flipped(x, _lazy)


def thread_local(x: Any) -> Any:
    if not hasattr(LOCAL, "source"):
        LOCAL.source = made()
    return flipped(x, LOCAL.source)


def default_argument(x: Any, *, source: Any = made()) -> Any:  # noqa: B008
    return flipped(x, source)


def _enclosing() -> Callable[[Any], Any]:
    source = made()
    return lambda x: flipped(x, source)


@functools.lru_cache
def _cached() -> Any:
    return made()


def _numbers() -> Iterator[float]:
    draw = tools.method_of(made())
    while True:
        yield draw()


def _flip_by(source: Any, x: Any) -> Any:
    return flipped(x, source)


class Config:
    source = made()

    @staticmethod
    def flip(x: Any) -> Any:
        return flipped(x, Config.source)


class Instance:
    __slots__ = ("__weakref__", "source")

    def __init__(self) -> None:
        self.source = made()

    @property
    def behind(self) -> Any:
        return self.source

    def __call__(self, x: Any) -> Any:
        return flipped(x, self.behind)


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = made()

    def forward(self, x: Any) -> Any:
        return flipped(x, self.source)


KEPT, stream, next_number = Instance(), _numbers(), tools.method_of(made())
WEAK = weakref.ref(KEPT)

STEPS: dict[str, Callable[[Any], Any]] = {
    "module_level": lambda x: flipped(x, GLOBAL),
    "two_dots_away": lambda x: flipped(x, generator_places.places.tools.FAR),  # type: ignore[attr-defined]
    "lazy_global": lazy_global,
    "thread_local": thread_local,
    "context_variable": lambda x: flipped(x, VARIABLE.get()),
    "default_argument": default_argument,
    "closure": _enclosing(),
    "lru_cached": lambda x: flipped(x, _cached()),
    "bound_method": lambda x: -x if next_number() < P else x,
    "python_generator": lambda x: -x if next(stream) < P else x,
    "partial": functools.partial(_flip_by, made()),
    "class_attribute": lambda x: flipped(x, Config.source),
    "static_method": Config.flip,
    "instance": Instance(),
    "nn_module": Module(),
    "nested_containers": lambda x: flipped(x, NAMESPACE.sources[0]["source"][0]),
    "behind_a_weak_reference": lambda x: flipped(x, WEAK().source),  # type: ignore[union-attr]
}
