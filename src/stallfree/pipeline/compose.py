"""`Compose`: a pipeline as a flat sequence of steps."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from torch import nn

from stallfree.errors import InputError, transform_input
from stallfree.pipeline._objects import attribute, comes_from, describe
from stallfree.pipeline.marks import mark_of

Transform: TypeAlias = Callable[[Any], Any]


class Compose:
    """Applies `transforms` one after the other.

    Nested compositions are flattened (see `flatten`), so `.transforms` is a flat sequence of steps. An albumentations
    transform can be a step: it gets a mapping as its named arguments, or a NumPy array as `image`.

    Raises `InputError` if `transforms` is not an iterable of callables.

    Example:
        ```python
        steps = sf.Compose([resize, sf.Compose([flip, to_tensor])])
        assert len(steps.transforms) == 3
        tensor = steps(image)
        ```
    """

    transforms: tuple[Transform, ...]
    """The steps, in order."""

    def __init__(self, transforms: Iterable[Transform] = ()) -> None:
        if not isinstance(transforms, Iterable):
            raise InputError(f"Compose got {transforms!r}: give a list, such as Compose([decode, resize])")
        steps: list[Transform] = []
        for place, transform in enumerate(transforms):
            if not callable(transform):
                raise InputError(
                    f"transform {place} of Compose is {transform!r}, which cannot be called: give a function"
                )
            steps += flatten(transform)
        self.__setstate__({"transforms": tuple(steps)})

    def __call__(self, value: Any) -> Any:
        for call in self._calls:
            value = call(value)
        return value

    def into(self, value: Any, out: Any) -> Any:
        """Like a call, with steps that all take `out=`: see in_place.py."""
        for step in self.transforms:
            value = step(value, out=out)  # type: ignore[call-arg]
        return value

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)

    def __repr__(self) -> str:
        return f"Compose([{', '.join(describe_step(step) for step in self.transforms)}])"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_calls"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._calls = tuple(map(as_call, self.transforms))


class OnItem:
    """Applies `transform` to one element of a container and leaves the others unchanged.

    The container is a tuple, named tuple or list (`key` is a position) or a mapping (`key` is any of its keys). The
    result is a new container of the same type; the input is not changed. `transform` may be anything that a `Compose`
    accepts.

    Raises `InputError` if it is created with a `transform` that is not callable, and when it is called with a value
    that is not a container or has no element `key`.

    Example:
        ```python
        step = sf.OnItem(0, resize)
        small, label = step((image, 7))
        assert small.shape == (16, 16, 3) and label == 7
        ```
    """

    key: Any
    transform: Transform

    def __init__(self, key: Any, transform: Transform) -> None:
        if not callable(transform):
            raise InputError(f"OnItem({key!r}, ...) got {transform!r}, which cannot be called: give a function")
        self.__setstate__({"key": key, "transform": transform})

    def __call__(self, value: Any, out: Any = None) -> Any:
        if not isinstance(value, (tuple, list, Mapping)):
            raise transform_input(f"{self!r} got a {type(value).__name__}: it wants a tuple, a list or a mapping")
        try:
            item = value[self.key]
        except (LookupError, TypeError) as error:
            given = f"{type(value).__name__} of {len(value)}"
            raise transform_input(
                f"{self!r} got a {given} that has no element {self.key!r}: give a key that is there"
            ) from error
        made = self._call(item) if out is None else self.transform(item, out=out)  # type: ignore[call-arg]
        return with_item(value, self.key, made)

    def __repr__(self) -> str:
        return f"OnItem({self.key!r}, {describe_step(self.transform)})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_call"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._call = as_call(self.transform)


def flatten(transform: Transform | None) -> tuple[Transform, ...]:
    """Return the steps that `transform` applies in sequence; `()` for None, `(transform,)` for a single step.

    Flattened, at any depth, are our `Compose`, `OnItem` of anything that can be flattened, torchvision's `Compose` (v1
    and v2), `torch.nn.Sequential`, and MONAI's `Compose` with default settings. A step of MONAI's `Compose` stays
    wrapped in a `Compose` of one, which maps it over lists as MONAI does.

    Not flattened are marked transforms; subclasses, and modules with hooks; transforms that choose at random
    (`RandomApply`, `OneOf`, ...); albumentations' `Compose`, whose steps take named arguments; and MONAI's `Compose`
    that is lazy or sets `map_items`, `unpack_items` or `overrides`.
    """
    if transform is None:
        return ()
    if mark_of(transform) is not None:
        return (transform,)
    if isinstance(transform, Compose) and type(transform).__call__ is Compose.__call__:
        return tuple(step for part in transform.transforms for step in flatten(part))
    if type(transform) is OnItem:
        inner = flatten(transform.transform)
        if len(inner) == 1 and inner[0] is transform.transform:
            return (transform,)
        return tuple(OnItem(transform.key, step) for step in inner)
    if is_monai_compose(transform):
        return _flatten_monai(transform)
    parts = _sequence_in(transform)
    if parts is None:
        return (transform,)
    return tuple(step for part in parts for step in flatten(part))


def halves_of(step: Transform) -> tuple[Transform, Transform] | None:
    """Return a deterministic and a random step that together equal `step`; None if it defines none.

    They come from its method `halves()`, unless a subclass overrides `__call__` of the class that defines the method.
    """
    if type(step) is OnItem:
        inner = halves_of(step.transform)
        return inner and (OnItem(step.key, inner[0]), OnItem(step.key, inner[1]))
    for cls in type(step).__mro__:
        if "halves" in vars(cls):
            halves: tuple[Transform, Transform] | None = step.halves()  # type: ignore[attr-defined]
            return halves
        if "__call__" in vars(cls):
            return None
    return None


def is_monai_compose(transform: Any) -> bool:
    """Return whether `transform` is exactly MONAI's `Compose`, not a subclass such as `OneOf`."""
    return type(transform).__name__ == "Compose" and comes_from(type(transform), "monai.transforms")


def is_albumentations(transform: object) -> bool:
    """Return whether `transform` is a transform or a composition of albumentations."""
    return any(
        cls.__name__ in ("BasicTransform", "BaseCompose") and comes_from(cls, "albumentations")
        for cls in type(transform).__mro__
    )


def as_call(step: Transform) -> Transform:
    """Return `step` as a callable of one value."""
    return functools.partial(call_albumentations, step) if is_albumentations(step) else step


def call_albumentations(step: Callable[..., Any], value: Any) -> Any:
    """Apply an albumentations `step` to a mapping of named arguments, or to an array as its `image`."""
    if isinstance(value, Mapping):
        return step(**value)
    if isinstance(value, np.ndarray):
        return step(image=value)["image"]
    raise transform_input(
        f"{describe(step)} got a {type(value).__name__}: albumentations wants a NumPy array (height, width, channels) "
        "or a mapping such as {'image': array}; put a step before it that converts"
    )


def with_item(container: Any, key: Any, item: Any) -> Any:
    """Return a copy of `container` (tuple, named tuple, list or mapping) with `item` at `key`."""
    if isinstance(container, tuple):
        items = list(container)
        items[key] = item
        return container._make(items) if hasattr(container, "_make") else type(container)(items)
    changed = copy.copy(container)
    changed[key] = item
    return changed


def describe_step(step: Transform) -> str:
    """Return a short name of `step` for messages."""
    if type(step) is OnItem:
        return repr(step)
    if is_monai_compose(step) and len(step.transforms) == 1:  # type: ignore[attr-defined]
        return describe_step(step.transforms[0])  # type: ignore[attr-defined]
    return describe(step)


def _sequence_in(transform: Any) -> tuple[Transform, ...] | None:
    """Return the parts of a torchvision `Compose` or a `torch.nn.Sequential`; None for anything else."""
    cls = type(transform)
    if attribute(transform, "_forward_hooks") or attribute(transform, "_forward_pre_hooks"):
        return None
    if cls is nn.Sequential:
        return tuple(transform)
    if cls.__name__ == "Compose" and comes_from(cls, "torchvision.transforms"):
        return tuple(transform.transforms)
    if cls.__name__ == "Sequential" and comes_from(cls, "torchvision.transforms.v2"):
        return tuple(transform.transforms)
    return None


def _flatten_monai(compose: Any) -> tuple[Transform, ...]:
    """Return one `Compose` per step, so that MONAI maps each step over lists of samples as before."""
    usual = (
        compose.map_items in (True, 1)
        and not getattr(compose, "unpack_items", False)
        and not getattr(compose, "lazy", False)
        and not getattr(compose, "overrides", None)
    )
    if not usual:
        return (compose,)
    steps: list[Transform] = []
    for part in compose.transforms:
        inner = flatten(part) if is_monai_compose(part) else (part,)
        if is_monai_compose(part) and inner != (part,):
            steps += inner
        elif len(compose.transforms) == 1:
            steps.append(compose)
        else:
            single = copy.copy(compose)  # the constructor would reseed the step
            single.transforms = (part,)
            steps.append(single)
    return tuple(steps)
