"""The board: all who attach see the same, and the last one out removes it."""

from __future__ import annotations

import pickle

import pytest

from stallfree.errors import InputError, StallfreeError
from stallfree.folders import default_root
from stallfree.loader.board import LOW, PACK, PENDING, READ, Board, Field


def test_all_who_attach_to_a_board_see_the_same() -> None:
    board = Board(None, 10)
    assert board.fields[Field.EPOCH] == -1
    others = [Board(board.name, 10), pickle.loads(pickle.dumps(board))]
    board.flags[3] = LOW | PENDING
    board.fields[Field.REGION] = 7
    for number, other in enumerate(others):
        assert other.flags.tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 0, 0]
        assert other.fields[Field.REGION] == 7
        other.counts[(PACK, READ)[number]] += [1, 2, 3, 4, 5, 6]
    stats = board.stats()
    assert (stats.packages_written, stats.package_bytes_written, stats.samples_packed) == (2, 4, 12)
    with pytest.raises(InputError, match="for 10 samples, not for 11"):
        Board(board.name, 11)
    data = pickle.dumps(board)
    for each in (*others, board):
        assert (default_root() / board.name).exists()
        each.close()
        each.close()
    assert board.stats() == stats
    assert len(board.flags) == 0
    assert not (default_root() / board.name).exists()
    with pytest.raises(StallfreeError, match="is gone"):
        pickle.loads(data)
    with pytest.raises(InputError, match="num_ids=0"):
        Board(None, 0)
