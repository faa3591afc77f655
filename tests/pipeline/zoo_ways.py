"""The ways to cache an entry of the zoo, each of which gives the samples of three epochs."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import mmap
import os
import pickle
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from zoo_entry import Entry

import stallfree as sf

EPOCHS = 3
BATCH = 16
ROOM = "64MiB"
HERE = Path(__file__).resolve().parent
COUNTED_FILES = ("/albumentations/", "/monai/transforms/")
"""Beside the files of the entries."""

Epochs = list[list[Any]]
_names = itertools.count()


class Records(Dataset[Any]):
    """Records in memory, of which each reading gives a copy, as reading files does."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, id: int) -> Any:
        return copy.deepcopy(self.records[id])


class Applied(Records):
    """A data set as users write it: it reads and augments in `__getitem__`."""

    def __init__(self, records: list[Any], transform: Any) -> None:
        super().__init__(records)
        self.transform = transform

    def __getitem__(self, id: int) -> Any:
        return self.transform(super().__getitem__(id))


@sf.mark_deterministic
def costly(record: Any) -> Any:
    """Work that is worth a cache."""
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end:
        pass
    return record


class Costly(Records):
    """A source whose pipeline begins with work that is worth a cache."""

    def __init__(self, records: list[Any], steps: list[Any]) -> None:
        super().__init__(records)
        self.pipeline = sf.Compose([costly, *steps])

    def fetch(self, id: int) -> Any:
        return super().__getitem__(id)

    def __getitem__(self, id: int) -> Any:
        return self.pipeline(self.fetch(id))

    def where(self, id: int) -> str:
        return f"record {id}"

    def fingerprint(self) -> str:
        return f"zoo {next(_names)}"


@dataclass(frozen=True)
class Fresh:
    """An entry, made once.

    Attributes:
        plain: the data set without any cache.
        records: the data set below the steps.
        steps: the transform; none for a data set that does all by itself.
    """

    plain: Any
    records: Any
    steps: list[Any]


def make(entry: Entry) -> Fresh:
    """A fresh one, with state of its own."""
    made = entry.make()
    if entry.records is None:
        return Fresh(made, made, [])
    steps = made if isinstance(made, list) else [made]
    records = entry.records()
    return Fresh(Applied(records, sf.Compose(steps)), Records(records), steps)


# -- counting calls --------------------------------------------------------------------------------------------------


class Calls:
    """How often the code of an entry runs, in this process and in workers, seen by the interpreter's own profiler.

    Nothing of it is in the entry, so it cannot change how the entry is judged.
    """

    def __init__(self, codes: frozenset[CodeType] | None = None, builtins: tuple[Any, ...] = ()) -> None:
        self._codes, self._builtins = codes, builtins
        self._shared = mmap.mmap(-1, 16)

    def install(self, _worker: int = 0) -> None:
        """In a thread that prepares samples, such as a worker's."""
        sys.setprofile(self._seen)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """What runs meanwhile is counted."""
        self._shared[:8] = struct.pack("q", 1)
        self.install()
        threading.setprofile(self._seen)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            self._shared[:8] = struct.pack("q", 0)

    @property
    def count(self) -> int:
        return int(struct.unpack("q", self._shared[8:])[0])

    def _seen(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            counted = _is_entrys(code.co_filename) if self._codes is None else code in self._codes
        elif event == "c_call":
            counted = any(argument == builtin for builtin in self._builtins)
        else:
            return
        if counted and self._shared[0]:
            self._shared[8:] = struct.pack("q", self.count + 1)


def _is_entrys(file: str) -> bool:
    path = Path(file)
    if path.parent == HERE:
        return path.name.startswith(("zoo_", "test_zoo")) and path.name not in ("zoo_ways.py", "zoo_entry.py")
    return any(part in file for part in COUNTED_FILES)


def calls_of(entry: Entry, fresh: Fresh) -> Calls:
    """What counts the calls of that which should be cached."""
    builtins = tuple(step for step in fresh.steps if not isinstance(step, FunctionType))
    if not entry.prefix:
        return Calls(builtins=builtins)
    return Calls(frozenset([_code_of(sf.Compose(fresh.steps).transforms[0])]))


def _code_of(step: Any) -> CodeType:
    if type(step) is sf.OnItem:
        step = step.transform
    if type(step).__name__ == "Compose":  # MONAI's, around one step
        step = step.transforms[0]
    function = step if isinstance(step, FunctionType) else getattr(type(step), "apply", type(step).__call__)
    return (function.__func__ if isinstance(function, MethodType) else function).__code__


# -- reading epochs --------------------------------------------------------------------------------------------------


def as_list(samples: list[Any]) -> list[Any]:
    """A batch of what does not stack."""
    return list(samples)


def sealed(value: Any) -> Any:
    """`value` as something that can be compared: equal if all bytes are; arrays and tensors alike."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, (np.generic, float)):
        return "number", struct.pack("d", value)
    if isinstance(value, dict):
        return "dict", tuple(sorted((str(key), sealed(part)) for key, part in value.items()))
    if isinstance(value, (list, tuple)):
        return "list", tuple(map(sealed, value))
    if isinstance(value, Image.Image):
        return value.mode, value.size, value.tobytes()
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return value
    return pickle.dumps(value)


def stacks(samples: list[Any]) -> bool:
    """Whether the default collation makes one array of samples like these."""
    shapes = {(tuple(x.shape), str(x.dtype)) for x in samples if isinstance(x, (np.ndarray, torch.Tensor))}
    return len(shapes) == 1 and all(isinstance(x, (np.ndarray, torch.Tensor)) for x in samples)


@dataclass
class Looked:
    """What came out of a way.

    Attributes:
        epochs: samples by epoch and id, sealed.
        calls: of what should be cached, per sample and epoch after the first; -1 if not counted.
        refused: the message if the data set was refused, which is right for what is random by itself.
        decision: what `cache="auto"` chose.
    """

    epochs: Epochs
    calls: float = -1
    refused: str = ""
    decision: str = ""


@dataclass(frozen=True)
class Task:
    """An entry in one way.

    Attributes:
        entry: to be read.
        stacked: whether batches are collated.
        seed: of the randomness.
        counted: whether calls are counted.
    """

    entry: Entry
    stacked: bool
    seed: int
    counted: bool

    def read(self, loader: Any, calls: Calls | None, counted: int = EPOCHS - 1) -> Looked:
        """Three epochs; calls are counted in the `counted` epochs after the first."""
        epochs = [self._epoch(loader)]
        with contextlib.nullcontext() if calls is None else calls.counting():
            epochs += [self._epoch(loader) for _ in range(counted)]
        epochs += [self._epoch(loader) for _ in range(EPOCHS - 1 - counted)]
        return Looked(epochs, -1 if calls is None else calls.count / counted / len(epochs[0]))

    def _epoch(self, loader: Any) -> list[Any]:
        return [sealed(sample) for batch in loader for sample in batch]

    def sf_loader(self, dataset: Any, workers: int, calls: Calls | None, **options: Any) -> Any:
        return sf.DataLoader(
            dataset,
            BATCH,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=None if self.stacked else as_list,
            worker_init_fn=None if calls is None else calls.install,
            **options,
        )

    def torch_loader(self, dataset: Any, workers: int, calls: Calls | None, **options: Any) -> Any:
        return torch.utils.data.DataLoader(
            dataset,
            BATCH,
            num_workers=workers,
            collate_fn=None if self.stacked else as_list,
            worker_init_fn=None if calls is None else calls.install,
        )


# -- ways ------------------------------------------------------------------------------------------------------------

Way = Callable[[Task], Looked]


def plain(kind: str, workers: int) -> Way:
    """Without a cache: what the others are compared with."""

    def read(task: Task) -> Looked:
        loader = _loader(task, kind)(make(task.entry).plain, workers, None)
        with contextlib.closing(_Ended(loader)):
            return task.read(loader, None)

    return read


def cached(kind: str, workers: int, form: str) -> Way:
    """A `CachedDataset` over records, with the steps as its transform."""

    def read(task: Task) -> Looked:
        fresh = make(task.entry)
        calls = calls_of(task.entry, fresh) if task.counted else None
        transform = sf.Compose(fresh.steps) if fresh.steps else None
        return _cached(task, kind, workers, fresh.records, calls, transform=transform, form=form)

    return read


def cached_whole(kind: str, workers: int) -> Way:
    """A `CachedDataset` over a data set that reads and augments in its `__getitem__`."""

    def read(task: Task) -> Looked:
        fresh = make(task.entry)
        calls = calls_of(task.entry, fresh) if task.counted else None
        return _cached(task, kind, workers, fresh.plain, calls)

    return read


def _cached(task: Task, kind: str, workers: int, dataset: Any, calls: Calls | None, **options: Any) -> Looked:
    try:
        found = sf.CachedDataset(dataset, capacity=ROOM, seed=task.seed, name=_name(), **options)
    except sf.InputError as error:
        if type(error) is not sf.InputError or options.get("transform") is not None:
            raise
        return Looked([], refused=str(error))
    with found:
        loader = _loader(task, kind)(found, workers, calls)
        with contextlib.closing(_Ended(loader)):
            return task.read(loader, calls)


def smart(kind: str) -> Way:
    """A `SmartCacheDataset` whose window is the whole data set and stays."""

    def read(task: Task) -> Looked:
        fresh = make(task.entry)
        calls = calls_of(task.entry, fresh) if task.counted else None
        transform = sf.Compose(fresh.steps) if fresh.steps else None
        options: dict[str, Any] = {"cache_num": len(fresh.records), "replace_rate": 0, "shuffle": False}
        try:
            found = sf.SmartCacheDataset(fresh.records, transform, seed=task.seed, name=_name(), **options)
        except sf.InputError as error:
            if type(error) is not sf.InputError or transform is not None:
                raise
            return Looked([], refused=str(error))
        with contextlib.closing(found):
            loader = _loader(task, kind)(found, 0, calls)
            with contextlib.closing(_Ended(loader)):
                return task.read(loader, calls)

    return read


def auto(workers: int) -> Way:
    """`DataLoader(cache="auto")`, over a source with work that is worth a cache, or over a plain data set."""

    def read(task: Task) -> Looked:
        fresh = make(task.entry)
        calls = calls_of(task.entry, fresh) if task.counted else None
        dataset = Costly(fresh.records.records, fresh.steps) if fresh.steps else fresh.plain
        with contextlib.redirect_stderr(io.StringIO()):
            loader = task.sf_loader(dataset, workers, calls, cache="auto", capacity=ROOM, seed=task.seed)
            with contextlib.closing(_Ended(loader)):
                looked = task.read(loader, calls, counted=1)  # before the third it may measure again
                looked.decision = loader.decision
        return looked

    return read


def shared() -> Way:
    """A `SharedLoader` of one job, over a `CachedDataset`."""

    def read(task: Task) -> Looked:
        fresh = make(task.entry)
        transform = sf.Compose(fresh.steps) if fresh.steps else None
        try:
            found = sf.CachedDataset(fresh.records, capacity=ROOM, seed=task.seed, name=_name(), transform=transform)
        except sf.InputError as error:
            if type(error) is not sf.InputError or transform is not None:
                raise
            return Looked([], refused=str(error))
        with (
            found,
            sf.SharedLoader(
                found,
                group=_name(),
                batch_size=BATCH,
                seed=task.seed,
                collate_fn=None if task.stacked else as_list,
            ) as loader,
        ):
            return task.read(loader, None)

    return read


class _Ended:
    """Ends the workers of a loader when it is closed."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def close(self) -> None:
        close = getattr(self._loader, "close", None)
        if close is not None:
            close()
        self._loader = None


def _loader(task: Task, kind: str) -> Callable[..., Any]:
    return task.sf_loader if kind == "sf" else task.torch_loader


def _name() -> str:
    """No two caches are one."""
    return f"zoo-{os.getpid()}-{next(_names)}"


PLAIN: dict[str, Way] = {f"{kind} {workers}": plain(kind, workers) for kind in ("sf", "torch") for workers in (0, 2)}
"""By loader and number of workers."""

WAYS: dict[str, tuple[str, Way]] = {
    **{
        f"{form}, {kind} {workers}": (f"{kind} {workers}", cached(kind, workers, form))
        for form in ("prepared", "auto")
        for kind in ("sf", "torch")
        for workers in (0, 2)
    },
    "whole, sf 0": ("sf 0", cached_whole("sf", 0)),
    "whole, sf 2": ("sf 2", cached_whole("sf", 2)),
    "whole, torch 0": ("torch 0", cached_whole("torch", 0)),
    "smart, sf 0": ("sf 0", smart("sf")),
    "smart, torch 0": ("torch 0", smart("torch")),
    "cache=auto, sf 0": ("sf 0", auto(0)),
    "shared": ("sf 2", shared()),
}
"""By name: the plain way that it is compared with, and the way."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that are due to the entries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
