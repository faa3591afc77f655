"""The names by which user code refers to randomness."""

from __future__ import annotations

from typing import Any

from stallfree.pipeline.classify.scan import scan


def random_name(thing: Any) -> str | None:
    """Return where the user's code that a call of `thing` runs names a source of randomness.

    Such as "default_rng in Flip.__call__"; None if it names none.
    """
    finding = scan(thing).finding
    return finding.what if finding is not None and finding.certain else None
