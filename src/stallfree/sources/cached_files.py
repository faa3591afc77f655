"""Cached files: `dataset[id]` runs each time, and the files that it opens come from a cache.

A record is one whole regular file, shared by all samples that open it. Its key is the path (or URL), and it holds size
and modification time. The first time a loader opens a file, both are compared with storage; then the record is trusted.
file_opens.py says which calls are served.
"""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import xxhash

from stallfree.errors import no_files
from stallfree.ipc.process import call_in_child
from stallfree.ipc.shared_array import SharedCounts
from stallfree.pipeline.classify import spread
from stallfree.pipeline.compose import Compose
from stallfree.sources import file_opens
from stallfree.sources.mapped import BaseSource, MapSource, as_source, samples_of


def ids_of_cache(samples: int) -> int:
    """Return the number of ids of a cache for the files of so many samples, each of which may have three of its own."""
    return 4 * samples + 64


class FileTable:
    """The files in a cache, by key.

    Args:
        cache: a `SampleCache` of `(head, content)`; the head is size, time, id and key. Ids are places of a hash table.

    Attributes:
        verified: by id, the hash of the head that was compared with storage since `forget`. All processes share it.
    """

    def __init__(self, cache: Any) -> None:
        self.cache, self.verified = cache, SharedCounts(cache.num_ids)

    def forget(self) -> None:
        """Compare each file with storage again when it is opened next."""
        self.verified.array[:] = 0

    def get(self, key: bytes, stamp: Callable[[], str]) -> bytes | None:
        """Return the content of a file; None if it is not cached, or has changed."""
        record = self.cache.find(self.cache.ids_of_key(key), partial(_is_of, key))
        if not isinstance(record, tuple):
            return None
        head, data = record
        id, mark = _id_in(head), _mark(head)
        if self.verified.array[id] != mark:
            current = b""
            with contextlib.suppress(Exception):  # it is not there any more
                current = _head(stamp(), id, key)
            if current != head:
                self.cache.count_changed(1)
                self._drop(id)
                return None
            self.verified.array[id] = mark
        return data  # type: ignore[no-any-return]

    def put(self, key: bytes, stamp: str, data: bytes) -> None:
        """Store the content of a file as it was read, if there is room."""
        self.cache.count_fetch(1, len(data))
        for id in self.cache.free_one(self.cache.ids_of_key(key), partial(_is_of, key)).tolist():
            head = _head(stamp, id, key)
            self.cache.put_many([id], [(head, data)])
            self.verified.array[id] = _mark(head)

    def drop(self, key: bytes) -> None:
        """Drop the content of a file. This counts neither as a hit nor as a miss."""
        record = self.cache.find(self.cache.ids_of_key(key), partial(_is_of, key), count=False)
        if isinstance(record, tuple):
            self._drop(_id_in(record[0]))

    def _drop(self, id: int) -> None:
        self.verified.array[id] = 0
        with contextlib.suppress(TimeoutError):  # another process writes: it is compared again at the next open
            self.cache.drop([id])


def _head(stamp: str, id: int, key: bytes) -> bytes:
    return f"{stamp} {id}\0".encode() + key


def _is_of(key: bytes, record: tuple[bytes, bytes]) -> bool:
    return record[0].partition(b"\0")[2] == key


def _id_in(head: bytes) -> int:
    return int(head.partition(b"\0")[0].rpartition(b" ")[2])


def _mark(head: bytes) -> int:
    """Return a hash that fits into `SharedCounts`, and is not 0."""
    return xxhash.xxh3_64_intdigest(head) >> 33 | 1


class CachedFiles(BaseSource):
    """A plain data set whose files come from a cache while it is indexed.

    Args:
        dataset: a data set that reads, decodes and augments in `__getitem__`.
        cache: for the files, with `ids_of_cache(len(dataset))` ids.
        most: bytes of the largest file that is cached.

    Attributes:
        source: the data set as a source.
        table: the files in the cache.
    """

    threads = False
    passes_through = True  # its samples, and so its draws, are those of `source`

    def __init__(self, dataset: Any, cache: Any, most: int) -> None:
        self.source = dataset if isinstance(dataset, MapSource) else MapSource(dataset)
        self.pipeline = Compose([])
        self.table, self._most = FileTable(cache), most

    def __len__(self) -> int:
        return len(self.source)

    def _record(self, id: int) -> Any:
        with file_opens.serving(file_opens.Files(self.table, self._most)):
            return self.source.dataset[id]

    def fingerprint(self) -> str:
        """The fingerprint of the data set object."""
        return f"CachedFiles {self.source.fingerprint()}"


# --- the first look -------------------------------------------------------------------------------------------------

_LOOKS, _LEAST, _SECONDS, _BYTES = 8, 2, 1.0, 64 << 20
"""Samples of the first look; after `_LEAST` it ends when it took so long, or read so much."""

_UNSEEN_BYTES, _UNSEEN_SHARE = 4096, 0.02
"""From how many bytes that do not pass `open` on they are reported, and from what share of all."""

_CURE = "give it an open file, open(path, 'rb'), or the bytes of one, as cv2.imdecode and h5py.File take them"


class FilesLook:
    """What the first look at a data set found; a table of files in memory.

    Attributes:
        files: size and time, and content of the files that its samples opened, by key.
        size: bytes of these.
        most: bytes of the largest file to cache.
        warning: which bytes it reads do not pass `open`; "" if few.
    """

    def __init__(self) -> None:
        self.files: dict[bytes, tuple[str, bytes]] = {}
        self.size, self.most, self.warning = 0, file_opens.SMALL, ""

    def get(self, key: bytes, stamp: Callable[[], str]) -> bytes | None:
        """Return the content of a file; None if it was not opened so far."""
        return self.files[key][1] if key in self.files else None

    def put(self, key: bytes, stamp: str, data: bytes) -> None:
        """Keep the content of a file as it was read."""
        self.files[key] = stamp, data
        self.size += len(data)

    def drop(self, key: bytes) -> None:
        """Drop the content of a file."""
        self.files.pop(key, None)


def look_at_files(dataset: Any) -> tuple[MapSource, FilesLook]:
    """Index some samples in a child process; return the data set, and what was found.

    Raises `InputError` if there are no files that can be cached, and the error of the first sample if all fail.
    """
    source = as_source(dataset, divide=False)
    if not isinstance(source, MapSource):
        raise no_files(
            f"form='files' is for plain data sets that read and augment in __getitem__, and {type(source).__name__} "
            "keeps the two separate: use form='fetched', which caches the same bytes"
        )
    return source, call_in_child(partial(_look, source), f"the first look at {type(source.dataset).__name__}")


def _look(source: MapSource) -> FilesLook:
    look, began = FilesLook(), time.monotonic()
    name = type(source.dataset).__name__

    def make(id: int) -> tuple[int, file_opens.Files]:
        files, before = file_opens.Files(look, look.most), _bytes_read() - look.size
        with file_opens.serving(files):
            source.dataset[id]
        return _bytes_read() - look.size - before, files

    for made, (id, (unseen, files)) in enumerate(samples_of(source, spread(len(source), _LOOKS), make), 1):
        if made == 1:
            with contextlib.suppress(Exception):
                unseen, files = make(id)  # without the imports of the first time
        seen = files.served
        if 0 < files.larger <= 2 * unseen:
            look.most = file_opens.MOST_BYTES
            unseen, seen = unseen - files.larger, seen + files.larger
        part = unseen / max(1, unseen + seen)
        if made == 1 and unseen >= _UNSEEN_BYTES and part >= _UNSEEN_SHARE:
            look.warning = (
                f"form='files' caches what passes Python's open(), and {part:.0%} of the bytes of {name}[{id}] do not: "
                f"a library opens files itself. Instead, {_CURE}"
            )
        if made >= _LEAST and (time.monotonic() - began > _SECONDS or look.size > _BYTES):
            break
    if not look.files:
        raise no_files(
            f"form='files' caches the files that a data set opens by Python's open(), and the samples of {name} opened "
            f"none of up to 64 MiB. If a library opens its files, {_CURE}. If its samples do not come from files, it "
            "gains nothing from a cache"
        )
    return look


def _bytes_read() -> int:
    """Bytes that this thread has read by system calls so far; 0 where that is not known."""
    with contextlib.suppress(OSError, ValueError), open("/proc/thread-self/io", "rb") as file:
        return int(file.readline().split()[1])
    return 0
