"""What a data set reads when it is indexed, found out on one of the first samples: for `form="reads"`."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from stallfree.batches.recorded_reads import record_sample
from stallfree.datasets.dataset_probe import LOOKS, FirstLook, Sample
from stallfree.errors import InputError, StallfreeWarning, reads_nothing
from stallfree.frames import users_level
from stallfree.ipc.forked import call_in_child
from stallfree.notes import note_sample
from stallfree.pipeline.classify import Split, spread
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.protocol import Source
from stallfree.sources.mapped import MapSource, as_source
from stallfree.sources.reads.open_calls import install
from stallfree.sources.reads.recorded import Record, files_of
from stallfree.sources.reads.unseen import MAPPING, bytes_read, mapped_files, native_library

_UNSEEN_BYTES, _UNSEEN_SHARE = 4096, 0.02
"""From how many bytes that do not pass `open` on they are reported, and from what share of all."""


def reads_source(dataset: Any) -> MapSource:
    """`dataset` as a source that is indexed. Raises `InputError` for one whose records can be cached as such."""
    install()  # now, as fingerprints of modules that hold `open` change with it
    source = as_source(dataset, divide=False)
    if isinstance(source, MapSource):
        return source
    raise reads_nothing(
        f"form='reads' is for plain data sets that read and augment in __getitem__, and {type(source).__name__} keeps "
        "the two separate: use form='fetched', which caches the same bytes"
    )


def look_at_reads(source: Source, steps: Compose) -> FirstLook:
    """Index the first sample that can be had, in a child process; what it reads is the record.

    It is indexed once more if it seems to read past `open`, which is then reported. Raises the error of the first
    of these samples when none can be had, `InputError` when nothing was read that can be cached.
    """
    assert isinstance(source, MapSource)
    id, record, report = call_in_child(partial(_look, source), f"the first look at {type(source.dataset).__name__}")
    if report:
        warnings.warn(report, StallfreeWarning, stacklevel=users_level())
    return FirstLook([Sample(id, record, record)], Split(Compose([]), steps, ()))


def _look(source: MapSource) -> tuple[int, Record, str]:
    """Return a sample's id, its record, and a warning or "", in a child process."""
    problem: Exception | None = None
    for id in spread(len(source), LOOKS):
        try:
            record, unseen = _record(source.dataset, id)
            if unseen is not None and files_of(record):
                _, unseen = _record(source.dataset, id)  # without the imports of the first time
        except Exception as error:
            if problem is None:
                problem = error
                note_sample(error, source, id, "fetching")
            continue
        if not files_of(record):
            raise _nothing(source.dataset, id)
        return id, record, _report(source.dataset, id, record, unseen)
    assert problem is not None
    raise problem


def _record(dataset: Any, id: int) -> tuple[Record, float | None]:
    """The record of what `dataset[id]` reads, and the share of bytes that did not pass `open`, unless it is small."""
    before = bytes_read()
    record, seen = record_sample(dataset, id)
    after = bytes_read()
    unseen = 0 if before is None or after is None else after - before - seen
    share = unseen / max(1, unseen + seen)
    return record, share if unseen >= _UNSEEN_BYTES and share >= _UNSEEN_SHARE else None


def _report(dataset: Any, id: int, record: Record, unseen: float | None) -> str:
    """Return a warning of bytes that a sample reads past `open`; "" if there are none."""
    mapped = [path for path in mapped_files() if path not in files_of(record)]
    if unseen is None and not mapped:
        return ""
    library, cure = native_library(dataset)
    if unseen is None and not MAPPING & set(library.split(" or ")):
        return ""
    what = f"{mapped[0]}, which is mapped into memory," if unseen is None else f"{unseen:.0%} of the bytes"
    return (
        f"form='reads' caches what passes Python's open(), and {what} of {type(dataset).__name__}[{id}] "
        f"{'does' if unseen is None else 'do'} not: {library} opens files itself. In its place use {cure}"
    )


def _nothing(dataset: Any, id: int) -> InputError:
    name, (library, cure) = type(dataset).__name__, native_library(dataset)
    return reads_nothing(
        f"form='reads' caches what a data set reads through Python's open(), and {name}[{id}] read no regular file of "
        f"up to 64 MiB with it: use {cure}, if {library} opens its files. If its samples do not come from files, it "
        "gains nothing from a cache"
    )
