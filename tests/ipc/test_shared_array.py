"""Arrays in files of shared memory: what happens where there is no room for the file."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stallfree.ipc.shared_array import shared_array


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("stallfree.ipc.shared_array.allocate", allocate)


def test_two_with_one_file_share(tmp_path: Path) -> None:
    one, other = (shared_array(tmp_path / "file", np.int64, 3) for _ in range(2))
    one[1] = 7
    assert other.tolist() == [0, 7, 0]


@pytest.mark.usefixtures("full")
def test_without_room_it_is_private_unless_it_is_required(tmp_path: Path) -> None:
    one, other = (shared_array(tmp_path / "file", np.int64, 1) for _ in range(2))
    one[0] = 7
    assert other.tolist() == [0]
    with pytest.raises(OSError, match="no space left"):
        shared_array(tmp_path / "file", np.int64, 1, required=True)
