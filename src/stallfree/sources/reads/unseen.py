"""What a data set reads past `open`: how much, and by which library."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from stallfree.pipeline.objects import attribute, attributes, class_functions, code_names, is_library, named_values

_DATA = "open(path, 'rb').read()"

_CURES = {
    "cv2": f"cv2.imdecode(np.frombuffer({_DATA}, np.uint8), flags)",
    "h5py": "h5py.File(open(path, 'rb'), 'r')",
    "lmdb": "form='fetched' with a data set that returns the values, and the rest as transform=",
    "datasets": "form='fetched' with the samples of that data set, and the rest as transform=",
    "SimpleITK": "nibabel or pydicom",
    "torchvision": f"torchvision.io.decode_image(torch.frombuffer(bytearray({_DATA}), dtype=torch.uint8))",
    "torchcodec": f"its decoders with {_DATA}",
    "decord": "decord.VideoReader(open(path, 'rb'))",
    "av": "av.open(open(path, 'rb'))",
    "rasterio": "rasterio.open(open(path, 'rb'))",
    "netCDF4": f"netCDF4.Dataset('data', memory={_DATA})",
    "pyarrow": "its readers with open(path, 'rb')",
    "safetensors": f"safetensors.torch.load({_DATA})",
    "fsspec": "fs.open(path).read() in place of fs.cat_file(path)",
    "soundfile": "soundfile.read(open(path, 'rb'))",
    "torchaudio": "torchaudio.load(open(path, 'rb'))",
}
"""Libraries that open files natively, and what to use in their place."""

_SERVED = {"cv2", "torchvision", "soundfile", "torchaudio", "fsspec"}
"""Those whose functions are replaced in most places: see `native`."""

MAPPING = {"lmdb", "pyarrow", "datasets"}
"""Libraries that map files into memory, where reads cannot be counted."""

_MOST_OBJECTS = 64
"""Objects that are looked at for the names of libraries."""

_MAPPED = (".mdb", ".lmdb", ".arrow", ".feather")


def bytes_read() -> int | None:
    """Bytes that this thread has read by system calls so far; None where that is not known."""
    with contextlib.suppress(OSError, ValueError), open("/proc/thread-self/io", "rb") as file:
        return int(file.readline().split()[1])
    return None


def mapped_files() -> list[str]:
    """The files with data of such libraries that this process has mapped into memory."""
    found = set()
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            path = line.rstrip("\n")[73:]
            if path.endswith(_MAPPED):
                found.add(path)
    return sorted(found)


def native_library(dataset: Any) -> tuple[str, str]:
    """The library by which `dataset` reads natively, as far as its code shows, and what to use in its place."""
    names = set().union(*map(_names, _objects(dataset)))
    found = [library for library in _CURES if library in names]
    found = [library for library in found if library not in _SERVED] or found
    if not found:
        return "a library", f"its call for data in memory, with {_DATA}"
    return " or ".join(found), "; or ".join(_CURES[library] for library in found)


def _objects(dataset: Any) -> Iterator[Any]:
    """`dataset`, and what it holds: other data sets, loaders, transforms."""
    todo: list[Any] = [dataset]
    seen: set[int] = set()
    while todo and len(seen) < _MOST_OBJECTS:
        thing = todo.pop(0)
        if id(thing) not in seen:
            seen.add(id(thing))
            yield thing
            if isinstance(thing, (list, tuple)):
                todo += thing[:8]
            elif isinstance(thing, dict):
                todo += list(thing.values())[:8]
            elif isinstance(thing, functools.partial):
                todo.append(thing.func)
            elif not isinstance(thing, (type, ModuleType, FunctionType)):
                todo += attributes(thing).values()


def _names(thing: Any) -> set[str]:
    """The libraries that an object is of or uses, among other names."""
    functions, names = [thing], {_library(thing)}
    if not isinstance(thing, FunctionType):
        kind = thing if isinstance(thing, type) else type(thing)
        functions = [function for cls in kind.__mro__ if not is_library(cls) for function in class_functions(cls)]
        names.add(_library(kind))
    for function in functions:
        for used in [function, *_users(function)]:
            names |= code_names(used.__code__)
            names |= {_library(value) for value in named_values(used).values()}
    return names


def _users(function: FunctionType) -> list[FunctionType]:
    """The functions of the user's that `function` uses."""
    return [used for used in named_values(function).values() if isinstance(used, FunctionType) and not is_library(used)]


def _library(thing: Any) -> str:
    name = thing.__name__ if isinstance(thing, ModuleType) else attribute(thing, "__module__")
    if name is None and attribute(thing, "__name__") == "imread":
        return "cv2"  # whose functions name no module
    return str(name).partition(".")[0]
