"""States of samplers and schedules: checks, and arrays encoded as JSON strings."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.errors import state_format

Array = npt.NDArray[Any]


def pack(array: Array) -> str:
    """Encode an array as a JSON string."""
    return base64.b64encode(zlib.compress(array.tobytes(), 1)).decode()


def unpack(text: str, dtype: Any) -> Array:
    """Decode the array in `text`. Raises `InputError` for text that `pack` did not produce."""
    try:
        found: Array = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).copy()
        return found
    except (ValueError, TypeError, zlib.error) as error:
        raise state_format(f"the state is damaged ({error}): give what state_dict() returned") from error


def pack_mask(mask: Array) -> str:
    """Encode an array of bool as a JSON string."""
    return pack(np.packbits(mask))


def unpack_mask(text: str, count: int) -> Array:
    """Decode the `count` bools in `text`. Raises `InputError` for text that `pack_mask` did not produce."""
    return np.unpackbits(unpack(text, np.uint8), count=count).astype(bool)
