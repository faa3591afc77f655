"""Python objects: where their code is from, the values that it names, and what a call of one may use.

One walk finds what a call of an object may use: names of sources of randomness in the user's code, generators of random
numbers, and attributes that may change.
"""

import contextlib
import copyreg
import dis
import functools
import importlib.util
import random
import re
import sys
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from itertools import islice
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash

LIBRARIES = {
    *sys.stdlib_module_names,
    *("typing_extensions", "stallfree", "torch", "torchvision", "torchaudio", "torchcodec", "numpy"),
    *("scipy", "pandas", "polars", "pyarrow", "numba", "sklearn", "PIL", "cv2", "skimage", "imageio", "tifffile"),
    *("simplejpeg", "turbojpeg", "kornia", "timm", "albumentations", "albucore", "monai", "nibabel", "SimpleITK"),
    *("pydicom", "h5py", "zarr", "numcodecs", "netCDF4", "xarray", "lmdb", "msgpack", "fsspec", "s3fs", "gcsfs"),
    *("boto3", "botocore", "requests", "soundfile", "librosa", "decord", "av", "transformers", "tokenizers"),
    *("huggingface_hub", "safetensors", "webdataset", "lightning", "pytorch_lightning", "accelerate"),
    *("ray", "redis", "tqdm", "loguru", "rich", "yaml", "attr", "attrs", "einops", "tensorboard"),
}
"""Libraries whose code is not looked at: it is identified by a version, and its outcomes show whether it is random.

Many projects have a package of their own called `datasets`: that of Hugging Face has a version.
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
    top = module.partition(".")[0]
    return top in LIBRARIES or (top == "datasets" and hasattr(sys.modules.get(top), "__version__"))


def library_version(module: str) -> str | None:
    """Return the version of the library that contains `module`; None for the user's own code."""
    top = module.partition(".")[0]
    if not is_known(module):
        return None
    in_python = top in sys.stdlib_module_names
    return "python" if in_python else str(attribute(sys.modules.get(top), "__version__", "unknown"))


def module_of(thing: Any) -> str:
    """Return the module where the code of a function, class or module is; "builtins" if it names none.

    A decorator of a library gives its functions the name of another module.
    """
    if isinstance(thing, FunctionType):
        return str(thing.__globals__.get("__name__", ""))  # "" for code that was executed from a text
    name = attribute(thing, "__name__" if isinstance(thing, ModuleType) else "__module__")
    return name if isinstance(name, str) else "builtins"


def is_library(thing: object) -> bool:
    """Return whether the function, class or module `thing` belongs to a library, not to the user."""
    return is_known(module_of(thing))


def comes_from(thing: type, library: str) -> bool:
    """Return whether class `thing` is defined in the package `library`, such as `"monai"`, or in a part of it."""
    module = str(getattr(thing, "__module__", ""))
    return module == library or module.startswith(library + ".")


# --- what code names -------------------------------------------------------------------------------------------------


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and the code nested in it, without that of annotations."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_name != "__annotate__":
            yield from _codes(constant)


def code_names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes used by `code` and the code nested in it."""
    return {name for part in _codes(code) for name in part.co_names}


@functools.lru_cache(maxsize=4096)
def _uses(code: CodeType, package: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names of globals that `code` of `package` reads, and the full names of modules that it may import."""
    names, modules = set(), []
    for part in _codes(code):
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
    with contextlib.suppress(ImportError, ValueError, AttributeError):  # one that was made by hand has no specification
        if (spec := importlib.util.find_spec(top)) is not None:
            files = [file for folder in spec.submodule_search_locations or () for file in Path(folder).rglob("*.py")]
            return files or [Path(str(spec.origin))] * str(spec.origin).endswith(".py")
    return []


def closure_values(function: FunctionType) -> dict[str, Any]:
    """Return the closure values of `function` by name, without empty cells."""
    values: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            values[name] = cell.cell_contents
    return values


def attributes(thing: object) -> dict[str, Any]:
    """Return the attributes that `thing` itself holds, in its `__dict__` or in slots."""
    slots: list[str] = copyreg._slotnames(type(thing))  # type: ignore[attr-defined]
    return dict(attribute(thing, "__dict__", ())) | {
        name: getattr(thing, name) for name in slots if hasattr(thing, name)
    }


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


# --- what a call may use ---------------------------------------------------------------------------------------------

GENERATOR_TYPES = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)

_NAMES = re.compile(
    r"rand|randn|randu|randint|randrange|randperm|randbelow|randbits|randbytes|rand(n|int)?_like|randShuffle|"
    r"random|random_|random_(sample|integers|raw|bytes|noise)|ranf|default_rng|Random|RandomState|SystemRandom|"
    r"Generator|SeedSequence|PCG64|PCG64DXSM|MT19937|Philox|SFC64|shuffle|choices?|permutation|permuted|"
    r"urandom|getrandom|getrandbits|secrets|token_(bytes|hex|urlsafe)|uuid[1467]|"
    r"gauss|\w+variate|triangular|standard_(normal|cauchy|exponential|gamma|t)|bernoulli\w*|multinomial|rvs|"
    r"(normal|uniform|exponential|cauchy|geometric|log_normal)_|effect_(spread|noise)"
)
"""Names that make or use randomness, whatever has them."""
_LIBRARY_NAMES = re.compile(r"[rR]and\w*|normal|poisson")
"""Further names that do if they are of a known library."""
_MODULES = {"random", "secrets", "mtrand"}
_TYPES = {"collections.abc", "typing"}
"""Modules of types, one of which is `Generator`."""

VALUES = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic, torch.Tensor, PurePath)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MOST_ITEMS, _MOST_OBJECTS = 256, 20_000
_ENTRIES = ("__call__", "forward", "__getitem__", "__getitems__")
_UNCALLED = {
    *("__init__", "__new__", "__post_init__", "__del__", "__repr__", "__str__", "__format__", "__hash__", "__eq__"),
    *("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__init_subclass__", "__class_getitem__"),
}
_PRINTED = ("__repr__", "__annotate__")
"""Methods that no sample depends on. From Python 3.13 on, `__repr__` of a dataclass refers to `threading.get_ident`."""
_BARE = ("builtins", "abc", "collections.abc", "typing", "enum", "torch.utils.data.dataset")
"""Modules whose classes call no method and read no attribute of the classes that are derived from them."""
_OF_PROCESS = ("logging", "threading", "multiprocessing", "weakref")
"""Libraries whose objects lead to all of the process."""


def random_name(thing: Any) -> str | None:
    """Return where the user's code that a call of `thing` runs names a source of randomness.

    Such as "default_rng in Flip.__call__"; None if it names none.
    """
    sources = [(isinstance(value, ModuleType), label) for value, label in _Walk(thing).run() if _is_source(value)]
    return min(sources, key=lambda source: source[0], default=(False, None))[1]  # a module says the least


def _is_source(value: Any) -> bool:
    if isinstance(value, str):
        return any(_NAMES.fullmatch(part) for part in value.split("."))
    if isinstance(value, (*GENERATOR_TYPES, np.random.BitGenerator, np.random.SeedSequence)):
        return True
    module = module_of(value)
    if not is_known(module) or module in _TYPES:
        return False
    if _MODULES.intersection(module.split(".")):
        return True
    name = attribute(value, "__name__") if callable(value) else None
    return isinstance(name, str) and any(names.fullmatch(name) for names in (_NAMES, _LIBRARY_NAMES))


def generators_of(thing: Any) -> list[Any]:
    """Return the generators that `thing` owns or refers to, in a fixed order, each once.

    Searched are attributes, slots, containers, closures, partial functions, bound methods, and what user code names and
    has as default values. Generators inside compiled library code, and those created only while it runs, are not found.
    """
    reached = (value for value, _ in _Walk(thing, everything=True).run())
    return [value for value in reached if isinstance(value, GENERATOR_TYPES)]


def label_of(thing: Any, roots: Iterable[Any]) -> str:
    """Return where one of `roots` names `thing`, such as "client in Reader.read"; "" if it is one, and if none does."""
    walks = ((root, value, label) for root in roots for value, label in _Walk(root, everything=True).run())
    return next((label if root is not thing else "" for root, value, label in walks if value is thing), "")


def attributes_used(thing: Any) -> list[tuple[Any, str, Any]]:
    """Return the attributes that a call of `thing` may use, of it and of what it holds: owner, name and value.

    Data in the bodies of the user's classes are among them.
    """
    walk = _Walk(thing)
    deque(walk.run(), 0)
    return [(owner, name, value) for owner, name, value, called in walk.attributes if called or name in walk.named]


class _Walk:
    """Goes through the objects that a call of `root` may use, each with where it is named, as "RNG in Flip.__call__".

    Functions of the user are among them, with the values that they name and the methods that they name of the objects
    which they hold; of `root` itself, what `root(...)` or `root[...]` runs. A name of an attribute that none of these
    objects has, of a result for instance, is yielded as text. The code of libraries is not followed, but the user's
    code that they hold is. With `everything`, attributes and methods count whether code names them or not.
    """

    def __init__(self, root: Any, *, everything: bool = False) -> None:
        self._everything = everything
        self._kind = type(root)
        self._todo: deque[tuple[Any, str]] = deque([(root, describe(root))])
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that no identity is reused meanwhile
        self._classes: set[tuple[type, bool, frozenset[str]]] = set()
        self.attributes: list[tuple[Any, str, Any, bool]] = []
        """Attributes with their owner, and whether they count even if no code names them."""
        self.named: dict[str, str] = {}
        """Names in the code so far, with the function that was seen first to use them."""
        self._unnamed: defaultdict[str, list[Any]] = defaultdict(list)
        """Attributes and methods of objects, by name, whose name has not been used so far."""
        self._owned: set[str] = set()
        """Names of values that the code names, and of attributes that one of the objects has."""

    def run(self) -> Iterator[tuple[Any, str]]:
        while self._todo and len(self._seen) < _MOST_OBJECTS:
            thing, label = self._todo.popleft()
            if id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                yield thing, label
                self._follow(thing, label)
        yield from ((name, f"{name} in {user}") for name, user in self.named.items() if name not in self._owned)

    def _follow(self, thing: Any, label: str) -> None:
        if isinstance(thing, FunctionType):
            return self._function(thing)
        if isinstance(thing, type):
            self.attributes += ((thing, name, value, False) for name, value in _class_values(thing).items())
            return self._class(thing, made=not issubclass(self._kind, thing))
        if isinstance(thing, functools.partial):
            self._add((thing.func, thing.args, thing.keywords), label)
        elif isinstance(thing, (MethodType, BuiltinFunctionType)):
            self._add((thing.__self__, attribute(thing, "__func__")), label)
        elif isinstance(thing, CONTAINERS):
            self._add(islice(thing.values() if isinstance(thing, dict) else thing, _MOST_ITEMS), label)
        elif isinstance(thing, (ContextVar, weakref.ref)):
            self._add((current(thing),), label)
        if not isinstance(thing, (ModuleType, BuiltinFunctionType, *GENERATOR_TYPES)):
            own = attributes(thing)
            self._class(type(thing), made=False, own=frozenset(own))
            if not any(comes_from(type(thing), library) for library in _OF_PROCESS):
                called = is_library(type(thing)) or bool(_libraries(type(thing)))
                values = _class_values(type(thing)) | own
                self.attributes += ((thing, name, value, called and name in own) for name, value in values.items())
                for name, value in own.items():
                    self._offer(name, value, called=called and not isinstance(value, GENERATOR_TYPES))

    def _add(self, values: Iterable[Any], label: str) -> None:
        for value in values:
            flat = type(value) in (tuple, list) and all(isinstance(item, VALUES) for item in value[:8])
            if not isinstance(value, VALUES) and not (flat and len(value) <= 8):  # such as (path, label)
                self._todo.append((value, label))

    def _function(self, function: FunctionType) -> None:
        where = function.__qualname__
        if is_library(function):
            return self._add((*closure_values(function).values(), attribute(function, "__wrapped__")), where)
        values = named_values(function, libraries=True) | vars(function) | (function.__kwdefaults__ or {})
        values |= {f"default {number}": value for number, value in enumerate(function.__defaults__ or ())}
        for name, value in values.items():
            if not (self._everything and isinstance(value, (type, ModuleType)) and is_library(value)):
                self._add((value,), f"{name} in {where}")
            self._owned.update(name.split("."))
        for name in sorted(code_names(function.__code__) - self.named.keys()):
            self.named[name] = where
            self._add(self._unnamed.pop(name, ()), f"{name} in {where}")

    def _class(self, cls: type, *, made: bool, own: frozenset[str] = frozenset()) -> None:
        """Register the members of `cls`, without those that attributes of the instance replace, its `own` ones.

        Methods that create an instance count only if one is `made` in a call, those that a subclass overrides only if
        their name is used, as by `super()`.
        """
        own = own.intersection(dir(cls)) if own else own
        if (cls, made, own) in self._classes:
            return
        self._classes.add((cls, made, own))
        libraries = _libraries(cls)
        overridden: set[str] = set()
        for base in cls.__mro__:
            if is_library(base):
                held = (value for value in vars(base).values() if isinstance(value, GENERATOR_TYPES))
                self._add(held if self._everything else (), describe(base))
                continue
            for name, member in vars(base).items():
                if name in own and not hasattr(type(member), "__set__"):
                    continue
                special = name in _ENTRIES if cls is self._kind else name.startswith("__") and name.endswith("__")
                called = name not in overridden and (special or any(hasattr(library, name) for library in libraries))
                inner = (attribute(member, each) for each in ("__func__", "fget", "func"))
                for value in (member, *(each for each in inner if isinstance(each, FunctionType))):
                    self._offer(name, value, called=called and (made or name not in _UNCALLED))
            overridden.update(vars(base))

    def _offer(self, name: str, value: Any, *, called: bool) -> None:
        """Register an attribute or a method, which counts once its name is used, or now if it is `called` unnamed."""
        self._owned.add(name)
        if called or name in self.named or (self._everything and name not in _PRINTED):
            self._add((value,), f"{name} in {self.named[name]}" if name in self.named else name)
        else:
            self._unnamed[name].append(value)


def _libraries(cls: type) -> list[type]:
    """Return the classes of libraries from which `cls` is derived, and whose code may call its methods."""
    return [base for base in cls.__mro__ if is_library(base) and base.__module__ not in _BARE]


def _class_values(cls: type) -> dict[str, Any]:
    """Return the data in the bodies of the user's classes among `cls` and its bases."""
    bodies = [vars(base).items() for base in reversed(cls.__mro__) if not is_library(base)]
    return {name: value for body in bodies for name, value in body if isinstance(value, (*VALUES, *CONTAINERS))}
