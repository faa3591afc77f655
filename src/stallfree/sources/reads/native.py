"""Functions of other libraries that open files natively: in a block, they get the bytes of what `open` returns.

| function | replaced by |
| --- | --- |
| `cv2.imread` | `cv2.imdecode` of the content of the file |
| `torch.ops.image.read_file`, by which `torchvision.io` reads pictures | a tensor with the content of the file |
| `soundfile.SoundFile`, by which `soundfile` reads | the same with a file object, which is read in parts |
| `torchaudio.load` | the same with the content of the file |
| `numpy.fromfile` of a file object | its `readinto` |

The first call of each kind, in a block that records, is compared with the native one. If they differ, calls of that
kind stay native. A call that fails in memory, or whose file is neither recorded nor served, is made natively, so that
errors are the native ones. Libraries are not imported here, but looked for among the modules that are.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import PurePath
from types import ModuleType
from typing import Any

import numpy as np
import torch

from stallfree.sources.reads.recorded import MOST_BYTES, current_block, outside
from stallfree.sources.reads.remote import RemoteFile, replace_remote_open
from stallfree.sources.reads.tracked_file import TrackedFile

_MOST_KINDS = 256
"""Kinds of calls that are compared. All others stay native."""

_FRAMES = 1 << 16
"""Frames of a sound file that are compared at its beginning and at its end."""

log = logging.getLogger("stallfree")

_TRIES = 4
"""Calls of one kind that may fail in memory alone, until calls of this kind stay native."""

_alike: dict[Hashable, bool] = {}
"""By kind of call: whether the result from memory was the native one."""

_failed: Counter[Hashable] = Counter()
"""By kind of call: calls that failed in memory alone when they were to be compared."""


# --- the functions ---------------------------------------------------------------------------------------------------


def _imread(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import cv2

    names = dict(zip(("filename", "flags"), args, strict=False)) | kwargs
    path, flags = names.get("filename"), names.get("flags", cv2.IMREAD_COLOR)
    plain = len(names) == len(args) + len(kwargs) and set(names) <= {"filename", "flags"} and type(flags) is int
    if not plain or not isinstance(path, (str, PurePath)):
        return real(*args, **kwargs)
    kind = "cv2.imread", type(path).__name__, _suffix(path), flags
    native = functools.partial(real, *args, **kwargs)
    return _from_memory(kind, path, native, lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), flags))


def _read_file(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or type(args[0]) is not str:
        return real(*args, **kwargs)
    kind = ("torchvision.io.read_file",)
    return _from_memory(kind, args[0], lambda: real(*args), lambda data: torch.frombuffer(data, dtype=torch.uint8))


def _load_audio(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not args or not isinstance(args[0], (str, PurePath)):
        return real(*args, **kwargs)
    path, others = args[0], args[1:]
    options = len(args), *sorted(kwargs), str(kwargs.get("format")), str(kwargs.get("backend"))
    kind = "torchaudio.load", type(path).__name__, _suffix(path), *options
    native = functools.partial(real, *args, **kwargs)
    return _from_memory(kind, path, native, lambda data: real(io.BytesIO(data), *others, **kwargs))


def _open_sound(real: Callable[..., Any], sound: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    """`SoundFile._open`."""
    if type(path) is str and sound.mode == "r" and not sound._info.format:  # of raw samples it is given
        kind = "soundfile.SoundFile", _suffix(path)
        file = _opened(kind, path, math.inf)
        if file is not None:
            look = functools.partial(_sound, type(sound), path)
            if _agrees(kind, path, look, functools.partial(look, "rb")):
                with contextlib.suppress(Exception):
                    return real(sound, file, *args, **kwargs)
            file.close()
    return real(sound, path, *args, **kwargs)


def _fromfile(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    names = dict(zip(("file", "dtype", "count"), args, strict=False)) | kwargs
    file: Any
    file, kind, count = names.get("file"), np.dtype(names.get("dtype", float)), names.get("count", -1)
    if (
        len(names) != len(args) + len(kwargs)
        or not set(names) <= {"file", "dtype", "count"}
        or not _is_ours(file)
        or kind.hasobject
        or kind.subdtype
        or not kind.itemsize
        or count < 0
    ):
        return real(*args, **kwargs)
    found = np.empty(count, kind)
    read = file.readinto(found.view(np.uint8)) if count else 0
    return found if read == found.nbytes else found[: read // kind.itemsize].copy()


def _is_file(real: Callable[..., Any], file: Any) -> Any:
    """`isfileobj` of `numpy.lib.format`, which asks for a descriptor: whether `fromfile` can read it."""
    return _is_ours(file) or real(file)


def _is_ours(file: Any) -> bool:
    """Whether this is a file of this host that is recorded or served."""
    if not isinstance(file, io.BufferedReader):
        return False
    return isinstance(file.raw, TrackedFile) and not isinstance(file.raw, RemoteFile)


def _sound(kind: type[Any], path: str, mode: str | None = None) -> Any:
    """What is compared of a sound file: of the library's own, or of one that is opened here in this mode."""
    with contextlib.nullcontext(path) if mode is None else open(path, mode) as file, kind(file) as sound:
        facts = sound.frames, sound.samplerate, sound.channels, sound.format, sound.subtype, sound.endian
        first = sound.read(_FRAMES)
        sound.seek(max(0, sound.frames - _FRAMES))
        return *facts, first, sound.read()


# --- one call --------------------------------------------------------------------------------------------------------


def _from_memory(kind: Hashable, path: Any, native: Callable[[], Any], memory: Callable[[bytearray], Any]) -> Any:
    """`memory(content of the file)`, if that is what `native()` returns for calls of this kind; else the latter."""
    file, data = _opened(kind, path, MOST_BYTES), None
    if file is not None:
        with file, contextlib.suppress(OSError):
            data = bytearray(file.read())
    if data is not None and _agrees(kind, path, native, lambda: memory(data)):
        with contextlib.suppress(Exception):
            found = memory(data)
            if found is not None:
                return found
    return native()


def _opened(kind: Hashable, path: Any, most: float) -> io.BufferedReader | None:
    """The file, if it has 1 to `most` bytes, and the block records or serves it. It is not recorded for other kinds."""
    block = current_block()
    assert block is not None
    try:
        os.fspath(path).encode()  # raises an error for what a library could not pass on
        if block.recording:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= most:
                return None
            if not _alike.get(kind, True):
                block.leave_out(_absolute(path))
            if not _alike.get(kind, len(_alike) < _MOST_KINDS and _failed[kind] < _TRIES):
                return None
        elif _absolute(path) not in block.files:
            return None
        file = open(path, "rb")  # noqa: SIM115
    except (OSError, ValueError):
        return None
    if _is_ours(file):
        return file
    file.close()
    return None


def _agrees(kind: Hashable, path: Any, native: Callable[[], Any], memory: Callable[[], Any]) -> bool:
    """Whether both gave the same when that was first tried. What is served was compared when it was recorded."""
    block = current_block()
    if block is None or not block.recording or _alike.get(kind):
        return True
    found = other = None
    with outside():
        with contextlib.suppress(Exception):
            found = native()
        with contextlib.suppress(Exception):
            other = memory()
    same = found is not None and other is not None and _same(found, other)
    if found is not None and other is not None:
        _alike[kind] = same
        if not same:
            log.info("%s is not cached: its result for %s was another one from memory", kind, path)
    elif found is not None:
        _failed[kind] += 1
    if other is not None and not same:
        block.leave_out(_absolute(path))
    return same


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        one, other = one.numpy(), other.numpy()
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _absolute(path: Any) -> str:
    return os.path.join(os.getcwd(), os.fspath(path))


def _suffix(path: Any) -> str:
    return str(os.path.splitext(path)[1]).lower()


# --- the replacement -------------------------------------------------------------------------------------------------


class _Instead:
    """What stands for a function of another library. No function, which would become a method where a class has it."""

    def __init__(self, real: Any, name: str, instead: Callable[..., Any]) -> None:
        functools.update_wrapper(self, real, updated=())
        self.__module__, _, found = name.rpartition(".")
        self._name: str = found  # by which it is pickled
        self._real, self._instead = real, instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_block() is None:
            return self._real(*args, **kwargs)
        return self._instead(self._real, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __reduce__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return repr(self._real)


def replace_held(real: Any, ours: Any, *, but: tuple[str, ...] = ()) -> None:
    """Replace `real` in all modules that hold it under some name, except for those named in `but`."""
    for module_name, module in list(sys.modules.items()):
        try:
            names: dict[str, Any] = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        if module_name not in but:
            for name, value in list(names.items()):
                if value is real:
                    names[name] = ours


def _replace_imread(module: ModuleType) -> None:
    real: Any = module.imread
    replace_held(real, _Instead(real, "cv2.imread", _imread))


def _replace_read_file(module: ModuleType) -> None:
    real: Any = torch.ops.image.read_file
    ours = _Instead(real, "torch.ops.image.read_file", _read_file)
    torch.jit._builtins._register_builtin(ours, "image::read_file")
    torch.ops.image.read_file = ours  # type: ignore[attr-defined]


def _replace_open_sound(module: ModuleType) -> None:
    real: Any = module.SoundFile._open

    @functools.wraps(real)
    def _open(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_block() is None:
            return real(self, *args, **kwargs)
        return _open_sound(real, self, *args, **kwargs)

    module.SoundFile._open = _open


def _replace_load_audio(module: ModuleType) -> None:
    real: Any = module.load
    replace_held(real, _Instead(real, "torchaudio.load", _load_audio))


def _replace_fromfile(module: ModuleType) -> None:
    real: Any = module.fromfile
    replace_held(real, _Instead(real, "numpy.fromfile", _fromfile))
    real = module.lib.format.isfileobj
    replace_held(real, _Instead(real, "numpy.lib.format.isfileobj", _is_file))


_missing: dict[str, Callable[[ModuleType], None]] = {
    "cv2": _replace_imread,
    "numpy": _replace_fromfile,
    "torchvision.io.image": _replace_read_file,
    "soundfile": _replace_open_sound,
    "torchaudio": _replace_load_audio,
    "fsspec.spec": replace_remote_open,
}
"""Modules that have not been found yet, and what replaces their function."""


_modules = 0
"""How many modules there were when all of these had been looked for."""


def replace_imported() -> bool:
    """Replace the functions of libraries that were imported since the last call. Returns whether there are any."""
    global _modules
    count = len(sys.modules)
    if count == _modules:
        return False
    _modules, before = count, len(_missing)
    for name, replace in list(_missing.items()):
        if name in sys.modules:
            try:
                replace(sys.modules[name])
                _missing.pop(name, None)
            except AttributeError:
                _modules = 0  # another thread is importing it
    return len(_missing) < before
