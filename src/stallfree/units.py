"""Sizes and rates as people write them: `"4GiB"`, `"60MB/s"`, `"80ms"`."""

from __future__ import annotations

import re

from stallfree.errors import CapacityError, InputError

_BYTES = {"": 1, "B": 1} | {
    p + suffix: base**e
    for e, p in enumerate("KMGTP", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000), ("", 1000))
}
_BYTES_FOLDED = {name.lower(): factor for name, factor in _BYTES.items()}
_SIZE = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: int | str, name: str = "size") -> int:
    """Bytes in `value`: an int, or a string such as `"4GiB"` (1024-based), `"500MB"` or `"1.5k"` (1000-based).

    Raises `CapacityError` for a bool, a negative number, an unknown unit or anything that is no size.
    """
    size: float | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        factor = _BYTES_FOLDED.get(match[2].lower())
        size = None if factor is None else float(match[1]) * factor
    if size is None:
        raise CapacityError(f"{name}={value!r} is no size: give bytes as an int, or a string such as '4GiB' or '500MB'")
    if size < 0:
        raise CapacityError(f"{name}={value!r} is negative: give a size of 0 bytes or more")
    return int(size)


def parse_rate(value: float | int | str, name: str = "rate") -> float:
    """Bytes per second in `value`: a number, or a string such as `"60MB/s"`. Raises `InputError` for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        rate = float(value)
    elif isinstance(value, str) and value.rstrip().endswith("/s"):
        rate = float(parse_size(value.rstrip()[:-2], name))
    else:
        raise InputError(f"{name}={value!r} is no rate: give bytes per second, or a string such as '60MB/s'")
    if not 0 < rate < float("inf"):
        raise InputError(f"{name}={value!r} must be above 0 and finite")
    return rate


def format_size(size: float) -> str:
    """`size` bytes for people, 1024-based: `"1.5 GiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
