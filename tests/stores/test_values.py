"""The header of a value: whatever is wrong with a value is noticed."""

from __future__ import annotations

import struct

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stallfree.stores.values import HEAD_SIZE, Bytes, check_value, data_key, pack_head

KEY = data_key("train", "fingerprint")
IDS = st.integers(0, 2**64 - 1)


def value_of(record: bytes, id: int = 7, key: bytes = KEY) -> Bytes:
    return np.frombuffer(bytearray(pack_head(key, id, record) + record), np.uint8)


def record_in(value: Bytes, id: int = 7, key: bytes = KEY) -> bytes | None:
    record = check_value(value, key, id)
    return None if record is None else record.tobytes()


@given(record=st.binary(max_size=300), id=IDS)
def test_a_record_comes_back(record: bytes, id: int) -> None:
    value = value_of(record, id)
    assert len(value) == HEAD_SIZE + len(record) == 64 + len(record)
    assert record_in(value, id) == record


def test_the_format_stays_what_it_is() -> None:
    record = bytes(range(100))
    fields = b"SFV1" + struct.pack("<I", 0) + KEY + struct.pack("<QQ", 3, 100) + bytes(16)
    assert pack_head(KEY, 3, record) == struct.pack("<Q", xxhash.xxh3_64_intdigest(record, seed=3)) + fields
    assert data_key("a", "b") == xxhash.xxh3_128_digest(b"a\0b")


def test_every_flipped_bit_is_noticed() -> None:
    value = value_of(bytes(range(40)))
    for bit in range(8 * len(value)):
        value[bit // 8] ^= 1 << bit % 8
        assert record_in(value) is None, f"bit {bit}"
        value[bit // 8] ^= 1 << bit % 8
    assert record_in(value) == bytes(range(40))


def test_a_value_that_is_cut_or_goes_on_is_none() -> None:
    value = value_of(bytes(50))
    for size in range(len(value)):
        assert record_in(value[:size]) is None, f"{size} bytes"
    assert record_in(np.append(value, np.uint8(0))) is None
    assert record_in(np.roll(value, 1)) is None


def test_a_value_of_another_is_none() -> None:
    value = value_of(b"sample")
    assert record_in(value, id=8) is None
    assert record_in(value, id=7 + 2**63) is None
    assert record_in(value, key=data_key("train", "another fingerprint")) is None
    assert record_in(value, key=data_key("test", "fingerprint")) is None
    assert record_in(value) == b"sample"


def test_name_and_fingerprint_do_not_run_together() -> None:
    keys = {data_key("ab", "c"), data_key("a", "bc"), data_key("abc", ""), data_key("", "abc"), data_key("\udc80", "x")}
    assert len(keys) == 5
    assert {len(key) for key in keys} == {16}


def test_the_record_is_a_view_and_as_aligned_as_the_value() -> None:
    memory = np.zeros(4096, np.uint8)
    start = -memory.ctypes.data % 64
    value = memory[start : start + 164]
    value[:] = value_of(bytes(100))
    record = check_value(value, KEY, 7)
    assert record is not None
    assert np.shares_memory(record, memory)
    assert record.ctypes.data % 64 == 0
