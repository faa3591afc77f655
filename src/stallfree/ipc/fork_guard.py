"""Fork guard: keeps forked children from using their parent's connections and objects."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from stallfree.platform import at_fork


class HasDescriptor(Protocol):
    """An object with a descriptor, such as a socket. Once closed, `fileno` returns -1 or raises `OSError`."""

    def fileno(self) -> int: ...


_kept: weakref.WeakSet[HasDescriptor] = weakref.WeakSet()


def keep_from_children(*owners: HasDescriptor) -> None:
    """Replace these descriptors by /dev/null in children forked from now on.

    An inherited copy of a connection would hide the end of this process from the other end; a copy of a lock would hold
    the lock. The copy is not closed, because inherited objects would later close another file with the same number.
    """
    for owner in owners:
        _kept.add(owner)


def _replace() -> None:
    if not _kept:
        return
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for owner in list(_kept):
        try:
            fd = owner.fileno()
        except OSError:
            continue
        if fd >= 0:
            os.dup2(null, fd, inheritable=False)
    os.close(null)
    _kept.clear()


at_fork(after_in_child=_replace)


class Owner:
    """The process that created an object."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process; False in a forked child."""
        return self.pid == os.getpid()


def finalize(owned: object, function: Callable[..., Any], *arguments: Any) -> weakref.finalize[..., Any]:
    """Like `weakref.finalize`, for this process only: `function` is not called in a forked child."""
    return weakref.finalize(owned, _call, Owner(), function, *arguments)


def _call(owner: Owner, function: Callable[..., Any], *arguments: Any) -> None:
    if owner.is_here:
        function(*arguments)
