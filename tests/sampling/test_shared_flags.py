"""Shared flags: the process that made them and those that it starts see the same."""

from __future__ import annotations

import multiprocessing

import pytest

from stallfree.sampling.shared_flags import LOW, PACK, PENDING, READ, Field, SharedFlags


def write(shared: SharedFlags, row: int) -> None:
    """As the process of that row does."""
    assert shared.flags.tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 0, 0]
    assert shared.fields[Field.REGION] == 7
    shared.counts[row] += [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_all_processes_see_the_same(method: str) -> None:
    context = multiprocessing.get_context(method)
    shared = SharedFlags(10)
    assert shared.fields[Field.EPOCH] == -1
    shared.flags[3] = LOW | PENDING
    shared.fields[Field.REGION] = 7
    children = [context.Process(target=write, args=(shared, row)) for row in (PACK, READ)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    stats = shared.stats()
    assert (stats.packages_written, stats.package_bytes_written, stats.samples_packed) == (2, 4, 12)
    shared.close()
    shared.close()
    assert shared.stats() == stats
    assert len(shared.flags) == 0
