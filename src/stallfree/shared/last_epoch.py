"""The last epoch of a group, in a file of its folder: what the next conductor goes on from."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def next_epoch(folder: Path) -> int:
    """The epoch after the last one of which a batch was prepared here."""
    try:
        return int((folder / "epoch").read_text()) + 1
    except (OSError, ValueError):
        return 0


def note_epoch(folder: Path, epoch: int) -> None:
    """A batch of this epoch was prepared."""
    with contextlib.suppress(OSError):
        new = folder / f"epoch-{os.getpid()}"
        new.write_text(str(epoch))
        new.rename(folder / "epoch")
