"""Clara's data list, and a source of its samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stallfree.clara.arguments import Arguments
from stallfree.clara.configuration import read_json
from stallfree.clara.fields import is_number, is_text
from stallfree.errors import clara_configuration
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.sources.base import BaseSource
from stallfree.sources.paths import PathList, canonical, is_url, read_file

Labels = np.ndarray[Any, np.dtype[Any]]


class DataListSource(BaseSource):
    """Images with their labels, which are files (segmentation) or numbers (classification).

    `fetch(id)` returns `{"image": bytes, "label": bytes or numbers}`, or paths in place of bytes for steps that read
    files themselves.

    Args:
        images: paths or fsspec URLs, one per sample.
        labels: paths or fsspec URLs, or an array with one row per sample.
        steps: pipeline applied to the fetched record.
        read: read the files; else return their paths.
    """

    def __init__(
        self, images: Sequence[str], labels: Sequence[str] | Labels, steps: Compose, *, read: bool = True
    ) -> None:
        self._images = PathList(images)
        self._labels = labels if isinstance(labels, np.ndarray) else PathList(labels)
        self._read = read
        self.pipeline = steps

    def __len__(self) -> int:
        return len(self._images)

    def _record(self, id: int) -> dict[str, Any]:
        load: Callable[[str], Any] = read_file if self._read else str
        label = self._labels[id]
        return {
            "image": load(self._images[id]),
            "label": load(label) if isinstance(self._labels, PathList) else label.copy(),
        }

    def _where(self, id: int) -> str:
        image: str = self._images[id]
        return f"{image}, {self._labels[id]}" if isinstance(self._labels, PathList) else image

    def fingerprint(self) -> str:
        """Return a text that changes with any path or label, or the size of any of 256 local files, evenly spread."""
        labels = self._labels.fingerprint() if isinstance(self._labels, PathList) else fingerprint(self._labels)
        return f"DataListSource {self._read} {self._images.fingerprint()} {labels}"

    def __repr__(self) -> str:
        return f"DataListSource({len(self)} samples, first {self.where(0)!r})"


def read_data_list(arguments: Arguments) -> tuple[list[str], list[str] | Labels]:
    """Return the images and labels that `arguments` name. Raises `InputError` for an invalid list."""
    path = arguments.data_list_file_path
    found = read_json(path, "the data list")
    key = arguments.data_list_key
    if key not in found:
        lists = [repr(name) for name, value in found.items() if isinstance(value, list)]
        raise clara_configuration(
            f"{arguments.place}: the data list {path!r} has no {key!r}: set data_list_key to one of its lists "
            f"({', '.join(lists) or 'it has none'})"
        )
    entries = found[key]
    if not isinstance(entries, list) or not entries:
        raise clara_configuration(
            f"{key!r} of the data list {path!r} is {'empty' if entries == [] else type(entries).__name__}: expected a "
            'list of at least one {"image": ..., "label": ...}'
        )
    places = [f"{key}[{number}] of the data list {path!r}" for number in range(len(entries))]
    for entry, place in zip(entries, places, strict=True):
        if not isinstance(entry, dict) or "image" not in entry or "label" not in entry:
            raise clara_configuration(f'{place} is {entry!r}, expected {{"image": path, "label": path or numbers}}')
        if not is_text(entry["image"]):
            raise clara_configuration(f"{place}: image={entry['image']!r}, expected the path of one file")
    base = canonical(arguments.data_file_base_dir)
    images = [_join(base, entry["image"]) for entry in entries]
    if not arguments.volumes:
        return images, _numbers([entry["label"] for entry in entries], places)
    for entry, place in zip(entries, places, strict=True):
        if not is_text(entry["label"]):
            raise clara_configuration(
                f"{place}: label={entry['label']!r}, and {arguments.name} wants the path of a volume; for numbers use "
                "a ClassificationImagePipeline"
            )
    return images, [_join(base, entry["label"]) for entry in entries]


def _numbers(labels: list[Any], places: list[str]) -> Labels:
    """Return one row per label: int64 if all are integers, else float32; shape (N,), or (N, K) for lists of K."""
    first = np.shape(labels[0]) if _is_label(labels[0]) else None
    for label, place in zip(labels, places, strict=True):
        if not _is_label(label):
            raise clara_configuration(
                f"{place}: label={label!r}, expected a number or a list of numbers; for volumes use a "
                "SegmentationImagePipeline"
            )
        if np.shape(label) != first:
            raise clara_configuration(
                f"{place}: label={label!r} and the first label is {labels[0]!r}: give all the same form"
            )
    found = np.array(labels)
    return found.astype(np.int64 if found.dtype.kind == "i" else np.float32)


def _is_label(label: Any) -> bool:
    parts = label if isinstance(label, list) else [label]
    known = [is_number(part) and (isinstance(part, float) or -(2**63) <= part < 2**63) for part in parts]
    return bool(parts) and all(known)


def _join(base: str, path: str) -> str:
    """Return `path` below `base`; `path` itself if it is absolute or a URL."""
    if is_url(base) and not is_url(path) and not os.path.isabs(path):
        return f"{base.rstrip('/')}/{path.removeprefix('./')}"
    return path if is_url(path) else os.path.normpath(os.path.join(base, path))
