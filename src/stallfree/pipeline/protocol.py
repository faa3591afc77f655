"""What a source of samples looks like to the cache and the loader.

A sample is `random_part(deterministic_part(fetch(id)))`. A *source* keeps the two apart: `fetch` does the I/O and
nothing else, `pipeline` does the rest. Any other map-style data set works too; there `fetch` is its `__getitem__`.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol, runtime_checkable

from stallfree.error_types import also_of_type
from stallfree.errors import SampleError, text_of
from stallfree.pipeline.compose import Compose


@runtime_checkable
class Source(Protocol):
    """A map-style data set that separates fetch from prep.

    `fetch` must be safe to call from several threads. `source[id]` equals `source.pipeline(source.fetch(id))`.
    """

    pipeline: Compose
    """Turns what `fetch` returned into the sample, one step after the other."""

    def __len__(self) -> int: ...

    def __getitem__(self, id: int) -> Any: ...

    def fetch(self, id: int) -> Any:
        """The record of sample `id` as storage holds it, for instance `(encoded bytes, label)`. I/O only."""

    def where(self, id: int) -> str:
        """Where the record lies (a path or URL), for error messages."""

    def fingerprint(self) -> str:
        """A text that changes when the records change. Need not cover `pipeline`."""


def sample_error(error: BaseException, source: object, id: int, doing: str) -> SampleError:
    """The error to raise from `error`, which happened while `doing` (fetching, preparing) sample `id` of `source`.

    It is of the type of `error` too. A `SampleError` is returned as it is: it names the sample already.
    """
    if isinstance(error, SampleError):
        return error
    where = ""
    if isinstance(source, Source):
        # The place only helps to find the sample; failing to tell it must not hide what went wrong.
        with contextlib.suppress(Exception):
            where = source.where(id)
    place = f" ({where})" if where else ""
    problem = SampleError(
        f"{doing} sample {id}{place} failed: {type(error).__name__}: {text_of(error)}", id=id, where=where
    )
    return also_of_type(problem, error)
