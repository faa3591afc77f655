"""Standing memory: used again when it is free, never before, and not kept for ever."""

import gc

import numpy as np
import pytest
import torch

from children import Child
from stallfree.cache.buffers import SMALLEST, Buffers

MIB = 1 << 20


def test_memory_is_large_enough_aligned_and_writable() -> None:
    for size in (0, 1, SMALLEST, SMALLEST + 1, 3 * MIB):
        memory = Buffers().take(size)
        assert memory.size >= max(size, SMALLEST)
        assert memory.ctypes.data % 64 == memory.size & memory.size - 1 == 0
        memory[:] = 1
        assert memory.sum(dtype=np.int64) == memory.size
    for size in (1 << 60, 1 << 70):
        with pytest.raises(MemoryError):
            Buffers().take(size)


def test_memory_is_used_again_when_the_last_view_is_gone() -> None:
    buffers = Buffers()
    memory = buffers.take(100_000)
    first = memory.ctypes.data
    tensor = torch.from_numpy(memory[128:256]).view(2, 64)[1]
    array = memory[64:128].view(np.float32)
    del memory
    assert buffers.take(100_000).ctypes.data != first
    del array
    assert buffers.take(100_000).ctypes.data != first
    tensor.fill_(3)
    with buffers._lock:  # as when the garbage collector runs within `take`
        del tensor
        gc.collect()
    assert [buffers.take(100_000).ctypes.data for _ in range(2)] == [first] * 2


def test_no_more_is_kept_than_was_asked_for_or_in_use_at_once() -> None:
    buffers = Buffers(keep=2 * MIB)
    for _ in range(5):
        buffers.take(MIB)
    assert buffers.idle_bytes == MIB
    several = [buffers.take(MIB) for _ in range(5)]
    del several
    assert buffers.idle_bytes == 5 * MIB, "a batch of that size may come again"
    buffers.take(2 * MIB)
    assert buffers.idle_bytes == 5 * MIB, "those used longest ago go"


def test_a_forked_child_has_memory_of_its_own() -> None:
    buffers = Buffers()
    used, idle = buffers.take(SMALLEST), buffers.take(SMALLEST)
    used[:], idle[:] = 1, 2
    first = idle.ctypes.data
    del idle

    def child() -> None:
        assert (used == 1).all()
        assert buffers.idle_bytes == 0
        buffers.take(SMALLEST)[:] = 9
        used[:] = 9

    with buffers._lock:  # as if another thread of the parent held it
        process = Child(child)
    assert process.wait() == 0
    assert (used == 1).all()
    again = buffers.take(SMALLEST)
    assert (again.ctypes.data, (again == 2).all()) == (first, True)
