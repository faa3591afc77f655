"""Free memory and disk space, and the capacity that they allow."""

import contextlib
import os
import shutil
import sys
import warnings
from pathlib import Path

from stallfree.errors import StallfreeError, capacity_too_large
from stallfree.raising import users_level
from stallfree.units import format_size

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that this process may still use: the kernel's available memory, limited by each cgroup above it."""
    return max(0, min([_available(), *_cgroup_limits()]))


def free_space(folder: Path) -> int:
    """Bytes that the user may still write to the file system of `folder`."""
    return shutil.disk_usage(folder).free


def granted(capacity: int | float, root: Path) -> int:
    """Return the bytes of a `capacity` in bytes, or as a share of the free memory.

    Bytes that caches below `root` may still allocate do not count as free.
    """
    if isinstance(capacity, int):
        return capacity
    promised = 0
    for file in root.glob("*/data"):
        with contextlib.suppress(OSError):
            status = file.stat()
            promised += max(0, status.st_size - 512 * status.st_blocks)
    free = min(free_memory(), free_space(root if root.exists() else root.parent))
    return int(capacity * max(0, free - promised))


def allowed_capacity(size: int, folder: Path, on_disk: bool, name: str) -> int:
    """The possible capacity in bytes for a requested `size`.

    Warns and returns less if the file system of `folder` has less space. Raises `CapacityError` if `size` exceeds the
    free memory.
    """
    if not on_disk:
        check_free_memory(size, f"capacity={format_size(size)} for the cache {name!r}")
    space = free_space(folder)
    if size <= space:
        return size
    room = space - space // 16
    advice = "Give another store" if on_disk else "Make /dev/shm larger (docker: --shm-size), or give another store"
    warnings.warn(
        f"the file system of {folder.parent} has only {format_size(space)} free: the cache {name!r} takes "
        f"{format_size(room)} instead of the requested {format_size(size)}. {advice}",
        RuntimeWarning,
        stacklevel=2,
    )
    return room


def no_space_left(size: int, allowed: int, folder: Path, name: str) -> StallfreeError:
    """Return the error for a cache of `size` bytes that does not even fit as one of the `allowed` bytes."""
    return capacity_too_large(
        f"the cache {name!r} of {format_size(size)} has no space: {folder.parent} can hold {format_size(allowed)}, "
        "which is less than its index. Free some space there, or make it larger (/dev/shm with docker: --shm-size)"
    )


def warn_of_other_capacity(name: str, capacity: int, requested: int) -> None:
    """Warn if the existing cache `name` has another capacity than requested."""
    if abs(capacity - requested) > requested // 16:
        warnings.warn(
            f"the cache {name!r} already exists with a capacity of {format_size(capacity)}: the requested "
            f"{format_size(requested)} are ignored. Give another name, or remove it with `stallfree cache rm {name}` "
            "when no process uses it",
            RuntimeWarning,
            stacklevel=users_level(),
        )


def check_free_memory(size: int, what: str) -> None:
    """Raise `CapacityError` if `size` bytes, described by `what`, exceed the free memory."""
    free = free_memory()
    if size > free:
        raise capacity_too_large(
            f"{what} exceeds the {format_size(free)} of free memory (of the host and of this control group): give less"
        )


def _available() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return sys.maxsize  # unknown


def _cgroup_limits() -> list[int]:
    """Free bytes of each control group above this process that has a limit. Page cache counts as free."""
    limits: list[int] = []
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return limits
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":  # version 2
            root, names, prefix = _GROUPS, ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            root, names, prefix = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        else:
            continue
        folder = root / place.lstrip("/")
        for level in (folder, *folder.parents):
            if level == root.parent:
                break
            limit, used = _number(level / names[0]), _number(level / names[1])
            if limit is not None and used is not None:
                limits.append(limit - max(0, used - _page_cache(level / "memory.stat", prefix)))
    return limits


def _page_cache(file: Path, prefix: str) -> int:
    """Bytes of a control group that the kernel reclaims before it kills a process: pages of files, not of tmpfs."""
    wanted = {f"{prefix}active_file", f"{prefix}inactive_file"}
    with contextlib.suppress(OSError, ValueError):
        return sum(int(value) for name, value in map(str.split, file.read_text().splitlines()) if name in wanted)
    return 0


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None
