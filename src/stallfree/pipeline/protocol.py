"""The interface of a source of samples, as used by the cache and the loader.

A sample is `random_part(deterministic_part(fetch(id)))`. A *source* separates the two stages: `fetch` does only I/O,
`pipeline` does the rest. Any other map-style data set works too; its `__getitem__` then serves as `fetch`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

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
