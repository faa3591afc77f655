"""Sizes and rates as people write them: `"4GiB"`, `"60MB/s"`, `"80ms"`."""

import operator
import re
from fractions import Fraction
from typing import Any

from stallfree.errors import CapacityError, InputError, unit_format

_BYTES = {"": 1, "b": 1} | {
    p + suffix: base**e
    for e, p in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000), ("", 1000))
}
_SIZE = re.compile(r"\s*([+-]?\d{1,99}(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"\s*(\d{1,99}(?:\.\d+)?)\s*([A-Za-z\u00b5\u03bc]*)\s*")


def parse_size(value: int | str, name: str = "size") -> int:
    """Bytes in `value`: an int, or a string such as `"4GiB"` (1024-based), `"500MB"` or `"1.5k"` (1000-based).

    Raises `CapacityError` for a bool, a negative number, an unknown unit or anything that is no size.
    """
    size: int | Fraction | None = _whole(value)
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2].lower() in _BYTES:
        size = Fraction(match[1]) * _BYTES[match[2].lower()]
    if size is None:
        raise CapacityError(f"{name}={value!r} is no size: give bytes as an int, or a string such as '4GiB' or '500MB'")
    if size < 0:
        raise CapacityError(f"{name}={value!r} is negative: give a size of 0 bytes or more")
    return int(size)


def parse_room(value: int | str, name: str) -> float | int:
    """A share such as "50%" as a float from 0 to 1, else bytes as an int. Raises `InputError`."""
    if not isinstance(value, str) or not value.strip().endswith("%"):
        return parse_size(value, name)
    try:
        share = float(value.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise InputError(f"{name}={value!r}: a share is 0% to 100%")
    return share


def parse_whole(value: Any, name: str, low: int | None = None) -> int:
    """`value` as an int: an int, or what Python takes for one, such as those of NumPy.

    Raises `InputError` for a bool, for anything else, and with a `low` for less and for what is beyond 63 bits, so that
    it fits where numbers are counted.
    """
    number = _whole(value)
    if number is None or (low is not None and number < low):
        raise InputError(f"{name}={value!r:.80}: give a whole number" + ("" if low is None else f", {low} or more"))
    if low is not None and number.bit_length() > 63:
        raise InputError(f"{name} is a number of {number.bit_length()} bits: give one of 63 bits at most")
    return number


def _whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def parse_number(value: float, name: str, *, zero: bool = False) -> float:
    """`value`, a finite number above 0, or with `zero` also 0. Raises `InputError` for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and (0 < value < float("inf") or (zero and value == 0))):
        raise InputError(f"{name}={value!r}: give a number {'of 0 or more' if zero else 'above 0'}")
    return value


def parse_rate(value: float | int | str, name: str = "rate") -> float:
    """Bytes per second in `value`: a number, or a string such as `"60MB/s"`. Raises `InputError` for anything else."""
    per_second = isinstance(value, str) and value.rstrip().endswith("/s")
    rate: Any = parse_size(str(value).rstrip()[:-2], name) if per_second else value
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < float("inf"):
        raise unit_format(f"{name}={value!r} is no rate: give bytes per second above 0, or a string such as '60MB/s'")
    return float(rate)


def parse_seconds(value: str, name: str = "time") -> float:
    """Seconds in `value`, a number with its unit (ns, us, ms, s, min or h): `"80ms"`, `"0.08s"`, `"15us"`, `"2 min"`.

    Raises `InputError` for a number without a unit, an unknown unit, a negative time, or anything else.
    """
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    unit = re.sub("[\u00b5\u03bc]", "u", match[2]) if match else ""
    if match is None or unit not in _SECONDS:
        raise unit_format(
            f"{name}={value!r} {'has no unit' if match and not unit else 'is no time'}: give a number with its unit, "
            f"such as '80ms', '0.08s' or '15us'; units: {', '.join(_SECONDS)}"
        )
    return float(match[1]) * _SECONDS[unit]


def format_seconds(seconds: float) -> str:
    """`seconds` for people, three digits: `"80 ms"`, `"1.25 s"`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * factor:
            return f"{seconds / factor:,.0f} {unit}" if seconds >= 999.5 * factor else f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def format_size(size: float) -> str:
    """`size` bytes for people, 1024-based: `"1.5 GiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
