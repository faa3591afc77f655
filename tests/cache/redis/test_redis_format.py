"""What lies on which server: the header of a value, by which anything wrong is noticed, and the owner of each id."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree.cache.redis.store import HEAD_SIZE, check_value, data_key, owners, pack_head

KEY = data_key("train", "fingerprint")
WORD = 2**64 - 1

sizes = st.integers(1, 400)
names = st.lists(st.text(max_size=8), min_size=1, max_size=8, unique=True)


def value_of(record: bytes, id: int = 7, key: bytes = KEY) -> np.ndarray:
    return np.frombuffer(bytearray(pack_head(key, id, record) + record), np.uint8)


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


def test_every_flipped_bit_is_noticed() -> None:
    value = value_of(bytes(range(40)))
    for bit in range(8 * len(value)):
        value[bit // 8] ^= 1 << bit % 8
        assert record_in(value) is None, f"bit {bit}"
        value[bit // 8] ^= 1 << bit % 8
    assert record_in(value) == bytes(range(40))


def test_a_value_that_is_cut_longer_or_of_another_is_none() -> None:
    value = value_of(bytes(50))
    for size in range(len(value)):
        assert record_in(value[:size]) is None, f"{size} bytes"
    assert record_in(np.append(value, np.uint8(0))) is None
    assert record_in(np.roll(value, 1)) is None
    assert record_in(value, id=8) is None
    assert record_in(value, id=7 + 2**63) is None
    assert record_in(value, key=data_key("train", "another fingerprint")) is None
    assert record_in(value, key=data_key("test", "fingerprint")) is None
    assert record_in(value) == bytes(50)


def test_name_and_fingerprint_do_not_run_together() -> None:
    keys = {data_key("ab", "c"), data_key("a", "bc"), data_key("abc", ""), data_key("", "abc"), data_key("\udc80", "x")}
    assert len(keys) == 5
    assert {len(key) for key in keys} == {16}


# --- the owner of each id -------------------------------------------------------------------------------------------


def score(id: int, name: str) -> int:
    """The score of a server for an id: SplitMix64."""
    number = id * 0x9E3779B97F4A7C15 + xxhash.xxh3_64_intdigest(name.encode()) & WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB & WORD
    return number ^ number >> 31


def highest(id: int, names: list[str]) -> str:
    return max(names, key=lambda name: score(id, name))


def owner_names(count: int, names: list[str]) -> list[str]:
    return [names[index] for index in owners(count, names).tolist()]


def moved(before: list[str], after: list[str]) -> int:
    return sum(one != other for one, other in zip(before, after, strict=True))


def surplus(count: int, names: list[str]) -> int:
    """How many ids are above the share of the server with the highest score."""
    first = [highest(id, names) for id in range(count)]
    return sum(max(0, first.count(name) - -(-count // len(names))) for name in names)


@given(sizes, names)
@settings(max_examples=20)
def test_shares_are_equal_and_only_the_surplus_moves(count: int, names: list[str]) -> None:
    found = owner_names(count, names)
    assert max(found.count(name) for name in names) <= -(-count // len(names))
    assert moved(found, [highest(id, names) for id in range(count)]) == surplus(count, names)


@given(sizes, names, st.randoms())
def test_the_order_of_servers_does_not_matter(count: int, names: list[str], chance: object) -> None:
    before = owner_names(count, names)
    chance.shuffle(names)  # type: ignore[attr-defined]
    assert owner_names(count, names) == before


@pytest.mark.parametrize("number", [2, 8])
def test_a_server_less_moves_few_ids_of_others(number: int) -> None:
    names = [f"node{index}" for index in range(number + 1)]
    before, after = owner_names(20_000, names), owner_names(20_000, names[:-1])
    kept = [one == other for one, other in zip(before, after, strict=True) if one != names[-1]]
    assert np.mean(kept) > 0.95


def test_one_server_owns_all_and_more_servers_than_ids_own_one_at_most() -> None:
    assert owners(5, ["a"]).tolist() == [0] * 5
    assert np.bincount(owners(5, list("abcdefgh"))).max() == 1
    assert owners(5, ["a", "b"]).dtype == np.int16
