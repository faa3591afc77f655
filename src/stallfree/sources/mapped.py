"""Sources of samples: what all of them share, and any map-style data set as a source."""

import operator
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from types import MethodType
from typing import Any, TypeGuard

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Subset

from stallfree.errors import IdError, dataset_changed, dataset_empty, dataset_type, iterable_unsupported
from stallfree.pipeline.compose import Compose, OnItem, Source, mark_of
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.pipeline.objects import attributes_used
from stallfree.raising import note_sample, raisable

_FOLDER = "torchvision.datasets.folder"


def normalize_id(id: int, length: int) -> int:
    """`id` as an int in 0..length-1: negative ids count from the end, integers of any type are taken.

    Raises `IdError`, an `IndexError`, when it is out of range, and `TypeError` when it is no integer.
    """
    index = operator.index(id)
    if not -length <= index < length:
        raise IdError(f"id {index} is out of range: the data set has {length} samples")
    return index + length if index < 0 else index


class BaseSource(ABC):
    """A `Source` made from four methods: its length, a record, its location, and the fingerprint.

    Attributes:
        pipeline: turns what `fetch` returned into the sample.
        threads: whether `fetch` may run in several threads at once.
        watched: attributes of a data set, each as the data set, a dotted name, and the value that was used. `fetch`
            raises `InputError` when one has been replaced since: it would have no effect.
    """

    pipeline: Compose
    threads: bool = True
    watched: Sequence[tuple[Any, str, Any]] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _record(self, id: int) -> Any:
        """The record of `id`, which is in 0..len-1."""

    def _where(self, id: int) -> str:
        """The place of `id`, which is in 0..len-1; empty if it is not known."""
        return ""

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that changes when the records change. Does not cover `pipeline`."""

    def where(self, id: int) -> str:
        """The path or URL of sample `id`; empty when it is not known."""
        return self._where(normalize_id(id, len(self)))

    def fetch(self, id: int) -> Any:
        """The record of sample `id` as storage holds it. Raises `IndexError` for an id out of range."""
        self.check_watched()
        return self._record(normalize_id(id, len(self)))

    def check_watched(self) -> None:
        """Raise `InputError` if a watched attribute has been replaced."""
        for dataset, name, value in self.watched:
            if not is_same(value_at(dataset, name), value):
                raise dataset_changed(
                    f"the {name.removeprefix('_')} of {type(dataset).__name__} was changed after the data set was "
                    "given away: make a new loader (and CachedDataset) with the data set as it is now"
                )

    def __getitem__(self, id: int) -> Any:
        id = normalize_id(id, len(self))
        doing = "fetching"
        try:
            record = self.fetch(id)
            doing = "preparing"
            return self.pipeline(record)
        except Exception as error:
            note_sample(error, self, id, doing)
            if isinstance(error, StopIteration):
                raise raisable(error) from error
            raise

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __repr__(self) -> str:
        origin = vars(self).get("dataset", vars(self).get("source"))
        return f"{type(self).__name__}({'' if origin is None else f'{type(origin).__name__}, '}{len(self)} samples)"


def require_samples(length: int, what: str, advice: str) -> None:
    """Raise `InputError` when `length` is 0: `what` is empty, and `advice` says what to do."""
    if length == 0:
        raise dataset_empty(f"{what} has length 0: there is nothing to train on. {advice}")


def value_at(dataset: Any, name: str) -> Any:
    """Return the value of a dotted attribute such as `"inner.transform"` or `"datasets.0.transform"`.

    Raises `AttributeError`, `LookupError` or `ValueError` if there is none.
    """
    for part in name.split("."):
        if isinstance(dataset, dict):
            dataset = dataset[part]
        else:
            dataset = dataset[int(part)] if isinstance(dataset, (list, tuple)) else getattr(dataset, part)
    return dataset


def is_same(value: Any, other: Any) -> bool:
    """Return whether both are one object; each access to a bound method makes a new one."""
    return value is other or (isinstance(value, MethodType) and bool(value == other))


class MapSource(BaseSource):
    """A map-style data set whose `dataset[id]` counts as the fetch; the pipeline is empty.

    Attributes:
        dataset: the data set; if it has only `__getitems__`, wrapped in `SingleItems`.
        threads: False, as a user's data set may not allow several threads at once.

    Raises:
        InputError: the data set is iterable-style, cannot be indexed, or has no length.
    """

    threads = False

    def __init__(self, dataset: Any) -> None:
        require_map_style(dataset)
        getitem = getattr(type(dataset), "__getitem__", Dataset.__getitem__)  # that of `Dataset` raises an error
        by_batches = getitem is Dataset.__getitem__ and hasattr(dataset, "__getitems__")
        self.dataset = SingleItems(dataset) if by_batches else dataset
        self.pipeline = Compose([])

    def __len__(self) -> int:
        return len(self.dataset)

    def _record(self, id: int) -> Any:
        return self.dataset[id]

    def where(self, id: int) -> str:
        """See `BaseSource`: not known, and an id may be any that the data set takes."""
        return ""

    def fingerprint(self) -> str:
        """The fingerprint of the data set object: its class, its code and its attributes."""
        return f"MapSource {fingerprint(self.dataset, directory_of(self.dataset))}"


def directory_of(dataset: Any) -> str | None:
    """Return the current directory if an attribute that a data set uses is a relative path there, or a list of them."""
    for *_, value in attributes_used(dataset):
        path = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(path, (str, PurePath)) and not os.path.isabs(path) and os.path.exists(path):
            return os.getcwd()
    return None


class SingleItems:
    """A data set that has only `__getitems__`, which torch's loader accepts, with a `__getitem__` that calls it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, id: int) -> Any:
        found = self.__getitems__([id])
        if not isinstance(found, (list, tuple)) or len(found) != 1:
            raise dataset_type(
                f"__getitems__ of {type(self.dataset).__name__} returned a {type(found).__name__}, and not a list of "
                "the samples: to cache or skip single samples, add a __getitem__"
            )
        return found[0]

    def __getitems__(self, ids: list[int]) -> Any:
        return self.dataset.__getitems__(ids)


class SubsetSource(BaseSource):
    """Some samples of another source, with its separate fetch and prep: the form of a `torch.utils.data.Subset`.

    As a mere map-style data set, its randomly augmented samples would be taken for the records.

    Attributes:
        source: the source that the samples are from.
        subset: the `Subset`, which has the id there of each sample here.
    """

    def __init__(self, source: Source, subset: Any) -> None:
        self.source, self.subset, self.pipeline = source, subset, source.pipeline
        self.threads = getattr(source, "threads", True)

    def __len__(self) -> int:
        return len(self.subset.indices)

    def _record(self, id: int) -> Any:
        return self.source.fetch(int(self.subset.indices[id]))

    def _where(self, id: int) -> str:
        return self.source.where(int(self.subset.indices[id]))

    def fingerprint(self) -> str:
        """Changes with the fingerprint of the source and with the indices."""
        indices = np.fromiter(map(operator.index, self.subset.indices), np.int64, len(self))
        return f"SubsetSource {self.source.fingerprint()} {fingerprint(indices)}"


def as_source(dataset: Any, *, divide: bool = True, empty: bool = False) -> Source:
    """Return a data set as a `Source`: itself if it is one, else in a `MapSource`.

    A `torch.utils.data.Subset` of a `Source`, such as `random_split` gives, becomes a `SubsetSource`. An `ImageFolder`
    of torchvision becomes a source whose `pipeline` is its transform; with `divide=False` it stays whole.

    Raises `InputError` for an object that is not a map-style data set, and unless `empty` for one without samples.
    """
    inner = as_source(dataset.dataset, divide=divide, empty=True) if type(dataset) is Subset else None
    if inner is not None and not isinstance(inner, MapSource):
        source: Source = SubsetSource(inner, dataset)
    elif is_source(dataset):
        source = dataset
    else:
        source = (_folder_source(dataset) if divide else None) or MapSource(dataset)
    require_samples(
        len(source) or empty, f"The data set {type(dataset).__name__}", "Give one with at least one sample."
    )
    return source


def is_source(dataset: Any) -> TypeGuard[Source]:
    """Whether it is a `Source`, by its class: a data set may have any attribute that it is asked for."""
    return hasattr(type(dataset), "fetch") and isinstance(dataset, Source) and not isinstance(dataset, type)


def is_iterable(dataset: Any) -> bool:
    """Whether it is an iterable data set: only torch's own loader makes its batches."""
    return isinstance(dataset, IterableDataset)


def require_map_style(dataset: Any) -> None:
    """Raise `InputError` for what is no map-style data set."""
    name = type(dataset).__name__
    if isinstance(dataset, type):
        raise dataset_type(f"{dataset.__name__} is a class: give an instance of it")
    if isinstance(dataset, (str, bytes, bytearray, PurePath)):
        raise dataset_type(f"{dataset!r:.80} is of type {name}: give a data set, such as stallfree.ImageFolder(path)")
    if is_iterable(dataset):
        raise iterable_unsupported(
            f"{name} is an IterableDataset, whose samples have no ids: give a map-style data set, or list(dataset)"
        )
    indexed = hasattr(type(dataset), "__getitem__") or hasattr(type(dataset), "__getitems__")
    if not indexed or not hasattr(type(dataset), "__len__"):
        raise dataset_type(f"{name} has no {'__len__' if indexed else '__getitem__'}: give a map-style data set")


def samples_of(source: object, ids: Sequence[int], make: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
    """Yield the samples of those `ids` that can be made. Raises the error of the first one if none can."""
    problem, any_made = None, False
    for id in ids:
        try:
            sample = make(id)
        except Exception as error:
            note_sample(error, source, id, "fetching")
            problem = problem or error
        else:
            any_made = True
            yield id, sample
    if problem is not None and not any_made:
        raise problem


def _folder_source(dataset: Any) -> Source | None:
    """Return an `ImageFolder` of torchvision as a source of its files; None for another class, and for a marked one.

    It is recognised by name and module, so that torchvision is not imported here.
    """
    # A class of the user's may do anything with its transforms.
    reads = {getattr(getattr(type(dataset), name, None), "__module__", "") for name in ("__getitem__", "__len__")}
    if reads != {_FOLDER} or hasattr(type(dataset), "__getitems__") or mark_of(dataset) is not None or not len(dataset):
        return None
    backend = getattr(sys.modules.get("torchvision"), "get_image_backend", lambda: "PIL")()
    loads = getattr(dataset.loader, "__module__", ""), getattr(dataset.loader, "__name__", "")
    if loads != (_FOLDER, "pil_loader") and (*loads, backend) != (_FOLDER, "default_loader", "PIL"):
        return None
    from stallfree.sources.files import DecodeImage, FilesOf

    paths, labels = zip(*dataset.samples, strict=True)
    files = FilesOf(paths, labels, decode=DecodeImage("pil"))
    files.dataset = dataset
    transforms = enumerate((dataset.transform, dataset.target_transform))
    files.pipeline = Compose([*files.pipeline, *(OnItem(at, step) for at, step in transforms if step is not None)])
    files.watched = [(dataset, name, getattr(dataset, name)) for name in ("transform", "target_transform", "loader")]
    return files
