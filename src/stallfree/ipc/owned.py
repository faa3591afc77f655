"""Checks that no other user can replace a folder.

Records of a cache may contain pickles, so its folder must stay the one that was checked. A path is safe if no other
user can rename any part of it: each folder above belongs to this user or to root, and either is not writable by others
or is sticky. The check walks from the root down on open descriptors, so no part can be swapped after its check.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stallfree.errors import folder_owner
from stallfree.platform import user_id

_EVERY_ID = (1 << 32) - 1


@contextmanager
def opened_base(base: Path) -> Iterator[int]:
    """Yield a descriptor of the folder `base`, whose entries no other user can replace. `base` must be a real path.

    Raises `FingerprintError` if another user could replace them, and `OSError` if `base` cannot be opened.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(base.anchor, flags)
    try:
        place = Path(base.anchor)
        _check(place, fd, base)
        for part in base.parts[1:]:
            below = os.open(part, flags, dir_fd=fd)
            os.close(fd)
            fd, place = below, place / part
            _check(place, fd, base)
        yield fd
    finally:
        os.close(fd)


def _check(place: Path, fd: int, base: Path) -> None:
    found = os.fstat(fd)
    within = "" if place == base else f" above {base}"
    if found.st_uid not in _trusted():
        raise folder_owner(
            f"the folder {place}{within} belongs to user {found.st_uid}, who could replace a cache in it with a forged "
            f"one; you are user {user_id()}. Give a folder of your own, in folders of your own or of root"
        )
    if _others_may_write(found, fd) and not found.st_mode & stat.S_ISVTX:
        raise folder_owner(
            f"other users may write to the folder {place}{within} (mode {stat.S_IMODE(found.st_mode):o}, not sticky) "
            f"and could replace a cache in it with a forged one. Give another folder, or `chmod go-w {place}`, or "
            f"`chmod +t {place}` if others need it"
        )


def _others_may_write(found: os.stat_result, fd: int) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not (_is_own_group(found.st_gid) and not _has_acl(fd))


def _is_own_group(group: int) -> bool:
    """Return whether `group` is this user's private group; on many systems new folders are writable by it."""
    import grp
    import pwd

    with contextlib.suppress(KeyError):
        user, known = pwd.getpwuid(user_id()), grp.getgrgid(group)
        return user.pw_gid == group and user.pw_name == known.gr_name and set(known.gr_mem) <= {user.pw_name}
    return False


def _has_acl(fd: int) -> bool:
    """Return whether an ACL gives rights to further users or groups, which the mode does not list."""
    try:
        return "system.posix_acl_access" in os.listxattr(f"/proc/self/fd/{fd}")
    except OSError:
        return False  # the file system has no ACLs


def _trusted() -> set[int]:
    """Return the users that may replace anything: this one and root.

    In a container with its own UID range, files of the host's root have the overflow UID.
    """
    users = {0, user_id()}
    with contextlib.suppress(OSError, ValueError, IndexError):
        mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
        if mapped < _EVERY_ID:
            users.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return users
