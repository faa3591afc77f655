"""The registry of transforms by name: ours, MONAI's, the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from stallfree.clara import augment, nifti, transforms
from stallfree.clara.configuration import Component, component
from stallfree.clara.fields import FieldTransform
from stallfree.errors import InputError, MissingExtraError, clara_configuration, text_of
from stallfree.pipeline.compose import Transform

TRANSFORMS: dict[str, type[FieldTransform]] = {
    name: cls
    for module in (nifti, transforms, augment)
    for name, cls in vars(module).items()
    if getattr(cls, "__module__", "") == module.__name__ and isinstance(cls, type)
}
"""The transforms of stallfree, by name: the classes of these modules."""


def make_transforms(entries: Any, place: str) -> list[Transform]:
    """Create the transforms of `entries`, the list at `place` of the configuration.

    Raises `InputError` for the first invalid one, `MissingExtraError` if it needs a missing package.
    """
    if not isinstance(entries, list) or not entries:
        raise clara_configuration(
            f"{place} is {entries!r}, expected a list of transforms, of which the first loads: "
            '[{"name": "LoadNifti", "args": {"fields": ["image", "label"]}}, ...]'
        )
    return [_make(component(entry, f"{place}[{number}]")) for number, entry in enumerate(entries)]


def reads_bytes(steps: Sequence[Transform]) -> bool:
    """Return whether the first step takes the bytes of files instead of their paths."""
    return isinstance(steps[0], nifti.LoadNifti)


def _make(wanted: Component) -> Transform:
    cls = _own(wanted) if wanted.path else TRANSFORMS.get(wanted.name) or _of_monai(wanted)
    place = f"{wanted.place} ({wanted.name or wanted.path})"
    _check_arguments(cls, wanted.args, place)
    try:
        made = cls(**wanted.args)
    except MissingExtraError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise clara_configuration(f"{place} cannot be made: {kind}{text_of(error)}") from error
    if not callable(made):
        raise clara_configuration(f"{place} is no transform: its instances cannot be called with a sample")
    transform: Transform = made
    return transform


def _own(wanted: Component) -> Callable[..., Any]:
    """Import the class at "module.Class"."""
    module, _, name = wanted.path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise clara_configuration(
            f'{wanted.place}: {wanted.path!r} cannot be imported ({error}): give "module.Class", with the module on '
            "Python's path"
        ) from error
    if not callable(found):
        raise clara_configuration(f"{wanted.place}: {wanted.path!r} is a {type(found).__name__}, expected a class")
    return found


def _of_monai(wanted: Component) -> Callable[..., Any]:
    """Return MONAI's transform of that name."""
    ours = f"the transforms of stallfree are {', '.join(TRANSFORMS)}"
    try:
        library = import_module("monai.transforms")
    except ImportError as error:
        raise clara_configuration(
            f"{wanted.place}: {wanted.name!r} is no transform of stallfree, and MONAI, whose names work too, is not "
            f"installed (pip install monai): {ours}"
        ) from error
    found = getattr(library, wanted.name, None)
    if not isinstance(found, type) or not issubclass(found, library.Transform):
        version = getattr(import_module("monai"), "__version__", "")
        raise clara_configuration(
            f"{wanted.place}: {wanted.name!r} is a transform neither of stallfree nor of MONAI {version}: {ours}; "
            'for one of your own give {"path": "module.Class"}'
        )
    return found


def _check_arguments(cls: Callable[..., Any], args: dict[str, Any], place: str) -> None:
    """Raise `InputError` for unknown and missing arguments of `cls`."""
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):  # a class of a C library
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        raise clara_configuration(
            f"{place}: {error}: its arguments are {', '.join(map(str, signature.parameters.values())) or 'none'}"
        ) from error
