"""What forked children must leave to their parent: its connections, and its objects."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from stallfree.platform import at_fork


class HasDescriptor(Protocol):
    """A socket, for instance. Closed, it has no descriptor: `fileno` returns -1 or raises `OSError`."""

    def fileno(self) -> int: ...


_kept: weakref.WeakSet[HasDescriptor] = weakref.WeakSet()


def keep_from_children(*owners: HasDescriptor) -> None:
    """Children that are forked from now on have /dev/null in the place of these descriptors.

    An open copy of a connection would hide from its other end that this process has ended, and one of a lock would hold
    it. The copy is not closed: objects that the child inherits would close the file that has the number by then.
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
    """The process that made an object."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a forked child."""
        return self.pid == os.getpid()


def finalize(owned: object, function: Callable[..., Any], *arguments: Any) -> weakref.finalize[..., Any]:
    """`weakref.finalize`, for this process only: in a forked child `function` is not called."""
    return weakref.finalize(owned, _call, Owner(), function, *arguments)


def _call(owner: Owner, function: Callable[..., Any], *arguments: Any) -> None:
    if owner.is_here:
        function(*arguments)
