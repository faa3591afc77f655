"""Where the members of a tar file lie: read once from its headers, and kept in a file.

A shard of WebDataset (https://github.com/webdataset/webdataset, README, "The WebDataset Format") is a plain tar. Files
that share their name up to the first dot of its last part are one sample, and follow each other; what follows that dot
is the extension, lower case.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
import tarfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from stallfree.errors import InputError, StallfreeWarning, tar_samples, tar_unreadable
from stallfree.sources.paths import is_url, open_url

_VERSION = 1
_BLOCK = 512
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True)
class ShardIndex:
    """The samples of one shard, in the order of the file.

    Attributes:
        stamp: size and time of modification of the file (of a URL: its size and what its file system says of it).
        digest: of what the headers say of the members: names, sizes and times. The same wherever the file lies.
        keys: of the samples.
        extensions: all that occur, each once.
        first: int64, per sample the number of its first member, and at the end the number of all members.
        extension: int32, per member its place in `extensions`.
        offset: int64, per member where its data begin in the file.
        size: int64, per member the bytes of its data.
    """

    stamp: str
    digest: str
    keys: list[str]
    extensions: list[str]
    first: npt.NDArray[np.int64]
    extension: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]


def index_of(shard: str, folder: Path) -> ShardIndex:
    """The index of `shard`, a local path or an fsspec URL, out of `folder` if it is there and fits, else made and kept.

    Any number of processes may do this at once: a file appears whole. One that is damaged, of another shard, or older
    than the shard is rebuilt. If none can be written, that is a `StallfreeWarning`.

    Raises `InputError` for a shard that is missing, compressed, damaged or cut off, and for names that occur twice.
    """
    try:
        stamp = stamp_of(shard)
    except Exception as error:
        raise _unreadable(shard, error) from error
    place = folder / f"{os.path.basename(shard)[:100]}-{hashlib.sha256(os.fsencode(shard)).hexdigest()[:16]}.index.npz"
    kept = _load(place, shard, stamp)
    if kept is not None:
        return kept
    try:
        index = _read(shard, stamp)
    except OSError as error:
        raise _unreadable(shard, error) from error
    try:
        _save(place, shard, index)
    except OSError as error:
        warnings.warn(
            f"the indexes of tar shards cannot be kept in {str(folder)!r} ({error.strerror or error}), so all headers "
            "are read again in each process: give another folder with index=",
            StallfreeWarning,
            stacklevel=2,
        )
    return index


def stamp_of(shard: str) -> str:
    """A text that changes when the file changes. Raises what the file system raises."""
    if is_url(shard):
        filesystem, path = open_url(shard)
        return f"{filesystem.info(path)['size']} {filesystem.ukey(path)}"
    return stamp_of_status(os.stat(shard))


def stamp_of_status(status: os.stat_result) -> str:
    """The stamp of a local file."""
    return f"{status.st_size} {status.st_mtime_ns}"


def user_folder() -> Path:
    """Where indexes are kept if the user names no folder: `$XDG_CACHE_HOME/stallfree/tar`, else in `~/.cache`."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return base / "stallfree" / "tar"


# --- reading headers ------------------------------------------------------------------------------------------------


class _Members:
    """Members of a shard, put together to samples as they come."""

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._digest = xxhash.xxh3_128()
        self._places: dict[str, int] = {}  # of extensions
        self._known: set[str] = set()  # keys
        self._here: set[str] = set()  # extensions of the sample under way
        self.keys: list[str] = []
        self.first: list[int] = []
        self.rows: list[tuple[int, int, int]] = []

    def add(self, member: tarfile.TarInfo) -> None:
        """Take the next member. What is no file, or has no extension, or is about the shard itself is left out."""
        found = _NAME.fullmatch(member.name)
        if not member.isreg() or _META.match(member.name) or found is None:
            return
        if member.issparse():
            raise tar_samples(f"{member.name!r} in {self._shard!r} is stored sparse: write the tar without --sparse")
        key, extension = found.group(1), found.group(2).lower()
        if not self.keys or key != self.keys[-1]:
            if key in self._known:
                raise tar_samples(
                    f"the sample {key!r} occurs twice in {self._shard!r}, with others between: write the files of a "
                    "sample one after the other, and give each sample a name of its own"
                )
            self._known.add(key)
            self._here = set()
            self.keys.append(key)
            self.first.append(len(self.rows))
        if extension in self._here:
            raise tar_samples(f"{key!r} in {self._shard!r} has two files {extension!r}: give each a name of its own")
        self._here.add(extension)
        self._digest.update(f"{member.size} {member.mtime} ".encode() + os.fsencode(member.name) + b"\0")
        place = self._places.setdefault(extension, len(self._places))
        self.rows.append((place, member.offset_data, member.size))

    def index(self, stamp: str) -> ShardIndex:
        rows = np.array(self.rows, np.int64).reshape(-1, 3)
        return ShardIndex(
            stamp,
            self._digest.hexdigest(),
            self.keys,
            list(self._places),
            np.array([*self.first, len(rows)], np.int64),
            rows[:, 0].astype(np.int32),
            rows[:, 1].copy(),
            rows[:, 2].copy(),
        )


def _read(shard: str, stamp: str) -> ShardIndex:
    """The index out of the headers of all members."""
    members = _Members(shard)
    with _opened(shard) as file:
        start = file.read(_BLOCK)
        for magic, name in _COMPRESSED.items():
            if start.startswith(magic):
                raise tar_unreadable(
                    f"the shard {shard!r} is compressed with {name}, so no sample can be read from the midst of it: "
                    "decompress it (pictures in it are compressed anyhow)"
                )
        file.seek(0)
        try:
            tar: Any
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    members.add(member)
                    tar.members.clear()  # or a million of them would stay in memory
                end = tar.offset
        except (tarfile.TarError, EOFError, ValueError, OSError) as error:
            if isinstance(error, InputError):
                raise
            raise _damaged(shard, str(error)) from error
        _check_end(shard, file, end)
    return members.index(stamp)


def _opened(shard: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if is_url(shard):
        filesystem, path = open_url(shard)
        file: Any = filesystem.open(path, "rb")
        return contextlib.closing(file)
    return open(shard, "rb")


def _check_end(shard: str, file: BinaryIO, end: int) -> None:
    """A tar ends with blocks of zeros. `tarfile` ends as quietly where a file is cut off, or where garbage begins."""
    file.seek(end)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise _damaged(shard, f"neither a member nor the end of the archive at byte {end}")


def _unreadable(shard: str, error: Exception) -> InputError:
    return tar_unreadable(f"the shard {shard!r} cannot be read ({error}): give the path or URL of a tar file")


def _damaged(shard: str, why: str) -> InputError:
    return tar_unreadable(f"the shard {shard!r} is damaged, cut off or no tar file ({why}): write or download it again")


# --- keeping it -----------------------------------------------------------------------------------------------------


def _save(place: Path, shard: str, index: ShardIndex) -> None:
    """Write the index to `place`, at once or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(
        buffer,
        header=_texts([str(_VERSION), shard, index.stamp, index.digest]),
        keys=_texts(index.keys),
        extensions=_texts(index.extensions),
        first=index.first,
        extension=index.extension,
        offset=index.offset,
        size=index.size,
    )
    new = place.with_name(f".{place.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        new.write_bytes(buffer.getbuffer())
        os.replace(new, place)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _load(place: Path, shard: str, stamp: str) -> ShardIndex | None:
    """The index at `place` if it is whole, and that of `shard` as it is now."""
    try:
        with np.load(place, allow_pickle=False) as kept:
            *what, digest = _lines(kept["header"])
            if what != [str(_VERSION), shard, stamp]:
                return None
            arrays = [kept[name] for name in ("first", "extension", "offset", "size")]
            index = ShardIndex(stamp, digest, _lines(kept["keys"]), _lines(kept["extensions"]), *arrays)
        return index if _whole(index) else None
    except Exception:  # there is none, or what lies there is none: whatever a damaged file makes of its reader
        return None


def _whole(index: ShardIndex) -> bool:
    """Whether the arrays of an index fit together, and into a file of that size."""
    samples, members, length = len(index.keys), len(index.offset), int(index.stamp.partition(" ")[0])
    arrays = (index.first, index.extension, index.offset, index.size)
    return bool(
        [array.dtype.name for array in arrays] == ["int64", "int32", "int64", "int64"]
        and index.first.shape == (samples + 1,)
        and index.extension.shape == index.offset.shape == index.size.shape == (members,)
        and index.first[0] == 0
        and index.first[-1] == members
        and (np.diff(index.first) > 0).all()
        and (index.extension >= 0).all()
        and (index.extension < len(index.extensions)).all()
        and (index.offset >= 0).all()
        and (index.size >= 0).all()
        and (index.offset + index.size <= length).all()
    )


def _texts(texts: list[str]) -> npt.NDArray[np.uint8]:
    """Texts in one array, with a zero byte behind each: names in a tar have none."""
    return np.frombuffer(b"".join([os.fsencode(text) + b"\0" for text in texts]), np.uint8)


def _lines(texts: npt.NDArray[np.uint8]) -> list[str]:
    return [os.fsdecode(text) for text in texts.tobytes().split(b"\0")[:-1]]
