"""What lies on which server: the format of values, and the owner of each id.

A value is a header of 64 bytes, then the record:

    u64 checksum, magic "SFV1", u32 flags (0), key of the data set (16 bytes), u64 id, u64 length of the record, zeros

The checksum is the xxh3_64 of the record, seeded with the id; the reader can compute all other fields. So a value that
is truncated, has flipped bits, or belongs to another data set or sample is detected, and counts as a miss. This does
not protect against forged values.

All numbers are little-endian.

The owner of an id is determined by rendezvous hashing with equal shares. Every server has a score for every id, a hash
of both, and the server with the highest score owns the id (Thaler and Ravishankar, "Using name-based mappings to
increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998, section III). So any process can compute the owner
without a directory, and no ids move between the other servers when a server joins or leaves. Random shares are uneven,
by 2% for 2,000 ids on two servers, and a cache of exactly the required size would overflow on one of them. So the
surplus ids of a server are assigned to servers with less than their share.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stallfree.cache.policies import mixed

Array = npt.NDArray[Any]
DataKey = bytes

HEAD_SIZE = 64
"""Bytes of the header."""

_HEAD = struct.Struct("<Q4sI16sQQ16s")
_digest: Any = xxhash.xxh3_64_intdigest  # accepts arrays, though not typed so, and is faster than with their `.data`
_MAGIC = b"SFV1"
_ZEROS = bytes(16)

_STEP = 1 << 20
"""Ids hashed per step, which bounds the memory."""


def data_key(name: str, fingerprint: str) -> DataKey:
    """A 16-byte key of a data set, from its name and the fingerprint of its source and preparation."""
    return xxhash.xxh3_128_digest(f"{name}\0{fingerprint}".encode(errors="surrogatepass"))


def pack_head(key: DataKey, id: int, record: bytes | Array) -> bytes:
    """The header for a record.

    Args:
        key: of the data set, from `data_key`.
        id: of the sample, from 0 to 2**64 - 1.
        record: contiguous bytes.
    """
    return _HEAD.pack(_digest(record, id), _MAGIC, 0, key, id, len(record), _ZEROS)


def check_value(memory: Array, key: DataKey, id: int) -> Array | None:
    """The record in `memory`, as a view; None for any but an intact value of this sample.

    Args:
        memory: the value, 1-D and contiguous.
        key: of the data set.
        id: of the sample.
    """
    size = memory.size - HEAD_SIZE
    if size < 0:
        return None
    checksum, *rest = _HEAD.unpack_from(memory.data)
    if rest != [_MAGIC, 0, key, id, size, _ZEROS]:
        return None
    record = memory[HEAD_SIZE:]
    return record if _digest(record, id) == checksum else None


def owners(num_ids: int, names: Sequence[str]) -> Array:
    """Return the owner of each id from 0 to `num_ids` - 1: its index in `names`, int16.

    No server owns more than `num_ids` / number of servers, rounded up. The order of `names` affects only the returned
    indices.

    Args:
        num_ids: number of samples of the data set.
        names: distinct names of the servers, which determine the owners.
    """
    owner = np.zeros(num_ids, np.int16)
    by_name = sorted(range(len(names)), key=names.__getitem__)
    seeds = [xxhash.xxh3_64_intdigest(names[index].encode()) for index in by_name]
    for start in range(0, num_ids, _STEP):
        ids = np.arange(start, min(start + _STEP, num_ids), dtype=np.uint64)
        scores = np.stack([mixed(ids, seed) for seed in seeds])
        owner[start : start + len(ids)] = np.array(by_name)[scores.argmax(axis=0)]
    most = -(-num_ids // len(names))
    owned = [np.flatnonzero(owner == index) for index in by_name]
    surplus = np.concatenate([ids[most:] for ids in owned])
    free = np.repeat(np.array(by_name, np.int16), [max(0, most - len(ids)) for ids in owned])
    owner[surplus] = free[: len(surplus)]
    return owner
