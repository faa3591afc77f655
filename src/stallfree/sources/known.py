"""Data sets of torchvision and Hugging Face as sources: reading apart from their transform.

Their classes are recognised by name and module, so neither library is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from stallfree.errors import dataset_changed
from stallfree.pipeline.compose import Compose, OnItem, Transform, flatten, mark_of
from stallfree.pipeline.objects import comes_from
from stallfree.sources.base import BaseSource
from stallfree.sources.decode import DecodeImage
from stallfree.sources.files import FileDataset

_FORMAT = ("_format_type", "_format_kwargs", "_format_columns", "_output_all_columns")
_FOLDER = "torchvision.datasets.folder"


class DividedSource(BaseSource):
    """A data set whose `fetch` leaves out its own transform, which is in `pipeline`. The samples are the same.

    `fetch` raises `InputError` when the transform of the data set has been replaced since: it would have no effect.

    Args:
        dataset: the data set.
        inner: the same without its transform.
        steps: the transform, as steps.
        watched: the attributes of `dataset` that say what its transform is.
    """

    def __init__(self, dataset: Any, inner: BaseSource, steps: Sequence[Transform], watched: Sequence[str]) -> None:
        self.dataset, self._inner = dataset, inner
        self.pipeline = Compose([*inner.pipeline, *steps])
        self.threads = inner.threads
        self._watched = {name: getattr(dataset, name, None) for name in watched}

    def __len__(self) -> int:
        return len(self.dataset)

    def _record(self, id: int) -> Any:
        for name, value in self._watched.items():
            if getattr(self.dataset, name, None) is not value:
                raise dataset_changed(
                    f"the {name.removeprefix('_')} of {type(self.dataset).__name__} was changed after the data set was "
                    "given away: make a new loader (and CachedDataset) with the data set as it is now"
                )
        return self._inner.fetch(id)

    def _where(self, id: int) -> str:
        return self._inner.where(id)

    def fingerprint(self) -> str:
        """The fingerprint of the data set without its transform."""
        return f"DividedSource {self._inner.fingerprint()}"

    def __repr__(self) -> str:
        return f"DividedSource({type(self.dataset).__name__}, {len(self)} samples)"


class OnRow:
    """Calls `transform` with a batch of one row, as `datasets` does for the transform of `with_transform`."""

    def __init__(self, transform: Callable[[dict[str, Any]], Any]) -> None:
        self.transform = transform

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: column[0] for name, column in self.transform({key: [row[key]] for key in row}).items()}

    def __repr__(self) -> str:
        return f"OnRow({self.transform!r})"


def divided(dataset: Any, plain: Callable[[Any], BaseSource]) -> DividedSource | None:
    """Return an `ImageFolder` of torchvision, or a data set of Hugging Face with a transform, as a source.

    Returns None if it is of another class, or marked.

    Args:
        dataset: any map-style data set.
        plain: makes a source of a data set that has no transform.
    """
    cls = type(dataset)
    if mark_of(dataset) is not None:
        return None
    if cls.__name__ == "Dataset" and comes_from(cls, "datasets.arrow_dataset"):
        form = dataset.format
        transform = form["format_kwargs"].get("transform")
        if form["type"] != "custom" or transform is None or set(form["columns"]) != set(dataset.column_names):
            return None
        return DividedSource(dataset, plain(dataset.with_format(None)), [OnRow(transform)], _FORMAT)
    reads = getattr(cls.__getitem__, "__module__", "")  # a class of the user's may do anything with its transforms
    if reads == _FOLDER and getattr(dataset.loader, "__module__", "") == _FOLDER and _decodes_with_pillow(dataset):
        paths, labels = zip(*dataset.samples, strict=True)
        files = FileDataset(paths, labels, decode=DecodeImage("pil"))
        steps = [dataset.transform, dataset.target_transform]
        parts = [part for place, step in enumerate(steps) if step is not None for part in flatten(OnItem(place, step))]
        return DividedSource(dataset, files, parts, ("transform", "target_transform", "loader"))
    return None


def _decodes_with_pillow(dataset: Any) -> bool:
    backend = getattr(sys.modules.get("torchvision"), "get_image_backend", None)
    return dataset.loader.__name__ in ("default_loader", "pil_loader") and (backend is None or backend() == "PIL")
