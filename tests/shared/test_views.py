"""A member's view of the ring: its changes are private, and dropped before the slot is reused."""

import mmap
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stallfree.loader.ring import Ring
from stallfree.shared.link import PrivateSlots

PAGE = mmap.PAGESIZE
SIZE = 64 * PAGE
NO_TABLE = "the page table cannot be read"


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring(3, None)
    yield made
    made.close()


@pytest.fixture(params=["page table", "no page table", "page table that cannot be read"])
def views(request: pytest.FixtureRequest, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrivateSlots]:
    """With and without a page table that shows which pages were written."""
    if request.param == "no page table":
        plain: Callable[..., int] = os.open

        def refuse(path: Any, *rest: Any, **more: Any) -> int:
            if "pagemap" in str(path):
                raise PermissionError(13, "Permission denied", path)
            return plain(path, *rest, **more)

        monkeypatch.setattr(os, "open", refuse)
    elif request.param == "page table that cannot be read":
        monkeypatch.setattr(os, "pread", lambda *_: b"")
    elif not os.access("/proc/self/pagemap", os.R_OK):
        pytest.skip(NO_TABLE)
    made = PrivateSlots(ring.slots.folder)
    yield made
    made.close()


def fill(ring: Ring, slot: int, value: int, size: int = SIZE) -> None:
    assert ring.slots.folder.exists()  # it is made when it is first asked for
    memory = ring.slots.reserve(slot, size)
    assert memory is not None
    memory[:size] = value


@pytest.mark.parametrize("at", [0, SIZE - 1])
def test_writes_are_private_and_gone_after_clean(ring: Ring, views: PrivateSlots, at: int) -> None:
    other = PrivateSlots(ring.slots.folder)
    fill(ring, 0, 1)
    ours, theirs = views.view(0, SIZE)[:SIZE], other.view(0, SIZE)[:SIZE]
    ours[at] = 99
    assert theirs[at] == ring.slots.view(0, SIZE)[at] == 1
    theirs[at] = 55
    assert ours[at] == 99
    assert (np.delete(ours, at) == 1).all()
    other.close()
    del ours
    views.clean(0, SIZE)
    assert (views.view(0, SIZE)[:SIZE] == 1).all()
    fill(ring, 0, 2)
    assert (views.view(0, SIZE)[:SIZE] == 2).all()


def faults(ring: Ring, views: PrivateSlots, write: bool) -> int:
    """Return the page faults of reading the slot after it was cleaned."""
    fill(ring, 0, 1)
    seen = views.view(0, SIZE)
    if write:
        seen[3] = 9
    seen.sum()
    del seen
    views.clean(0, SIZE)
    seen = views.view(0, SIZE)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    seen[::PAGE].sum()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_what_was_not_written_stays_mapped(ring: Ring) -> None:
    views = PrivateSlots(ring.slots.folder)
    faults(ring, views, write=False)  # the first of all
    if not os.access("/proc/self/pagemap", os.R_OK):
        pytest.skip(NO_TABLE)
    assert faults(ring, views, write=False) == 0
    assert faults(ring, views, write=True) > 0
    views.close()
