"""A file system on slow storage, for programs that open files themselves. Needs root, and version 1 of cgroups."""

from __future__ import annotations

import atexit
import os
import subprocess
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
        """Return the bytes read from the device so far, without those from the page cache."""
        fields = Path(f"/sys/block/{Path(self.device).name}/stat").read_text().split()
        return int(fields[2]) * 512


def why_not() -> str | None:
    """Return why there can be no `SlowDisk`, or None."""
    if os.geteuid():
        return "only root may mount and throttle a disk"
    if not (CGROUPS / "blkio" / "blkio.throttle.read_bps_device").exists():
        return "no control group of version 1 throttles disks"
    return None


def make_slow_disk(scratch: Path, megabytes: int, rate: int) -> SlowDisk:
    """Mount a disk of so many MB, in a file below `scratch`, until this process ends.

    Processes of its control group read it at `rate` bytes/s.
    """
    image, folder, slow = scratch / "disk", scratch / "mounted", CGROUPS / "blkio" / f"bench-{os.getpid()}"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(megabytes << 20)
    _call("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    device = _call("losetup", "--find", "--show", str(image))
    atexit.register(_call, "losetup", "--detach", device)
    _call("mount", "-o", "noatime", device, str(folder))
    atexit.register(_call, "umount", "--lazy", str(folder))
    slow.mkdir()
    atexit.register(slow.rmdir)
    number = os.stat(device).st_rdev
    (slow / "blkio.throttle.read_bps_device").write_text(f"{os.major(number)}:{os.minor(number)} {rate}")
    return SlowDisk(folder, slow, device)


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def forget_pages(folder: Path) -> None:
    """Drop the files below `folder` from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


def join(group: Path) -> None:
    """Move this process into a control group; children are in that of their parent."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
