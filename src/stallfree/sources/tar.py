"""WebDataset's tar shards as a source whose samples are read in any order.

A shard of WebDataset (https://github.com/webdataset/webdataset, README, "The WebDataset Format") is a plain tar. Files
that share their name up to the first dot of its last part are one sample, and follow each other; what follows that dot
is the extension, lower case. Where the files are is read once from the headers, by `tarfile`, and kept.
"""

import contextlib
import io
import json
import os
import re
import secrets
import tarfile
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from stallfree.errors import InputError, StallfreeWarning, tar_samples, tar_unreadable
from stallfree.ipc.folders import is_path
from stallfree.pipeline.compose import Array, Compose, flatten
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.raising import short_traceback
from stallfree.sources.mapped import BaseSource, require_samples
from stallfree.sources.paths import PathList, canonical, is_url, open_url, read_exactly, stamp_of

_KEY = "__key__"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")
_VERSION = 2
_NEAR = 64 << 10
"""Bytes between two files of a sample up to which both are read at once."""
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

    @short_traceback
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
        names = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
        self._shards = [name for shard in names for name in _expand(canonical(shard))]
        if not self._shards:
            raise InputError("TarDataset was given no shards: give at least one path of a tar file")
        texts = isinstance(keys, Collection) and not isinstance(keys, str) and all(isinstance(key, str) for key in keys)
        if keys is not None and not (texts and keys):
            raise InputError(f'keys={keys!r}: give a tuple of extensions, such as ("jpg", "cls"), or None for all')
        self._keys = None if keys is None else tuple(keys)
        cache = os.environ.get("XDG_CACHE_HOME", "")
        users = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
        folder = users / "stallfree" / "tar" if index is None else Path(index).absolute()
        with ThreadPoolExecutor(min(_THREADS, len(self._shards))) as pool:
            indexes = list(pool.map(partial(_index_of, folder=folder), self._shards))
        self._stamps, self._digests, keys_of, extensions, rows = zip(*indexes, strict=True)
        self._starts = np.cumsum([0, *map(len, keys_of)]).tolist()
        self._names = PathList(key for keys_in in keys_of for key in keys_in)
        require_samples(len(self), f"TarDataset({self._shards[0]!r}, ...)", "Give shards that hold samples.")
        self._extensions = sorted(set[str]().union(*extensions))
        numbers = [np.searchsorted(self._extensions, np.array(own, str)) for own in extensions]
        ours = [number[part[:, 1]] for number, part in zip(numbers, rows, strict=True)]
        self._extension = np.concatenate(ours, dtype=np.int32)
        samples = np.concatenate([part[:, 0] + start for part, start in zip(rows, self._starts, strict=False)])
        self._first = np.searchsorted(samples, np.arange(len(self) + 1))
        self._offset, self._size = np.concatenate([part[:, 2:].T for part in rows], axis=1)
        self._wanted = None if self._keys is None else self._choose(self._keys)
        self.pipeline = Compose(flatten(transform))

    def _choose(self, keys: tuple[str, ...]) -> Array:
        """Return for each sample the numbers of the files that `keys` stand for; -1 for its name."""
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
                extensions = ", ".join(self._extensions[self._extension[member]] for member in self._members(id)[:8])
                raise tar_samples(
                    f"{len(lacking)} of {len(self)} samples have no file {key!r}; the first is {self._where(id)}, "
                    f"which has {extensions}: leave it out of keys, or name a replacement, such as 'jpg;png'"
                )
        return wanted

    def __len__(self) -> int:
        return len(self._names)

    def _members(self, id: int) -> range:
        return range(int(self._first[id]), int(self._first[id + 1]))

    def _record(self, id: int) -> Any:
        if self._wanted is None:
            data = self._read(id, list(self._members(id)))
            return {_KEY: self._names[id]} | {self._extensions[self._extension[at]]: part for at, part in data.items()}
        members = self._wanted[id].tolist()
        data = self._read(id, sorted({member for member in members if member >= 0}))
        return tuple([data[member] if member >= 0 else self._names[id] for member in members])

    def _read(self, id: int, members: list[int]) -> dict[int, bytes]:
        """Return the bytes of `members`, which are in rising order, by their numbers."""
        starts, sizes = self._offset[members].tolist(), self._size[members].tolist()
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        shard = bisect_right(self._starts, id) - 1
        path, stamp = self._shards[shard], self._stamps[shard]
        read = partial(_read_url, path) if is_url(path) else partial(_read_local, path, stamp)
        if members and ends[-1] - starts[0] - sum(sizes) <= _NEAR:
            [data] = read([(starts[0], ends[-1])])
            pieces = [data[start - starts[0] : end - starts[0]] for start, end in zip(starts, ends, strict=True)]
        else:
            pieces = read(list(zip(starts, ends, strict=True)))
        return dict(zip(members, pieces, strict=True))

    def _where(self, id: int) -> str:
        return f"{self._shards[bisect_right(self._starts, id) - 1]}: {self._names[id]}"

    def fingerprint(self) -> str:
        """Changes with the shards and with `keys`.

        Of the shards it contains the paths, and name, size and time of each file in them.
        """
        return f"TarDataset {fingerprint(type(self), self._shards, self._digests, self._keys)}"

    def __repr__(self) -> str:
        return f"TarDataset({len(self)} samples in {len(self._shards)} shards, first {self._shards[0]!r})"


def _expand(shard: str) -> list[str]:
    """Return the names that `{000..146}` in a path stands for, as in a shell."""
    braces = _RANGE.search(shard)
    if braces is None:
        return [shard]
    first, last = braces.groups()
    numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [name for number in numbers for name in _expand(shard[: braces.start()] + number + shard[braces.end() :])]


def _read_local(path: str, stamp: str, spans: list[tuple[int, int]]) -> list[bytes]:
    with io.FileIO(path) as file:
        if stamp_of(os.fstat(file.fileno())) != stamp:
            raise OSError(f"{path!r} was changed after its index was read: make a new TarDataset")
        return [read_exactly(file, end - start, start) for start, end in spans]


def _read_url(url: str, spans: list[tuple[int, int]]) -> list[bytes]:
    filesystem, path = open_url(url)
    pieces = [bytes(filesystem.cat_file(path, start=start, end=end)) if start < end else b"" for start, end in spans]
    for piece, (start, end) in zip(pieces, spans, strict=True):
        if len(piece) != end - start:
            raise OSError(f"{len(piece)} bytes came for the {end - start} at byte {start}: the file has been changed")
    return pieces


# --- the index of a shard -------------------------------------------------------------------------------------------


class _Index(NamedTuple):
    """The samples of one shard, in the order of the file.

    Attributes:
        stamp: size and time of modification of the file (of a URL: its size and what its file system says of it).
        digest: of the names, sizes and times of the files in it. The same wherever the shard is.
        keys: of the samples.
        extensions: all that occur, each once.
        rows: int64, per file: number of the sample, index in `extensions`, offset and size of the data.
    """

    stamp: str
    digest: str
    keys: list[str]
    extensions: list[str]
    rows: Array


def _index_of(shard: str, folder: Path) -> _Index:
    """Return the index of `shard`, a local path or an fsspec URL, from `folder` if it is there and fits, else new.

    Any number of processes may do this at once: a file appears whole. One that is damaged, of another shard, or older
    than the shard is replaced. If that is not possible, there is a `StallfreeWarning`.

    Raises `InputError` for a shard that is missing, compressed, damaged or cut off, and for names that occur twice.
    """
    file = folder / f"{os.path.basename(shard)[:100]}-{xxhash.xxh3_64_hexdigest(os.fsencode(shard))}.index"
    try:
        if is_url(shard):
            filesystem, path = open_url(shard)
            stamp = f"{filesystem.info(path)['size']} {filesystem.ukey(path)}"
        else:
            filesystem, path, stamp = io, shard, stamp_of(os.stat(shard))
        with contextlib.suppress(Exception):  # there is none, or it is damaged
            checksum, (head, rows) = file.read_bytes()[:16], file.read_bytes()[16:].split(b"\n", 1)
            *what, digest, keys, extensions = json.loads(head)
            if checksum == xxhash.xxh3_128_digest(head + b"\n" + rows) and what == [_VERSION, shard, stamp]:
                return _Index(stamp, digest, keys, extensions, np.frombuffer(rows, np.int64).reshape(-1, 4))
        with filesystem.open(path, "rb") as opened:
            index = _read_headers(shard, stamp, opened)
    except InputError:
        raise
    except Exception as error:
        raise tar_unreadable(
            f"the shard {shard!r} is missing, compressed, damaged, cut off or no tar file ({error}): give the path or "
            "URL of a plain tar"
        ) from error
    head = json.dumps([_VERSION, shard, *index[:-1]]).encode()
    data = head + b"\n" + index.rows.tobytes()
    new = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new.write_bytes(xxhash.xxh3_128_digest(data) + data)
        os.replace(new, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        warnings.warn(
            f"the indexes of tar shards cannot be kept in {str(folder)!r} ({error.strerror or error}), so all headers "
            "are read again in each process: give another folder with index=",
            StallfreeWarning,
            stacklevel=2,
        )
    return index


def _read_headers(shard: str, stamp: str, file: Any) -> _Index:
    """Return the index from all headers, without hidden files, names without extension, and `__...__`."""
    digest, keys, extensions = xxhash.xxh3_128(), dict[str, int](), dict[str, int]()
    rows, inside, key = list[tuple[int, int, int, int]](), set[str](), None
    tar: Any
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # or a million of them would stay in memory
            parts = _NAME.fullmatch(member.name)
            if not member.isreg() or _META.match(member.name) or parts is None:
                continue
            if member.issparse():
                raise ValueError(f"{member.name!r} is stored sparse")
            if parts[1] != key:
                key, inside = parts[1], set()
                if key in keys:
                    raise tar_samples(
                        f"the sample {key!r} occurs twice in {shard!r}, with others between: write the files "
                        "of a sample one after the other, and give each sample a name of its own"
                    )
                keys[key] = len(keys)
            extension = parts[2].lower()
            if extension in inside:
                raise tar_samples(f"{key!r} in {shard!r} has two files {extension!r}: give each its own name")
            inside.add(extension)
            digest.update(f"{member.size} {member.mtime} ".encode() + os.fsencode(member.name) + b"\0")
            number = extensions.setdefault(extension, len(extensions))
            rows.append((len(keys) - 1, number, member.offset_data, member.size))
    file.seek(tar.offset)  # a tar ends with zeros; `tarfile` also ends where a file is cut off, or garbage begins
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise ValueError(f"neither a file nor the end of the archive at byte {tar.offset}")
    return _Index(stamp, digest.hexdigest(), list(keys), list(extensions), np.array(rows, np.int64).reshape(-1, 4))
