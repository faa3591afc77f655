"""What lies on which server: the header of a value, by which anything wrong is noticed, and the owner of each id."""

import struct

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree.cache.redis.store import HEAD_SIZE, check_value, data_key, owners, pack_head

KEY = data_key("train", "fingerprint")
WORD = 2**64 - 1


def value_of(record: bytes, id: int = 7) -> np.ndarray:
    return np.frombuffer(bytearray(pack_head(KEY, id, record) + record), np.uint8)


def record_in(value: np.ndarray, id: int = 7, key: bytes = KEY) -> bytes | None:
    record = check_value(value, key, id)
    return None if record is None else record.tobytes()


@given(record=st.binary(max_size=300), id=st.integers(0, WORD))
def test_a_record_comes_back(record: bytes, id: int) -> None:
    value = value_of(record, id)
    assert len(value) == HEAD_SIZE + len(record) == 64 + len(record)
    assert record_in(value, id) == record


def test_the_format_stays_what_it_is() -> None:
    record = bytes(range(100))
    fields = b"SFV1" + struct.pack("<I", 0) + KEY + struct.pack("<QQ", 3, 100) + bytes(16)
    assert pack_head(KEY, 3, record) == struct.pack("<Q", xxhash.xxh3_64_intdigest(record, seed=3)) + fields
    assert data_key("a", "b") == xxhash.xxh3_128_digest(b"a\0b")
    keys = {data_key("ab", "c"), data_key("a", "bc"), data_key("abc", ""), data_key("", "abc"), data_key("\udc80", "x")}
    assert (len(keys), {len(key) for key in keys}) == (5, {16})


def test_a_value_that_is_changed_cut_longer_or_of_another_is_none() -> None:
    value = value_of(bytes(range(40)))
    for bit in range(8 * len(value)):
        value[bit // 8] ^= 1 << bit % 8
        assert record_in(value) is None, f"bit {bit}"
        value[bit // 8] ^= 1 << bit % 8
    for wrong in (*(value[:size] for size in range(len(value))), np.append(value, np.uint8(0)), np.roll(value, 1)):
        assert record_in(wrong) is None
    for id, key in ((8, KEY), (7 + 2**63, KEY), (7, data_key("train", "other")), (7, data_key("test", "fingerprint"))):
        assert record_in(value, id, key) is None
    assert record_in(value) == bytes(range(40))


def score(id: int, name: str) -> int:
    """The score of a server for an id: SplitMix64."""
    number = id * 0x9E3779B97F4A7C15 + xxhash.xxh3_64_intdigest(name.encode()) & WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB & WORD
    return number ^ number >> 31


def owner_names(count: int, names: list[str]) -> list[str]:
    return [names[index] for index in owners(count, names).tolist()]


@settings(max_examples=12)
@given(st.integers(1, 120), st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True))
def test_shares_are_equal_and_only_the_surplus_moves(count: int, numbers: list[int]) -> None:
    """Above the share of the server with the highest score. The order of servers does not matter."""
    names = [f"node{number}" for number in numbers]
    found, most = owner_names(count, names), -(-count // len(names))
    first = [max(names, key=lambda name: score(id, name)) for id in range(count)]
    assert max(found.count(name) for name in names) <= most
    surplus = sum(max(0, first.count(name) - most) for name in names)
    assert sum(one != other for one, other in zip(found, first, strict=True)) == surplus
    assert owner_names(count, names[::-1]) == found
