"""The value format in servers: a header of 64 bytes, then the record.

    u64 checksum, magic "SFV1", u32 flags (0), key of the data set (16 bytes), u64 id, u64 length of the record, zeros

The checksum is the xxh3_64 of the record, seeded with the id; the reader can compute all other fields. So a value that
is truncated, has flipped bits, or belongs to another data set or sample is detected, and counts as a miss. This does
not protect against forged values.

All numbers are little-endian. A record after its header has the same alignment as the value, up to multiples of 64.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[Any]
DataKey = bytes

HEAD_SIZE = 64
"""Bytes of the header."""

_HEAD = struct.Struct("<Q4sI16sQQ16s")
_digest: Any = xxhash.xxh3_64_intdigest  # accepts arrays, though not typed so, and is faster than with their `.data`
_MAGIC = b"SFV1"
_ZEROS = bytes(16)


def data_key(name: str, fingerprint: str) -> DataKey:
    """A 16-byte key of a data set, from its name and the fingerprint of its source and preparation."""
    return xxhash.xxh3_128_digest(f"{name}\0{fingerprint}".encode(errors="surrogatepass"))


def pack_head(key: DataKey, id: int, record: bytes | Bytes) -> bytes:
    """The header for a record.

    Args:
        key: of the data set, from `data_key`.
        id: of the sample, from 0 to 2**64 - 1.
        record: contiguous bytes.
    """
    return _HEAD.pack(_digest(record, id), _MAGIC, 0, key, id, len(record), _ZEROS)


def check_value(memory: Bytes, key: DataKey, id: int) -> Bytes | None:
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
