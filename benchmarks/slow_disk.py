"""A file system on slow storage, for programs that open files themselves. Needs root, and version 1 of cgroups."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class SlowDisk:
    """A mounted disk image.

    Attributes:
        folder: where it is mounted.
        slow: the control group whose processes read it slowly.
    """

    folder: Path
    slow: Path
    device: str

    def bytes_read(self) -> int:
        """Bytes read from the device so far: what the page cache has is not among them."""
        fields = Path(f"/sys/block/{Path(self.device).name}/stat").read_text().split()
        return int(fields[2]) * 512


def why_not() -> str | None:
    """None if a `SlowDisk` can be had, else the reason."""
    if os.geteuid():
        return "only root may mount and throttle a disk"
    if not (CGROUPS / "blkio" / "blkio.throttle.read_bps_device").exists():
        return "no control group of version 1 throttles disks"
    return None


@contextmanager
def slow_disk(scratch: Path, megabytes: int, rate: int) -> Iterator[SlowDisk]:
    """A disk of so many MB in a file below `scratch`, which processes of its control group read at `rate` bytes/s."""
    image, folder, slow = scratch / "disk", scratch / "mounted", CGROUPS / "blkio" / f"bench-{os.getpid()}"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(megabytes << 20)
    _call("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    device = _call("losetup", "--find", "--show", str(image))
    try:
        _call("mount", "-o", "noatime", device, str(folder))
        try:
            slow.mkdir()
            number = os.stat(device).st_rdev
            limit = f"{os.major(number)}:{os.minor(number)} {rate}"
            (slow / "blkio.throttle.read_bps_device").write_text(limit)
            yield SlowDisk(folder, slow, device)
        finally:
            _call("umount", "--lazy", str(folder))
            slow.rmdir()
    finally:
        _call("losetup", "--detach", device)


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def forget_pages(folder: Path) -> None:
    """Have the kernel drop what its page cache has of the files below `folder`."""
    for path in folder.rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


def join(group: Path) -> None:
    """Move this process into a control group; children are in that of their parent."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
