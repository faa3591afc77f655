"""Shared flags: all processes see the same, and the last one to close them removes them."""

from __future__ import annotations

import pickle

import pytest

from stallfree.errors import StallfreeError
from stallfree.ipc.folders import default_root
from stallfree.sampling.shared_flags import LOW, PACK, PENDING, READ, Field, SharedFlags


def test_all_that_attach_see_the_same() -> None:
    before = set(default_root().iterdir())
    shared = SharedFlags(10)
    (folder,) = set(default_root().iterdir()) - before
    assert shared.fields[Field.EPOCH] == -1
    data = pickle.dumps(shared)
    others = [pickle.loads(data), pickle.loads(data)]
    shared.flags[3] = LOW | PENDING
    shared.fields[Field.REGION] = 7
    for number, other in enumerate(others):
        assert other.flags.tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 0, 0]
        assert other.fields[Field.REGION] == 7
        other.counts[(PACK, READ)[number]] += [1, 2, 3, 4, 5, 6]
    stats = shared.stats()
    assert (stats.packages_written, stats.package_bytes_written, stats.samples_packed) == (2, 4, 12)
    for each in (*others, shared):
        assert folder.exists()
        each.close()
        each.close()
    assert shared.stats() == stats
    assert len(shared.flags) == 0
    assert not folder.exists()
    with pytest.raises(StallfreeError, match="is gone"):
        pickle.loads(data)
