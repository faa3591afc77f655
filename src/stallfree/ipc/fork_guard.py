"""Fork guard: keeps forked children from using their parent's connections and objects, and their batches unchanged."""

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


class Lender(Protocol):
    """An object that has lent memory which it fills again later, such as a ring of slots."""

    def before_fork(self) -> None:
        """Keep the lent memory unchanged for the child of a fork that follows. Called in the forking thread."""


_lenders: weakref.WeakSet[Lender] = weakref.WeakSet()


def prepare_for_forks(lender: Lender) -> None:
    """Call `lender.before_fork()` before each fork of this process, as long as the lender is alive."""
    _lenders.add(lender)


def _prepare() -> None:
    for lender in list(_lenders):
        lender.before_fork()


at_fork(before=_prepare)


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
