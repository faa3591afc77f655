"""A data set of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

from stallfree.errors import InputError
from stallfree.pipeline.compose import Compose, OnItem, flatten
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.sources.base import BaseSource, require_samples
from stallfree.sources.paths import LabelList, PathList, canonical, read_file


class FileDataset(BaseSource):
    """Files as samples: `(transform(decode(bytes)), label)`, or without the label where there are none.

    Fetch and prep are separate: `fetch(id)` gives `(bytes, label)` (only the bytes without labels), and `pipeline`
    does what follows. Safe in threads, in forked processes and under spawn. Millions of paths take one buffer, not one
    object each, so workers share them.

    Args:
        paths: local paths or fsspec URLs (`https://`, `s3://`, `memory://`, ...), one per sample. Relative local paths
            are taken from the directory that is current now.
        labels: one label per path; None for samples without.
        transform: called with the decoded picture (with the bytes, without `decode`), never with the label. A `Compose`
            is split into its steps. None changes nothing.
        decode: the first step, for instance `DecodeImage()`. None leaves the bytes as they are.

    Raises:
        InputError: no paths, a path that is no text, or another number of labels than of paths.

    Example:
        ```python
        data = sf.FileDataset(["pictures/a/0.jpg", "pictures/b/1.jpg"], [0, 1], decode=sf.DecodeImage())
        image, label = data[1]
        assert label == 1
        ```
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        labels: Sequence[Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: Callable[[bytes], Any] | None = None,
    ) -> None:
        if isinstance(paths, (str, bytes, os.PathLike)):
            raise InputError(f"paths={paths!r} is one path: give a list of them")
        if isinstance(paths, type) or not isinstance(paths, Iterable):
            raise InputError(f"paths={paths!r:.80} cannot be iterated: give a list of paths")
        if labels is not None and not isinstance(labels, Sized):
            raise InputError(f"labels={labels!r:.80} has no length: give a list with one label per path, or None")
        self._paths = PathList(canonical(path) for path in paths)
        require_samples(len(self._paths), "This FileDataset", "Give at least one path.")
        self._labels = None if labels is None else LabelList(labels)
        if self._labels is not None and len(self._labels) != len(self._paths):
            raise InputError(f"{len(self._labels)} labels for {len(self._paths)} paths: give one label per path")
        steps: list[Callable[[Any], Any]] = ([] if decode is None else [decode]) + list(flatten(transform))
        self.pipeline = Compose(steps if self._labels is None else [OnItem(0, step) for step in steps])

    def __len__(self) -> int:
        return len(self._paths)

    def _record(self, id: int) -> Any:
        data = read_file(self._paths[id])
        return data if self._labels is None else (data, self._labels[id])

    def _where(self, id: int) -> str:
        path: str = self._paths[id]
        return path

    def fingerprint(self) -> str:
        """Changes when a path, a label or the size of a file changes.

        Sizes are those of at most 256 local files, evenly spread.
        """
        labels = None if self._labels is None else self._labels.values
        return f"FileDataset {self._paths.fingerprint()} {fingerprint(labels)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} files, first {self._paths[0]!r})"
