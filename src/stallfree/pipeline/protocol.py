"""The interface of a source of samples, as used by the cache and the loader.

A sample is `random_part(deterministic_part(fetch(id)))`. A *source* separates the two stages: `fetch` does only I/O,
`pipeline` does the rest. Any other map-style data set works too; its `__getitem__` then serves as `fetch`.
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

    `fetch` must be thread-safe. `source[id]` equals `source.pipeline(source.fetch(id))`.
    """

    pipeline: Compose
    """Converts the result of `fetch` into the sample, step by step."""

    def __len__(self) -> int: ...

    def __getitem__(self, id: int) -> Any: ...

    def fetch(self, id: int) -> Any:
        """Return the record of sample `id` as stored, for instance `(encoded bytes, label)`. I/O only."""

    def where(self, id: int) -> str:
        """Return the location of the record (a path or URL), for error messages."""

    def fingerprint(self) -> str:
        """Return a text that changes when the records change. It need not cover `pipeline`."""


def sample_error(error: BaseException, source: object, id: int, doing: str) -> SampleError:
    """Return the error to raise from `error`, which occurred while `doing` (fetching, preparing) sample `id` of
    `source`.

    It also has the type of `error`. A `SampleError` is returned unchanged: it names the sample already.
    """
    if isinstance(error, SampleError):
        return error
    where = ""
    if isinstance(source, Source):
        # The location only helps to find the sample; an error of `where` must not hide the original one.
        with contextlib.suppress(Exception):
            where = source.where(id)
    place = f" ({where})" if where else ""
    problem = SampleError(
        f"{doing} sample {id}{place} failed: {type(error).__name__}: {text_of(error)}", id=id, where=where
    )
    return also_of_type(problem, error)
