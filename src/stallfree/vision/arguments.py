"""Validation of the arguments and inputs of steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from stallfree.errors import InputError, transform_input
from stallfree.vision.native import Layout, Pixels


def pixels_of(value: Any, step: object) -> Pixels:
    """Return `value`, the input of `step`, as an array of shape (H, W, 3). Raises `InputError`."""
    array = None if isinstance(value, (bytes, bytearray, memoryview, str)) else np.asarray(value)
    if array is not None and array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and array.size:
        return array
    given = type(value).__name__ + ("" if array is None else f" ({array.dtype}, shape {array.shape})")
    raise transform_input(
        f"{step!r} got a {given}: it needs an image as uint8 of shape (height, width, 3), as DecodeImage() returns "
        "it. Put ChannelsFirst() and steps that return floats after it"
    )


def checked_size(size: int | Sequence[int], name: str = "size") -> tuple[int, int]:
    """Return (height, width) from two numbers, or one for both. Raises `InputError`."""
    try:
        if isinstance(size, bool):
            raise TypeError
        sides = [operator.index(side) for side in size] if isinstance(size, Sequence) else [operator.index(size)] * 2
    except TypeError:
        sides = []
    if len(sides) != 2 or not all(0 < side <= 65500 for side in sides):
        raise InputError(f"{name}={size!r}: give (height, width) in pixels, or one number for both")
    return sides[0], sides[1]


def check_layout(layout: Layout) -> Layout:
    """Return `layout`. Raises `InputError` if it is unknown."""
    if layout not in ("HWC", "CHW"):
        raise InputError(f"layout={layout!r}: give 'HWC' (height, width, channels) or 'CHW' (channels first)")
    return layout


def probability(given: float, name: str) -> float:
    """Return `given` as a float. Raises `InputError` if it is not within 0 to 1."""
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given <= 1:
        return float(given)
    raise InputError(f"{name}={given!r}: give a probability, 0 to 1")
