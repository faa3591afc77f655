"""Inspection of Python objects: the origin of their code, and the names that a function uses."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

_LIBRARIES = {
    *("stallfree", "torch", "torchvision", "torchaudio", "numpy", "scipy", "PIL", "cv2", "monai", "albumentations"),
}
"""Libraries wherever they are installed: some containers and builds from source have them outside of site-packages."""


def attribute(thing: object, name: str, default: Any = None) -> Any:
    """As `getattr`, for any object: one whose own code raises something else than `AttributeError` has no attribute."""
    try:
        return getattr(thing, name, default)
    except Exception:
        return default


@functools.cache
def library_version(module: str) -> str | None:
    """Return the version of the installed library that contains `module`; None for the user's own code.

    Library code is the standard library, this package, and installed packages with a version.
    """
    top = module.partition(".")[0]
    if top == "builtins" or top in sys.stdlib_module_names:
        return "python"
    package = sys.modules.get(top)
    if top in _LIBRARIES and package is not None:
        return str(attribute(package, "__version__", "unknown"))
    places = [getattr(package, "__file__", None), *getattr(package, "__path__", ())]
    if not any({"site-packages", "dist-packages"} & set(PurePath(place).parts) for place in places if place):
        return None
    version = getattr(package, "__version__", None)
    if version is not None:
        return str(version)
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_library(thing: object) -> bool:
    """Return whether the function, class or module `thing` belongs to an installed library, not to the user."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return isinstance(name, str) and library_version(name) is not None


def comes_from(thing: type, library: str) -> bool:
    """Return whether class `thing` is defined in the package `library`, such as `"monai"`, or in a part of it."""
    module = str(getattr(thing, "__module__", ""))
    return module == library or module.startswith(library + ".")


def code_names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes used by `code` and the code nested in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= code_names(constant)
    return names


def used_globals(function: FunctionType) -> dict[str, Any]:
    """Return the module-level values that `function` uses, by name, including those of user modules (`tools.scale`)."""
    names = code_names(function.__code__)
    found: dict[str, Any] = {}
    for name in sorted(names & function.__globals__.keys()):
        value = found[name] = function.__globals__[name]
        if isinstance(value, ModuleType) and not is_library(value):
            found |= {f"{name}.{part}": vars(value)[part] for part in sorted(names & vars(value).keys())}
    return found


def closure_values(function: FunctionType) -> dict[str, Any]:
    """Return the closure values of `function` by name, without empty cells."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def class_functions(cls: type) -> Iterator[FunctionType]:
    """Yield the functions defined in the body of `cls`, including properties, class methods and static methods."""
    for member in vars(cls).values():
        for name in ("__func__", "fget", "fset", "func"):
            inner = attribute(member, name)
            if isinstance(inner, FunctionType):
                yield inner
        if isinstance(member, FunctionType):
            yield member


def attributes(thing: object) -> dict[str, Any]:
    """Return the attributes that `thing` itself holds, in its `__dict__` or in slots."""
    found: dict[str, Any] = dict(attribute(thing, "__dict__", ()))
    for cls in type(thing).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{cls.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                found[name] = getattr(thing, name)
    return found


def describe(transform: Any) -> str:
    """Return a short name for messages, such as `torchvision.transforms.Resize` or `load.<locals>.<lambda>`."""
    if isinstance(transform, functools.partial):
        return f"partial({describe(transform.func)})"
    thing = transform if attribute(transform, "__qualname__") else type(transform)
    name = str(getattr(thing, "__qualname__", thing))
    module = str(getattr(thing, "__module__", None) or "")
    return name if module in ("", "__main__", "builtins") else f"{module}.{name}"
