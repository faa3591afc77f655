"""Inspection of Python objects: the origin of their code, and the names that a function uses."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import xxhash

_KNOWN = sys.stdlib_module_names | {
    *("builtins", "typing_extensions", "stallfree", "torch", "torchvision", "torchaudio", "torchcodec", "numpy"),
    *("scipy", "pandas", "polars", "pyarrow", "numba", "sklearn", "PIL", "cv2", "skimage", "imageio", "tifffile"),
    *("simplejpeg", "turbojpeg", "kornia", "timm", "albumentations", "albucore", "monai", "nibabel", "SimpleITK"),
    *("pydicom", "h5py", "zarr", "numcodecs", "netCDF4", "xarray", "lmdb", "msgpack", "fsspec", "s3fs", "gcsfs"),
    *("boto3", "botocore", "requests", "soundfile", "librosa", "decord", "av", "transformers", "tokenizers"),
    *("datasets", "huggingface_hub", "safetensors", "webdataset", "lightning", "pytorch_lightning", "accelerate"),
    *("ray", "redis", "tqdm", "loguru", "rich", "yaml", "attr", "attrs", "einops", "tensorboard"),
}
"""Libraries whose code is not looked at: it is identified by a version, and its outcomes show whether it is random."""
_SITES = {"site-packages", "dist-packages"}
_MOST_FILES = 256
_IMPORT, _CONSTANT, _SMALL, _GLOBAL, _NAME = (
    dis.opmap.get(name, -1) for name in ("IMPORT_NAME", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_GLOBAL", "LOAD_NAME")
)


def attribute(thing: object, name: str, default: Any = None) -> Any:
    """As `getattr`, for any object: one whose own code raises something else than `AttributeError` has no attribute."""
    try:
        return getattr(thing, name, default)
    except Exception:
        return default


def is_known(module: str) -> bool:
    """Return whether `module` belongs to the standard library or to a known library."""
    return module.partition(".")[0] in _KNOWN


@functools.cache
def library_version(module: str) -> str | None:
    """Return the version of the library that contains `module`; None for the user's own code.

    Libraries are the known ones and what was installed from an index. What was installed from a folder or a repository,
    such as the user's own project, is the user's code.
    """
    top = module.partition(".")[0]
    if top == "builtins" or top in sys.stdlib_module_names:
        return "python"
    if top in _KNOWN:
        return str(attribute(sys.modules.get(top), "__version__", "unknown"))
    if top != module:
        return library_version(top)
    spec = _spec_of(top)
    folders = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
    files = f"{top}/".encode(), f"{top}.py,".encode()
    sites = {parent for folder in folders for parent in Path(folder).parents if parent.name in _SITES}
    for record in (record for site in sites for record in sorted(site.glob("*.dist-info/RECORD"))):
        lines = [line for line in record.read_bytes().splitlines() if line.startswith(files)]
        if lines:
            installer = record.with_name("INSTALLER")
            conda = installer.exists() and "conda" in installer.read_text()  # what it packs, it installs from a folder
            if record.with_name("direct_url.json").exists() and not conda:
                return None
            hashes = xxhash.xxh3_128_hexdigest(b"\n".join(line for line in lines if b".pyc," not in line))
            return f"{record.parent.name.removesuffix('.dist-info').rpartition('-')[2]} {hashes}"
    return None


def module_of(thing: Any) -> str:
    """Return the module where the code of a function, class or module is; "builtins" if it names none.

    A decorator of a library gives its functions the name of another module.
    """
    names = thing.__globals__ if isinstance(thing, FunctionType) else {}
    name = names.get("__name__", attribute(thing, "__name__" if isinstance(thing, ModuleType) else "__module__"))
    return name if isinstance(name, str) else "builtins"


def is_library(thing: object) -> bool:
    """Return whether the function, class or module `thing` belongs to a library, not to the user."""
    return library_version(module_of(thing)) is not None


def comes_from(thing: type, library: str) -> bool:
    """Return whether class `thing` is defined in the package `library`, such as `"monai"`, or in a part of it."""
    module = str(getattr(thing, "__module__", ""))
    return module == library or module.startswith(library + ".")


@functools.cache  # the first answer holds: a module that is imported later is represented by its source still
def _source_unless_imported(module: str) -> str | None:
    """Return a digest of the source of `module`, which is not run, and of the user's modules that it imports."""
    if is_known(module) or module in sys.modules or _spec_of(module) is None:
        return None
    digest, seen, todo = xxhash.xxh3_128(), set[str](), [module]
    while todo and len(seen) < _MOST_FILES:
        name = todo.pop()
        if name in seen or is_known(name):
            continue
        seen.add(name)
        if (version := library_version(name)) is not None:
            digest.update(f"{name} {version}".encode())
        elif (spec := _spec_of(name)) is not None:
            with contextlib.suppress(OSError, ImportError, SyntaxError, AttributeError):  # no file, or not of Python
                digest.update(name.encode() + Path(str(spec.origin)).read_bytes())
                package = name if spec.submodule_search_locations else name.rpartition(".")[0]
                code = attribute(spec.loader, "get_code")(name)
                todo += reversed(_uses(code, package)[1]) if code is not None else ()
    return digest.hexdigest()


def _spec_of(module: str) -> ModuleSpec | None:
    """Return the specification of a module, which is not imported for that; None if there is none."""
    if module in sys.modules:
        spec: ModuleSpec | None = attribute(sys.modules[module], "__spec__")
        return spec
    path = None
    for name in accumulate(module.split("."), "{}.{}".format):
        finders = (attribute(finder, "find_spec") for finder in sys.meta_path)
        spec = next((found for find in finders if find and (found := find(name, path)) is not None), None)
        if spec is None or name == module:
            return spec
        path = spec.submodule_search_locations
        if path is None:
            return None
    return None


def _uses(code: CodeType, package: str) -> tuple[set[str], list[str]]:
    """Return the names of globals that `code` of `package` reads, and the full names of modules that it may import."""
    found, modules = set(), []
    for part in codes(code):
        before: list[Any] = [0, None]  # the level of an import and the names after "from" are loaded before it
        extended = 0
        for op, argument in zip(part.co_code[::2], part.co_code[1::2], strict=True):
            argument |= extended
            extended = argument << 8 if op == dis.EXTENDED_ARG else 0
            if op in (_GLOBAL, _NAME):
                found.add(part.co_names[argument >> (op == _GLOBAL)])
            elif op in (_CONSTANT, _SMALL):
                before = [before[1], part.co_consts[argument] if op == _CONSTANT else argument]
            elif op == _IMPORT:
                with contextlib.suppress(ImportError):  # beyond the top of its package
                    name = importlib.util.resolve_name("." * before[0] + part.co_names[argument], package)
                    modules += [name, *(f"{name}.{inner}" for inner in before[1] or ())]
    return found, modules


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and the code nested in it, without that of annotations."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_name != "__annotate__":
            yield from codes(constant)


def code_names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes used by `code` and the code nested in it."""
    return {name for part in codes(code) for name in part.co_names}


def named_values(function: FunctionType, *, libraries: bool = False) -> dict[str, Any]:
    """Return the values outside of `function` that its code names, such as `SCALE`, `tools.scale` and `pkg.sub.scale`.

    They are from its closure, from its module, and from modules that are imported inside of it. A module that has never
    been imported is represented by a digest of its source. With `libraries`, the functions, classes and modules that it
    names of known libraries are included, such as `np.random`.
    """
    names, values = code_names(function.__code__), function.__globals__
    globals_, modules = _uses(function.__code__, values.get("__package__") or "")
    found: dict[str, Any] = {}
    expanded: set[int] = set()

    def add(path: str, value: Any) -> None:
        found[path] = value
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
            found[f"import {name}"] = source
        elif name in sys.modules and (libraries or not is_known(name)):
            add(name, sys.modules[name])
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
