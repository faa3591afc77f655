"""WebDataset's tar shards as a source whose samples can be had in any order."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.errors import InputError, tar_samples
from stallfree.ipc.folders import is_path
from stallfree.pipeline.compose import Compose, flatten
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.platform import OPEN
from stallfree.sources.base import BaseSource, require_samples
from stallfree.sources.paths import PathList, canonical, is_url, open_url
from stallfree.sources.tar_index import ShardIndex, index_of, stamp_of_status, user_folder

_KEY = "__key__"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_NEAR = 64 << 10
"""Bytes between two members of a sample up to which both are read at once."""
_THREADS = 8
"""Shards whose headers are read at once."""


class TarDataset(BaseSource):
    """The samples in WebDataset's tar shards, as a map-style data set.

    Any sample is read by its id, from storage.

    A sample is what WebDataset gives undecoded: the bytes of its files by extension, and its name under `__key__`. Its
    ids count through the shards in the order given. Names may come again in another shard. Hidden files, names without
    an extension, and `__...__` at the top of a shard are left out.

    Where each file lies is read from the headers once, and kept (see `index`). `fetch` is one read at a place, of
    neighbouring files together; safe in threads, in forked processes and under spawn. Memory: about 50 bytes per sample
    and 20 per file.

    Args:
        shards: one path or fsspec URL, or a sequence of them; `{000..146}` stands for these numbers. Plain tars.
        transform: called with the sample. A `Compose` is split into its steps; `OnItem("jpg", DecodeImage())` is
            one for a single file. None changes nothing.
        keys: the extensions that are wanted: a sample is then a tuple with the bytes of each. `"jpg;png"` is whichever
            of them the sample has, `"__key__"` its name. None: a dict of all.
        index: folder in which indexes are kept and looked for, for instance one that all nodes share. None:
            `stallfree/tar` in the user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`).

    Raises:
        InputError: no shards; one that is missing, compressed, damaged or cut off; a name that occurs twice in a shard;
            a sample that lacks one of `keys`. `fetch` raises an `OSError` when a local shard has been changed since.

    Example:
        ```python
        data = sf.TarDataset("train-{000..001}.tar", keys=("jpg", "cls"))
        encoded, label = data[1]
        image = sf.DecodeImage()(encoded)
        ```
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        transform: Callable[[Any], Any] | None = None,
        *,
        keys: Sequence[str] | None = None,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(shards, type) or not isinstance(shards, (str, os.PathLike, Iterable)):
            raise InputError(f"shards={shards!r:.80}: give the path of a tar file, or a list of them")
        if index is not None and not is_path(index):
            raise InputError(f"index={index!r:.80}: give the path of a folder, or None")
        given = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
        self._shards = [canonical(name) for shard in given for name in _expand(shard)]
        if not self._shards:
            raise InputError("TarDataset was given no shards: give at least one path of a tar file")
        self._keys = None if keys is None else _checked(keys)
        folder = user_folder() if index is None else Path(index).absolute()
        with ThreadPoolExecutor(min(_THREADS, len(self._shards))) as pool:
            indexes = list(pool.map(lambda shard: index_of(shard, folder), self._shards))
        self._take(indexes)
        require_samples(len(self), f"TarDataset({self._shards[0]!r}, ...)", "Give shards that hold samples.")
        self._wanted = None if self._keys is None else self._choose(self._keys)
        self.pipeline = Compose(flatten(transform))

    def _take(self, indexes: list[ShardIndex]) -> None:
        """Put the indexes of all shards behind each other."""
        self._stamps = [index.stamp for index in indexes]
        self._digests = [index.digest for index in indexes]
        self._starts = np.cumsum([0, *(len(index.keys) for index in indexes)]).tolist()
        self._names = PathList(key for index in indexes for key in index.keys)
        self._extensions = sorted({extension for index in indexes for extension in index.extensions})
        places = {extension: place for place, extension in enumerate(self._extensions)}
        members = np.cumsum([0, *(len(index.offset) for index in indexes)])
        firsts = [index.first[:-1] + before for index, before in zip(indexes, members, strict=False)]
        self._first = np.concatenate([*firsts, members[-1:]])
        self._extension = np.concatenate(
            [np.array([places[e] for e in index.extensions], np.int32)[index.extension] for index in indexes]
        )
        self._offset = np.concatenate([index.offset for index in indexes])
        self._size = np.concatenate([index.size for index in indexes])

    def _choose(self, keys: tuple[str, ...]) -> npt.NDArray[np.int64]:
        """For each sample the numbers of the members that `keys` stand for; -1 for its name."""
        owner = np.repeat(np.arange(len(self)), np.diff(self._first))
        wanted = np.full((len(self), len(keys)), -1, np.int64)
        for column, key in enumerate(keys):
            if key == _KEY:
                continue
            for extension in reversed(key.lower().split(";")):  # of several, the one named first
                if extension in self._extensions:
                    members = np.flatnonzero(self._extension == self._extensions.index(extension))
                    wanted[owner[members], column] = members
            lacking = np.flatnonzero(wanted[:, column] < 0)
            if len(lacking):
                id = int(lacking[0])
                there = ", ".join(self._extensions[self._extension[member]] for member in self._members(id)[:8])
                raise tar_samples(
                    f"{len(lacking)} of {len(self)} samples have no file {key!r}; the first is {self._where(id)}, "
                    f"which has {there}: leave it out of keys, or name what may stand in its place, such as 'jpg;png'"
                )
        return wanted

    def __len__(self) -> int:
        return len(self._names)

    def _members(self, id: int) -> range:
        return range(int(self._first[id]), int(self._first[id + 1]))

    def _record(self, id: int) -> Any:
        if self._wanted is None:
            members = list(self._members(id))
            data = self._read(id, members)
            named = {self._extensions[self._extension[member]]: data[member] for member in members}
            return {_KEY: self._names[id], **named}
        members = self._wanted[id].tolist()
        data = self._read(id, sorted({member for member in members if member >= 0}))
        return tuple([data[member] if member >= 0 else self._names[id] for member in members])

    def _read(self, id: int, members: list[int]) -> dict[int, bytes]:
        """The bytes of `members`, which are in rising order, by their numbers."""
        spans: list[list[int]] = []
        parts = []  # per member: number of its span, and where in it
        for member in members:
            start = int(self._offset[member])
            end = start + int(self._size[member])
            if not spans or start - spans[-1][1] > _NEAR:
                spans.append([start, end])
            spans[-1][1] = end
            parts.append((len(spans) - 1, start - spans[-1][0], end - spans[-1][0]))
        shard = bisect_right(self._starts, id) - 1
        path = self._shards[shard]
        pieces = _read_url(path, spans) if is_url(path) else _read_local(path, spans, self._stamps[shard])
        return {member: pieces[span][start:end] for member, (span, start, end) in zip(members, parts, strict=True)}

    def _where(self, id: int) -> str:
        return f"{self._shards[bisect_right(self._starts, id) - 1]}: {self._names[id]}"

    def fingerprint(self) -> str:
        """Changes with the shards and with `keys`.

        Of the shards it contains the paths, and name, size and time of each file in them.
        """
        return f"TarDataset {fingerprint(self._shards, self._digests, self._keys)}"

    def __repr__(self) -> str:
        return f"TarDataset({len(self)} samples in {len(self._shards)} shards, first {self._shards[0]!r})"


def _checked(keys: Any) -> tuple[str, ...]:
    if (
        isinstance(keys, str)
        or not isinstance(keys, Collection)
        or not len(keys)
        or not all(isinstance(key, str) for key in keys)
    ):
        raise InputError(f'keys={keys!r}: give a tuple of extensions, such as ("jpg", "cls"), or None for all')
    return tuple(keys)


def _expand(shard: str | os.PathLike[str]) -> list[str | os.PathLike[str]]:
    """The names that `{000..146}` in a path stand for, as in a shell."""
    if not isinstance(shard, str) or not _RANGE.search(shard):
        return [shard]
    texts = _RANGE.split(shard)  # text, first, last, text, first, last, text
    ranges = []
    for first, last in zip(texts[1::3], texts[2::3], strict=True):
        if int(last) < int(first):
            raise InputError(f"{shard!r}: {{{first}..{last}}} has no number in it, give the smaller one first")
        ranges.append([f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)])
    return [
        "".join(text + number for text, number in zip(texts[::3], [*numbers, ""], strict=True))
        for numbers in product(*ranges)
    ]


def _read_local(path: str, spans: list[list[int]], stamp: str) -> list[bytes]:
    fd = os.open(path, os.O_RDONLY | OPEN)
    try:
        if stamp_of_status(os.fstat(fd)) != stamp:
            raise OSError(f"{path!r} was changed after its index was read: make a new TarDataset")
        return [_read_at(fd, start, end - start) for start, end in spans]
    finally:
        os.close(fd)


def _read_at(fd: int, offset: int, size: int) -> bytes:
    """`size` bytes at `offset`, in as many reads as the kernel makes of it."""
    os.lseek(fd, offset, os.SEEK_SET)
    data = os.read(fd, size)
    while len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            raise OSError(f"the shard ends {size - len(data)} bytes before the end of the sample")
        data += more
    return data


def _read_url(url: str, spans: list[list[int]]) -> list[bytes]:
    filesystem, path = open_url(url)
    pieces = [bytes(filesystem.cat_file(path, start=start, end=end)) if start < end else b"" for start, end in spans]
    for piece, (start, end) in zip(pieces, spans, strict=True):
        if len(piece) != end - start:
            raise OSError(f"{len(piece)} bytes came for the {end - start} at byte {start}: the file has been changed")
    return pieces
