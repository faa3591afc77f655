"""Arrays that processes share, by a file or by starting one another, and what happens without room for them."""

import errno
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stallfree.ipc.shared_array import SharedCounts, shared_array


@pytest.mark.parametrize("full", [False, True])
def test_two_with_one_file_share_if_there_is_room(full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    if full:
        monkeypatch.setattr("stallfree.ipc.shared_array.allocate", allocate)
        with pytest.raises(OSError, match="no space left"):
            shared_array(tmp_path / "file", np.int64, 3, required=True)
    one, other = (shared_array(tmp_path / "file", np.int64, 3) for _ in range(2))
    one[1] = 7
    assert other.tolist() == ([0, 0, 0] if full else [0, 7, 0])


def count_up(counts: SharedCounts) -> None:
    counts.array[2] += 5


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_process_that_is_sent_counts_when_it_starts_shares_them(method: str) -> None:
    counts = SharedCounts(4)
    process = multiprocessing.get_context(method).Process(target=count_up, args=(counts,))
    process.start()
    process.join()
    assert (process.exitcode, counts.array.tolist()) == (0, [0, 0, 5, 0])


def test_any_other_pickle_of_counts_is_a_copy() -> None:
    counts = SharedCounts(4)
    counts.array[1] = 3
    copy = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(counts))))
    copy.array[0] = 1
    assert (copy.array.tolist(), counts.array.tolist()) == ([1, 3, 0, 0], [0, 3, 0, 0])
    counts.close()
    assert pickle.loads(pickle.dumps(counts)).array.tolist() == [0]
