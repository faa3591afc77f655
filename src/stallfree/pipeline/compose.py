"""`Compose` and `OnItem`: a pipeline as a flat sequence of steps; sources of samples; marks; steps that work in place.

A sample is `random_part(deterministic_part(fetch(id)))`. A *source* separates the two stages: `fetch` does only I/O,
`pipeline` does the rest. Any other map-style data set works too; its `__getitem__` then serves as `fetch`.

In-place steps write their result directly into a batch. A loader that composes a batch in place calls these steps with
`out=`, the batch rows that the sample will fill. A step that makes an array calls `empty`, which returns such a row if
a free one has that shape and dtype, else new memory. The row belongs to the batch, so `out` is passed only if the
classes of all steps are marked `in_place`: such steps neither keep nor change their input.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from torch import nn

from stallfree.errors import InputError, transform_input
from stallfree.pipeline.objects import attribute, comes_from, describe

Transform: TypeAlias = Callable[[Any], Any]
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")
C = TypeVar("C", bound=type)


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
        self.transforms = tuple(step for each in transforms for step in flatten(_callable(each, "Compose")))
        self._calls = tuple(map(as_call, self.transforms))

    def __call__(self, value: Any) -> Any:
        for call in self._calls:
            value = call(value)
        return value

    def into(self, value: Any, out: Any) -> Any:
        """Like a call, with steps that all take `out=`."""
        for step in self.transforms:
            value = step(value, out=out)  # type: ignore[call-arg]
        return value

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)

    def __repr__(self) -> str:
        return f"Compose([{', '.join(describe_step(step) for step in self.transforms)}])"


@runtime_checkable
class Source(Protocol):
    """A map-style data set that separates fetch from prep.

    `fetch` must be thread-safe. `source[id]` equals `source.pipeline(source.fetch(id))`.
    """

    pipeline: Compose
    """Converts the result of `fetch` into the sample, step by step."""

    def __len__(self) -> int: ...

    def __getitem__(self, id: int) -> Any: ...

    def fetch(self, id: int) -> Any:
        """Return the record of sample `id` as stored, for instance `(encoded bytes, label)`. I/O only."""

    def where(self, id: int) -> str:
        """Return the location of the record (a path or URL), for error messages."""

    def fingerprint(self) -> str:
        """Return a text that changes when the records change. It need not cover `pipeline`."""


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
        self.key, self.transform = key, _callable(transform, f"OnItem({key!r}, ...)")
        self._call = as_call(transform)

    def __call__(self, value: Any, out: Any = None) -> Any:
        if not isinstance(value, (tuple, list, Mapping)):
            raise transform_input(f"{self!r} got a {type(value).__name__}: it wants a tuple, a list or a mapping")
        try:
            item = value[self.key]
        except (LookupError, TypeError) as error:
            what = f"{type(value).__name__} of {len(value)} that has no element {self.key!r}"
            raise transform_input(f"{self!r} got a {what}: give a key that is there") from error
        made = self._call(item) if out is None else self.transform(item, out=out)  # type: ignore[call-arg]
        return with_item(value, self.key, made)

    def __repr__(self) -> str:
        return f"OnItem({self.key!r}, {describe_step(self.transform)})"


def _callable(transform: Transform, owner: str) -> Transform:
    if not callable(transform):
        raise InputError(f"{owner} got {transform!r}, which cannot be called: give a function")
    return transform


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
    if type(transform) is OnItem:
        inner = flatten(transform.transform)
        return (transform,) if inner == (transform.transform,) else tuple(OnItem(transform.key, step) for step in inner)
    if is_monai_compose(transform):
        return _flatten_monai(transform)
    cls = type(transform)
    ours = isinstance(transform, Compose) and cls.__call__ is Compose.__call__
    torchvision = cls.__name__ in ("Compose", "Sequential") and comes_from(cls, "torchvision.transforms")
    hooked = attribute(transform, "_forward_hooks") or attribute(transform, "_forward_pre_hooks")
    if ours or ((torchvision or cls is nn.Sequential) and not hooked):
        parts: Any = transform if cls is nn.Sequential else transform.transforms  # type: ignore[attr-defined]
        return tuple(step for part in parts for step in flatten(part))
    return (transform,)


def halves_of(step: Transform) -> tuple[Transform, Transform] | None:
    """Return a deterministic and a random step that together equal `step`; None if it defines none.

    They come from its method `halves()`, unless a subclass overrides `__call__` of the class that defines the method.
    """
    if type(step) is OnItem:
        inner = halves_of(step.transform)
        return inner and (OnItem(step.key, inner[0]), OnItem(step.key, inner[1]))
    defining = next((cls for cls in type(step).__mro__ if vars(cls).keys() & {"halves", "__call__"}), object)
    return step.halves() if "halves" in vars(defining) else None  # type: ignore[attr-defined]


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
        f"{describe(step)} got a {type(value).__name__}: albumentations wants a NumPy array, or a mapping such as "
        "{'image': array}; put a step before it that converts"
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


def _flatten_monai(compose: Any) -> tuple[Transform, ...]:
    """Return one `Compose` per step, so that MONAI maps each step over lists of samples as before."""
    options = (getattr(compose, name, False) for name in ("unpack_items", "lazy", "overrides"))
    if compose.map_items not in (True, 1) or any(options):
        return (compose,)
    steps: list[Transform] = []
    for part in compose.transforms:
        inner = flatten(part) if is_monai_compose(part) else (part,)
        if inner == (part,):
            single = copy.copy(compose)  # the constructor would reseed the step
            single.transforms = (part,)
            inner = (compose if len(compose.transforms) == 1 else single,)
        steps += inner
    return tuple(steps)


# --- marks -----------------------------------------------------------------------------------------------------------

MARK = "_stallfree_random"
"""Name of the attribute that carries a mark: True for random, False for deterministic."""

DREW = "_stallfree_drew"
"""Name of the attribute of a transform or data set that was observed to draw random numbers."""


def mark_random(transform: T) -> T:
    """Mark `transform` as random: its output may differ for the same input.

    Returns `transform` itself.

    Works on functions, classes (also as a decorator) and instances, and takes precedence over any other evidence. A
    class marked random marks its subclasses too. The mark is an attribute of `transform`.

    Raises `InputError` for what takes no attributes: a builtin, a bound method, an instance with slots. Mark a
    `functools.partial` of it.

    Example:
        ```python
        @sf.mark_random
        def shake(volume):
            return volume + np.random.normal(size=volume.shape)
        ```
    """
    return _mark(transform, True)


def mark_deterministic(transform: T) -> T:
    """Mark `transform` as deterministic: its output is the same for the same input.

    Returns `transform` itself.

    Works like `mark_random`, but a class marked deterministic does not mark its subclasses, which may add randomness.

    Example:
        ```python
        @sf.mark_deterministic
        def window(volume):
            return volume.clip(-57, 164)
        ```
    """
    return _mark(transform, False)


def mark_of(transform: object) -> bool | None:
    """Return True if `transform` is marked random, False if it is marked deterministic, None without a mark."""
    mark = attribute(transform, MARK)
    if mark is False:  # of `transform` itself or of its class, not inherited from a base class
        own = MARK in attribute(transform, "__dict__", ())
        return mark if own or (not isinstance(transform, type) and MARK in vars(type(transform))) else None
    return mark if mark is True else None


def note_drew(transform: object) -> bool:
    """Record, in this process and in pickles, that `transform` drew. Returns False if this is known already."""
    is_known = drew(transform)
    _note(transform, DREW, True)
    return not is_known


def drew(transform: object) -> bool:
    """Return whether `note_drew` was called with `transform`."""
    return attribute(transform, DREW) is True


def _mark(transform: T, random: bool) -> T:
    if not callable(transform) and not hasattr(type(transform), "__getitem__"):
        raise InputError(f"{transform!r:.80} cannot be marked: give a transform, a class of them, or a data set")
    if not _note(transform, MARK, random):
        name = describe(transform)
        raise InputError(f"{transform!r:.80} takes no attributes, so no mark: mark functools.partial({name})")
    return transform


def _note(thing: object, name: str, value: bool) -> bool:
    """Set an attribute, also that of a frozen dataclass; return False if `thing` takes none."""
    try:
        (type if isinstance(thing, type) else object).__setattr__(thing, name, value)
    except (AttributeError, TypeError):
        return False
    return True


# --- steps that work in place ----------------------------------------------------------------------------------------

_IN_PLACE = "_stallfree_in_place"


Out: TypeAlias = list[Array]
"""Free rows of a batch that one sample may fill."""


def in_place(cls: C) -> C:
    """Mark a class, but not its subclasses: its steps take `out=` and follow the rules above."""
    setattr(cls, _IN_PLACE, cls)
    return cls


def works_in_place(step: Transform) -> bool:
    """Return whether the class of `step` is marked."""
    inner: Any = step.transform if type(step) is OnItem else step
    return getattr(inner, _IN_PLACE, None) is type(inner)


def empty(out: Out | None, shape: tuple[int, ...], dtype: Any = np.uint8) -> Array:
    """Return an uninitialised array: a free row of `out`, or a new one."""
    if out is not None:
        for at, row in enumerate(out):
            if row.shape == shape and row.dtype == dtype:
                return out.pop(at)
    return np.empty(shape, dtype)
