"""Descriptors that forked children must not keep open: the other end would not hear that this process is gone."""

from __future__ import annotations

import os

from stallfree.platform import at_fork

_guarded: set[int] = set()


def keep_from_children(fd: int) -> None:
    """A child that is forked from now on has /dev/null in the place of `fd`."""
    _guarded.add(fd)


def forget(fd: int) -> None:
    """To be called before `fd` is closed."""
    _guarded.discard(fd)


def _replace() -> None:
    # Not closed: objects of the parent that the child throws away would close whatever has that number by then.
    if not _guarded:
        return
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in _guarded:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _guarded.clear()


at_fork(after_in_child=_replace)
