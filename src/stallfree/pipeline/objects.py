"""Inspection of Python objects: the origin of their code, and the values that a function names."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import xxhash

LIBRARIES = {
    *sys.stdlib_module_names,
    *("builtins", "typing_extensions", "stallfree", "torch", "torchvision", "torchaudio", "torchcodec", "numpy"),
    *("scipy", "pandas", "polars", "pyarrow", "numba", "sklearn", "PIL", "cv2", "skimage", "imageio", "tifffile"),
    *("simplejpeg", "turbojpeg", "kornia", "timm", "albumentations", "albucore", "monai", "nibabel", "SimpleITK"),
    *("pydicom", "h5py", "zarr", "numcodecs", "netCDF4", "xarray", "lmdb", "msgpack", "fsspec", "s3fs", "gcsfs"),
    *("boto3", "botocore", "requests", "soundfile", "librosa", "decord", "av", "transformers", "tokenizers"),
    *("datasets", "huggingface_hub", "safetensors", "webdataset", "lightning", "pytorch_lightning", "accelerate"),
    *("ray", "redis", "tqdm", "loguru", "rich", "yaml", "attr", "attrs", "einops", "tensorboard"),
}
"""Libraries whose code is not looked at: it is identified by a version, and its outcomes show whether it is random.

All other code is the user's, also that of a project that is installed.
"""
_MOST_FILES = 1024


def attribute(thing: object, name: str, default: Any = None) -> Any:
    """As `getattr`, for any object: one whose own code raises something else than `AttributeError` has no attribute."""
    try:
        return getattr(thing, name, default)
    except Exception:
        return default


def is_known(module: str) -> bool:
    """Return whether `module` belongs to the standard library or to a known library."""
    return module.partition(".")[0] in LIBRARIES


def library_version(module: str) -> str | None:
    """Return the version of the library that contains `module`; None for the user's own code."""
    top = module.partition(".")[0]
    if top not in LIBRARIES:
        return None
    standard = top == "builtins" or top in sys.stdlib_module_names
    return "python" if standard else str(attribute(sys.modules.get(top), "__version__", "unknown"))


def module_of(thing: Any) -> str:
    """Return the module where the code of a function, class or module is; "builtins" if it names none.

    A decorator of a library gives its functions the name of another module.
    """
    names = thing.__globals__ if isinstance(thing, FunctionType) else {}
    name = names.get("__name__", attribute(thing, "__name__" if isinstance(thing, ModuleType) else "__module__"))
    return name if isinstance(name, str) else "builtins"


def is_library(thing: object) -> bool:
    """Return whether the function, class or module `thing` belongs to a library, not to the user."""
    return is_known(module_of(thing))


def comes_from(thing: type, library: str) -> bool:
    """Return whether class `thing` is defined in the package `library`, such as `"monai"`, or in a part of it."""
    module = str(getattr(thing, "__module__", ""))
    return module == library or module.startswith(library + ".")


# --- what code names -------------------------------------------------------------------------------------------------


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and the code nested in it, without that of annotations."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_name != "__annotate__":
            yield from codes(constant)


def code_names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes used by `code` and the code nested in it."""
    return {name for part in codes(code) for name in part.co_names}


@functools.lru_cache(maxsize=4096)
def _uses(code: CodeType, package: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names of globals that `code` of `package` reads, and the full names of modules that it may import."""
    names, modules = set(), []
    for part in codes(code):
        loaded: list[Any] = [0, None]  # the level of an import and the names after "from" are loaded before it
        for step in dis.get_instructions(part):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(step.argval)
            elif step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                loaded = [loaded[1], step.argval]
            elif step.opname == "IMPORT_NAME":
                with contextlib.suppress(ImportError):  # beyond the top of its package
                    name = importlib.util.resolve_name("." * loaded[0] + step.argval, package)
                    modules += [name, *(f"{name}.{inner}" for inner in loaded[1] or ())]
    return frozenset(names), tuple(modules)


def named_values(function: FunctionType, *, libraries: bool = False) -> dict[str, Any]:
    """Return the values outside of `function` that its code names, such as `SCALE`, `tools.scale` and `pkg.sub.scale`.

    They are from its closure, from its module, and from modules that are imported inside of it. A module that has never
    been imported is represented by a digest of its source. With `libraries`, the functions, classes and modules that it
    names of known libraries are included, such as `np.random`.
    """
    names, values = code_names(function.__code__), function.__globals__
    globals_, modules = _uses(function.__code__, values.get("__package__") or "")
    named: dict[str, Any] = {}
    expanded: set[int] = set()

    def add(path: str, value: Any) -> None:
        named[path] = value
        if isinstance(value, ModuleType) and id(value) not in expanded:
            expanded.add(id(value))
            known = is_known(value.__name__)
            for name in sorted(names & vars(value).keys()) if libraries or not known else ():
                part = vars(value)[name]
                if not known or callable(part) or isinstance(part, ModuleType):
                    add(f"{path}.{name}", part)

    for name, value in closure_values(function).items():
        if name != "__class__":  # for `super()`
            add(name, value)
    for name in sorted(globals_ & values.keys()):
        if name.isidentifier():  # others are those of pytest, for its asserts, which lead to the whole test session
            add(name, values[name])
    for name in modules:
        if (source := _source_unless_imported(name)) is not None:
            named[f"import {name}"] = source
        elif name in sys.modules and (libraries or not is_known(name)):
            add(name, sys.modules[name])
    return named


@functools.cache  # the first answer holds: a module that is imported later is represented by its source still
def _source_unless_imported(module: str) -> str | None:
    """Return a digest of the package of the user's `module`, which is not run, and of those that it imports.

    None for a module that is known or imported, and for what is none.
    """
    parent, _, name = module.rpartition(".")
    if is_known(module) or module in sys.modules or name in attribute(sys.modules.get(parent), "__dict__", ()):
        return None
    digest, seen, todo = xxhash.xxh3_128(), set[Path](), [module.partition(".")[0]]
    for top in todo:
        for file in sorted(_files_of(top))[: _MOST_FILES - len(seen)]:
            seen.add(file)
            source = file.read_bytes()
            digest.update(file.name.encode() + source)
            with contextlib.suppress(SyntaxError, ValueError, RecursionError), warnings.catch_warnings(action="ignore"):
                tops = {used.partition(".")[0] for used in _uses(compile(source, "", "exec", dont_inherit=True), "")[1]}
                todo += sorted(each for each in tops if each not in todo and not is_known(each))
    return digest.hexdigest() if seen else None


def _files_of(top: str) -> list[Path]:
    """Return the files of Python of a package, or the one of a module, without importing it."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):  # a module that was made by hand has no specification
        spec = None
    if spec is None or spec.submodule_search_locations is None:
        return [Path(str(spec.origin))] if spec is not None and str(spec.origin).endswith(".py") else []
    return [file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.py")]


def closure_values(function: FunctionType) -> dict[str, Any]:
    """Return the closure values of `function` by name, without empty cells."""
    values: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            values[name] = cell.cell_contents
    return values


def class_functions(cls: type) -> Iterator[FunctionType]:
    """Yield the functions defined in the body of `cls`, including properties, class methods and static methods."""
    for member in vars(cls).values():
        inner = (attribute(member, name) for name in ("__func__", "fget", "fset", "func"))
        yield from (each for each in (*inner, member) if isinstance(each, FunctionType))


def attributes(thing: object) -> dict[str, Any]:
    """Return the attributes that `thing` itself holds, in its `__dict__` or in slots."""
    own: dict[str, Any] = dict(attribute(thing, "__dict__", ()))
    for cls in type(thing).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{cls.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                own[name] = getattr(thing, name)
    return own


def current(variable: ContextVar[Any] | weakref.ref[Any]) -> Any:
    """Return the value of a context variable, or the object of a weak reference; None if there is none."""
    try:
        return variable.get() if isinstance(variable, ContextVar) else variable()
    except LookupError:
        return None


def describe(transform: Any) -> str:
    """Return a short name for messages, such as `torchvision.transforms.Resize` or `load.<locals>.<lambda>`."""
    if isinstance(transform, functools.partial):
        return f"partial({describe(transform.func)})"
    thing = transform if attribute(transform, "__qualname__") else type(transform)
    name = str(getattr(thing, "__qualname__", thing))
    module = str(getattr(thing, "__module__", None) or "")
    return name if module in ("", "__main__", "builtins") else f"{module}.{name}"
