"""Any map-style data set as a source."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, TypeGuard

import numpy as np

from stallfree.errors import dataset_type, iterable_unsupported
from stallfree.notes import note_sample
from stallfree.pipeline.compose import Compose, OnItem, mark_of
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.pipeline.objects import comes_from
from stallfree.pipeline.protocol import Source
from stallfree.sources.base import BaseSource, require_samples

_KNOWN = ("torchvision.datasets", "datasets")
"""Libraries whose data sets are cut into reading and transform."""

_FOLDER = "torchvision.datasets.folder"


class MapSource(BaseSource):
    """A map-style data set whose `dataset[id]` counts as the fetch; the pipeline is empty.

    Attributes:
        dataset: the data set; if it has only `__getitems__`, wrapped in `Singly`.
        threads: False, as a user's data set may not allow several threads at once.

    Raises:
        InputError: the data set is iterable-style, cannot be indexed, has no length, or has length 0.
    """

    threads = False

    def __init__(self, dataset: Any) -> None:
        require_map_style(dataset)
        require_samples(len(dataset), f"The data set {type(dataset).__name__}", "Give one with at least one sample.")
        self.dataset = dataset if _has_getitem(dataset) else Singly(dataset)
        self.pipeline = Compose([])

    def __len__(self) -> int:
        return len(self.dataset)

    def _record(self, id: int) -> Any:
        return self.dataset[id]

    def fingerprint(self) -> str:
        """The fingerprint of the data set object: its class, its code and its attributes."""
        return f"MapSource {fingerprint(self.dataset)}"

    def __repr__(self) -> str:
        return f"MapSource({type(self.dataset).__name__}, {len(self)} samples)"


class Singly:
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
        require_samples(len(subset.indices), f"The subset of {type(source).__name__}", "Give at least one index.")
        self.source, self.subset = source, subset
        self.pipeline = source.pipeline
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

    def __repr__(self) -> str:
        return f"SubsetSource({self.source!r}, {len(self)} samples)"


def as_source(dataset: Any, *, divide: bool = True) -> Source:
    """Return a data set as a `Source`: itself if it is one, else in a `MapSource`.

    A `torch.utils.data.Subset` of a `Source`, such as `random_split` gives, becomes a `SubsetSource`. An `ImageFolder`
    of torchvision, and data sets of Hugging Face with a transform, become a source whose `pipeline` is their transform.
    With `divide=False` they stay whole.

    Raises `InputError` for an object that is not a map-style data set, and for an empty one.
    """
    if is_source(dataset):
        require_samples(len(dataset), f"The source {type(dataset).__name__}", "Give one with at least one sample.")
        return dataset
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and type(dataset) is torch_data.Subset:
        inner = as_source(dataset.dataset, divide=divide)
        if not isinstance(inner, MapSource):
            return SubsetSource(inner, dataset)
    if divide and any(comes_from(cls, library) for cls in type(dataset).__mro__ for library in _KNOWN):
        return _known_source(dataset) or MapSource(dataset)
    return MapSource(dataset)


def is_source(dataset: Any) -> TypeGuard[Source]:
    """Whether it is a `Source`, by its class: a data set may have any attribute that it is asked for."""
    return hasattr(type(dataset), "fetch") and isinstance(dataset, Source) and not isinstance(dataset, type)


def is_iterable(dataset: Any) -> bool:
    """Whether it is an iterable data set: only torch's own loader makes its batches."""
    torch_data = sys.modules.get("torch.utils.data")  # an instance of its classes exists only if it has been imported
    return torch_data is not None and isinstance(dataset, torch_data.IterableDataset)


def require_map_style(dataset: Any) -> None:
    """Raise `InputError` for what is no map-style data set."""
    name = type(dataset).__name__
    if isinstance(dataset, type):
        raise dataset_type(f"{dataset.__name__} is a class: give an instance of it")
    if isinstance(dataset, (str, bytes, bytearray, PurePath)):
        raise dataset_type(
            f"{dataset!r:.80} is of type {name}: give a data set. For a folder of pictures that is "
            "stallfree.ImageFolder(path)"
        )
    if is_iterable(dataset):
        raise iterable_unsupported(
            f"{name} is an IterableDataset: samples are cached and planned by their id, so a map-style data set with "
            "__getitem__ and __len__ is needed. If it fits in memory, give list(dataset)"
        )
    for methods in (("__getitem__", "__getitems__"), ("__len__",)):
        if not any(hasattr(type(dataset), method) for method in methods):
            method = methods[0]
            raise dataset_type(
                f"{name} has no {method}: give a map-style data set, whose samples are dataset[0] to "
                "dataset[len(dataset) - 1]"
            )


def _has_getitem(dataset: Any) -> bool:
    """Whether its class defines `__getitem__`; that of `torch.utils.data.Dataset` raises `NotImplementedError`."""
    torch_data = sys.modules.get("torch.utils.data")
    inherited = None if torch_data is None else torch_data.Dataset.__getitem__
    return getattr(type(dataset), "__getitem__", None) not in (None, inherited) or not hasattr(dataset, "__getitems__")


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


# --- data sets of torchvision and Hugging Face ----------------------------------------------------------------------


def _known_source(dataset: Any) -> Source | None:
    """Return an `ImageFolder` of torchvision, or a data set of Hugging Face with a transform, as a source.

    Returns None if it is of another class, or marked. Classes are recognised by name and module, so neither library is
    imported here.
    """
    cls = type(dataset)
    if mark_of(dataset) is not None:
        return None
    if cls.__name__ == "Dataset" and comes_from(cls, "datasets.arrow_dataset"):
        form = dataset.format
        transform = form["format_kwargs"].get("transform")
        if form["type"] != "custom" or transform is None or set(form["columns"]) != set(dataset.column_names):
            return None
        return RowSource(dataset, transform)
    reads = getattr(cls.__getitem__, "__module__", "")  # a class of the user's may do anything with its transforms
    if reads == _FOLDER and getattr(dataset.loader, "__module__", "") == _FOLDER and _decodes_with_pillow(dataset):
        from stallfree.sources.decode import DecodeImage
        from stallfree.sources.files import FileDataset

        paths, labels = zip(*dataset.samples, strict=True)
        files = FileDataset(paths, labels, decode=DecodeImage("pil"))
        transforms = enumerate((dataset.transform, dataset.target_transform))
        files.pipeline = Compose([*files.pipeline, *(OnItem(at, step) for at, step in transforms if step is not None)])
        files.watched = _watched(dataset, "transform", "target_transform", "loader")
        return files
    return None


def _decodes_with_pillow(dataset: Any) -> bool:
    backend = getattr(sys.modules.get("torchvision"), "get_image_backend", None)
    return dataset.loader.__name__ in ("default_loader", "pil_loader") and (backend is None or backend() == "PIL")


def _watched(dataset: Any, *names: str) -> list[tuple[Any, str, Any]]:
    return [(dataset, name, getattr(dataset, name)) for name in names if hasattr(dataset, name)]


class RowSource(BaseSource):
    """A data set of Hugging Face without its transform, which is in `pipeline`."""

    threads = False

    def __init__(self, dataset: Any, transform: Callable[[dict[str, Any]], Any]) -> None:
        self._rows = dataset.with_format(None)
        self.pipeline = Compose([OnRow(transform)])
        self.watched = _watched(dataset, "_format_type", "_format_kwargs", "_format_columns", "_output_all_columns")

    def __len__(self) -> int:
        return len(self._rows)

    def _record(self, id: int) -> Any:
        return self._rows[id]

    def fingerprint(self) -> str:
        """The fingerprint of the data set without its transform."""
        return f"RowSource {fingerprint(self._rows)}"

    def __repr__(self) -> str:
        return f"RowSource({len(self)} samples)"


class OnRow:
    """Calls `transform` with a batch of one row, as `datasets` does for the transform of `with_transform`."""

    def __init__(self, transform: Callable[[dict[str, Any]], Any]) -> None:
        self.transform = transform

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: column[0] for name, column in self.transform({key: [row[key]] for key in row}).items()}

    def __repr__(self) -> str:
        return f"OnRow({self.transform!r})"
