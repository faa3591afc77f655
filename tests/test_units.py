"""Sizes and rates as people write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree.errors import CapacityError, InputError, StallfreeError
from stallfree.units import format_seconds, format_size, parse_rate, parse_seconds, parse_size, parse_whole


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1k", 1000),
        ("1.5k", 1500),
        ("500MB", 500_000_000),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        (" 4 GiB ", 4 << 30),
        ("+2KiB", 2048),
        ("0.5 MiB", 1 << 19),
        ("2TB", 2 * 10**12),
        ("1PiB", 1 << 50),
    ],
)
def test_sizes(value: int | str, size: int) -> None:
    assert parse_size(value) == size


@pytest.mark.parametrize(
    "value",
    [True, False, 1.5, None, b"4", [], "", "GiB", "4 XB", "4 GiB/s", "four", "1e3", "0x10", "4,5GiB", "nan", "4Gi B"],
)
def test_what_is_no_size(value: Any) -> None:
    with pytest.raises(CapacityError, match=r"capacity=.* is no size.*'4GiB'") as caught:
        parse_size(value, "capacity")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [-1, "-4GiB", "-0.001k"])
def test_negative_sizes(value: int | str) -> None:
    with pytest.raises(CapacityError, match=r"capacity=.* is negative"):
        parse_size(value, "capacity")


def test_a_bad_size_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="no size") as caught:
        parse_size("lots")
    assert isinstance(caught.value, StallfreeError)


@pytest.mark.parametrize(
    ("value", "rate"),
    [(1, 1.0), (2.5, 2.5), ("60MB/s", 60e6), ("60 MB/s ", 60e6), ("1GiB/s", float(1 << 30)), ("5/s", 5.0)],
)
def test_rates(value: float | str, rate: float) -> None:
    assert parse_rate(value) == rate


@pytest.mark.parametrize("value", [True, None, "60MB", "60", "MB/s", "fast", "60MB/h", b"1/s"])
def test_what_is_no_rate(value: Any) -> None:
    with pytest.raises(InputError, match="bandwidth="):
        parse_rate(value, "bandwidth")


@pytest.mark.parametrize("value", [0, 0.0, -1, "0/s", "-1MB/s", float("inf"), float("nan")])
def test_rates_above_zero_and_finite(value: float | str) -> None:
    with pytest.raises(InputError, match="bandwidth="):
        parse_rate(value, "bandwidth")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 52, "4096.0 TiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(min_value=0, max_value=1 << 53))
def test_bytes_survive_the_way_through_text(size: int) -> None:
    assert parse_size(f"{size}B") == parse_size(size) == size


@given(st.integers(min_value=0, max_value=1 << 60))
def test_what_is_shown_reads_back_nearly_the_same(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.06, abs=1)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_clear_error(text: str) -> None:
    try:
        assert parse_size(text) >= 0
    except CapacityError as error:
        assert repr(text) in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("80ms", 0.08),
        ("0.08s", 0.08),
        ("15us", 15e-6),
        ("15 µs", 15e-6),
        ("15 \u03bcs", 15e-6),
        ("3ns", 3e-9),
        (" 2 s ", 2.0),
        ("1.5min", 90.0),
        ("2h", 7200.0),
        ("0s", 0.0),
    ],
)
def test_times(value: str, seconds: float) -> None:
    assert parse_seconds(value) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("value", ["80", "0.08", " 1 "])
def test_a_time_without_a_unit(value: str) -> None:
    with pytest.raises(InputError, match=r"--load='.*' has no unit: give a number with its unit, such as '80ms'"):
        parse_seconds(value, "--load")


@pytest.mark.parametrize(
    "value",
    ["", "ms", "-80ms", "+80ms", "80 m", "80MS", "80ms/s", "8e1ms", "nan", "infs", "1,5s", "1.s", 80, 0.08, b"1s"],
)
def test_what_is_no_time(value: Any) -> None:
    with pytest.raises(InputError, match=r"load=.* is no time: .* units: ns, us, ms, s, min, h") as caught:
        parse_seconds(value, "load")
    assert repr(value) in str(caught.value)


def test_an_endless_time() -> None:
    with pytest.raises(InputError, match="must be finite"):
        parse_seconds("9" * 400 + "h")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3e-9, "3 ns"),
        (15e-6, "15 µs"),
        (0.0009996, "1 ms"),
        (0.08, "80 ms"),
        (0.12345, "123 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.254, "1.25 s"),
        (999.4, "999 s"),
        (999.6, "1,000 s"),
        (7200, "7,200 s"),
    ],
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(min_value=1e-9, max_value=900))
def test_times_read_back_within_three_digits(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=0.005)


@pytest.mark.parametrize(("value", "low"), [(1 << 63, 0), (10**30, 1)])
def test_whole_numbers_beyond_what_is_counted(value: int, low: int) -> None:
    with pytest.raises(InputError, match=rf"epoch is a number of {value.bit_length()} bits: give one of 63"):
        parse_whole(value, "epoch", low)


@pytest.mark.parametrize(("value", "low"), [(-(1 << 80), None), (-1, None), ((1 << 63) - 1, 0), (np.int32(7), 7)])
def test_whole_numbers(value: Any, low: int | None) -> None:
    assert parse_whole(value, "epoch", low) == int(value)
