"""Names of caches that no other job finds: those of data sets without a fingerprint."""

from __future__ import annotations

import os
import secrets
import warnings
from typing import Any

from stallfree.cache.store import is_tier
from stallfree.datasets.ranks import find_ranks
from stallfree.errors import StallfreeWarning, no_fingerprint
from stallfree.frames import users_level

_CURE = (
    "give name=, the same only for the same data, or give the object or the data set a method fingerprint() that "
    "returns a text which changes when the data change"
)


def private_name(store: Any, unknown: str, *, persist: bool) -> str:
    """A name that no other process gives, with a warning that says why: `unknown` has no fingerprint.

    Raises `InputError` where a cache that others do not find is of no use.
    """
    if persist or (is_tier(store) and getattr(store, "persist", True)):
        raise no_fingerprint(
            f"store={store!r:.80}, persist={persist}: no other job or node would find these samples, as {unknown} has "
            f"no fingerprint: {_CURE}"
        )
    warnings.warn(
        f"{unknown} has no fingerprint, so this cache is private: used by this process and its workers, and removed "
        f"with them. To share it with other jobs and ranks, {_CURE}",
        StallfreeWarning,
        stacklevel=users_level(),
    )
    return token()


def token() -> str:
    """The name of a private cache."""
    return f"private-{os.getpid()}-{secrets.token_hex(8)}"


def window_name(unknown: list[str], name: str) -> str:
    """`name`, or for a window over data with `unknown` objects one that no other process gives.

    Raises `InputError` if the job has several ranks here, which share one window and find it by its name.
    """
    if not unknown:
        return name
    if find_ranks().here > 1:
        raise no_fingerprint(
            f"the ranks of this job share one window, and {unknown[0]} has no fingerprint to find it by: {_CURE}"
        )
    return token()
