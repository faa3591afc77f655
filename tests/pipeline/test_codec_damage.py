"""Records that are not sound raise `CodecError` or give some value; they never crash."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy as np
import pytest
import torch
from codec_values import everyday, leaves, record, trees
from hypothesis import given
from hypothesis import strategies as st

from stallfree.errors import CodecError
from stallfree.pipeline.codec import MAGIC, encode, open_record, read_record, stack_build, write_record

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def read_or_refuse(buffer: np.ndarray) -> None:
    """A damaged record raises CodecError or gives some value, whose memory can be touched."""

    def touch(value: Any) -> None:
        if isinstance(value, dict | list | tuple):
            for child in value.values() if isinstance(value, dict) else value:
                touch(child)
        elif isinstance(value, torch.Tensor):
            value.contiguous().clone()
        elif isinstance(value, np.ndarray | np.generic):
            value.tobytes()

    for copy in (True, False):
        with contextlib.suppress(CodecError):
            touch(read_record(buffer, copy=copy))


@everyday
@given(trees(leaves), st.data())
def test_truncated_and_flipped(value: Any, data: st.DataObject) -> None:
    written = record(value)
    cut = written[: data.draw(st.integers(0, written.size - 1))].copy()
    with pytest.raises(CodecError):
        read_record(cut, copy=True)
    for _ in range(data.draw(st.integers(1, 4))):
        written[data.draw(st.integers(0, min(written.size, 400) - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(written)


@everyday
@given(st.binary(max_size=200), st.binary(max_size=64), st.integers(0, 3))
def test_arbitrary_keys(key: bytes, rest: bytes, variable: int) -> None:
    head = struct.pack("=IIII", MAGIC, len(key), variable, 0)
    read_or_refuse(np.frombuffer(head + key + rest + bytes(256), np.uint8).copy())


@pytest.mark.parametrize(
    "key",
    [
        *("", "t", "t 2\nint", "t 1\nint\nint", "t 99999999999\nint", 't "2"\nint\nint', "int\nint", "-\nint"),
        *('d ["a"]', "d [[1]]\nint", "d [1.5]\nint", 'd "a"\nint', "x []", 'n ["os","system",["a"]]\nint'),
        *('n ["no_such_module_here","X",["a"]]\nint', 'n ["","",[]]', "s [1]\narray 2 |u1", "s [0,1]\nint"),
        *("t " + "[" * 100_000, "l 1\n" * 500 + "int", "nothing", "int 3 u1", "tensor -1 uint8", "tensor 1_0 uint8"),
        *("tensor 3 nothing", "tensor 0,99999999999999999999 uint8", "tensor 4611686018427387904,4 uint8"),
        *("array 2 |O", "array 2 |S0", "array 2 [[", '0\narray 2 [["a","|O"]]', "array 2 i4,i4", "scalar 2 |u1"),
        "tensor " + ",".join(["1"] * 100) + " uint8",
    ],
    ids=lambda key: key[:40],
)
def test_malformed_keys(key: str) -> None:
    head = struct.pack("=IIII", MAGIC, len(key), 0, 0)
    with pytest.raises(CodecError):
        read_record(np.frombuffer(head + key.encode() + bytes(512), np.uint8).copy(), copy=False)


def test_wrong_arguments_are_refused() -> None:
    structure, leaf_arrays = encode((torch.zeros(100), 1))
    with pytest.raises(CodecError, match="bytes"):
        write_record(structure, leaf_arrays, np.empty(10, np.uint8))
    with pytest.raises(CodecError, match="1 leaves"):
        write_record(structure, leaf_arrays[:1], np.empty(1000, np.uint8))
    with pytest.raises(CodecError, match=r"fixed structure and .* bytes, not 10"):
        open_record(structure, np.empty(10, np.uint8))
    with pytest.raises(CodecError, match="fixed structure"):
        open_record(encode("text")[0], np.empty(1000, np.uint8))
    with pytest.raises(CodecError, match="float"):
        read_record(np.zeros(100, np.float32), copy=True)
    with pytest.raises(CodecError, match="malformed"):
        read_record(np.zeros(64, np.uint8), copy=True)
    with pytest.raises(CodecError, match="column"):
        stack_build(structure, [np.zeros((2, 8), np.uint8)] * 2, 2)
    with pytest.raises(CodecError, match="fixed"):
        stack_build(encode("text")[0], [np.zeros((2, 8), np.uint8)], 2)


def test_a_lengths_table_beyond_the_buffer() -> None:
    written = record(["a", "b"])
    lengths = encode(["a", "b"])[0].head.size
    for wrong in (2**63, 2**64 - 1, 1 << 20):
        broken = written.copy()
        broken[lengths : lengths + 8] = np.array([wrong], np.uint64).view(np.uint8)
        with pytest.raises(CodecError):
            read_record(broken, copy=True)
