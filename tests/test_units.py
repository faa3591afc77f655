"""Sizes, rates, times and whole numbers as people write them, the ends of processes in words, and statistics."""

import math
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree.errors import CapacityError, InputError
from stallfree.platform import how_it_ended
from stallfree.stats import LoaderStats
from stallfree.units import format_seconds, format_size, parse_rate, parse_seconds, parse_size, parse_whole

READ: list[tuple[Any, dict[Any, Any]]] = [
    (parse_size, {
        0: 0, 4096: 4096, "0": 0, "17": 17, "17B": 17, "1k": 1000, "1.5k": 1500, "500MB": 500_000_000,
        "4GiB": 4 << 30, "4gib": 4 << 30, " 4 GiB ": 4 << 30, "+2KiB": 2048, "0.5 MiB": 1 << 19,
        "2TB": 2 * 10**12, "1PiB": 1 << 50,
    }),
    (parse_rate, {1: 1.0, 2.5: 2.5, "60MB/s": 60e6, "60 MB/s ": 60e6, "1GiB/s": float(1 << 30), "5/s": 5.0}),
    (lambda text: round(parse_seconds(text), 12), {
        "80ms": 0.08, "0.08s": 0.08, "15us": 15e-6, "15 µs": 15e-6, "15 \u03bcs": 15e-6, "3ns": 3e-9, " 2 s ": 2.0,
        "1.5min": 90.0, "2h": 7200.0, "0s": 0.0,
    }),
    (lambda value: parse_whole(value, "epoch"), {-(1 << 80): -(1 << 80), -1: -1, np.int32(7): 7}),
    (format_size, {
        0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 64 << 20: "64.0 MiB", 3 << 29: "1.5 GiB",
        1 << 40: "1.0 TiB", 1 << 52: "4096.0 TiB",
    }),
    (format_seconds, {
        0: "0 s", 3e-9: "3 ns", 15e-6: "15 µs", 0.0009996: "1 ms", 0.08: "80 ms", 0.12345: "123 ms",
        0.9994: "999 ms", 0.9996: "1 s", 1.254: "1.25 s", 999.4: "999 s", 999.6: "1,000 s", 7200: "7,200 s",
    }),
    (how_it_ended, {
        None: "how it ended is not known", 0: "it exited with code 0", -40: "it was ended by signal 40",
        -9: "it was ended by SIGKILL, as the system does when memory is short", -15: "it was ended by SIGTERM",
    }),
]  # fmt: skip


@pytest.mark.parametrize(("read", "values"), READ)
def test_what_people_write_and_read(read: Any, values: dict[Any, Any]) -> None:
    assert {value: read(value) for value in values} == values


WRONG: list[tuple[Any, str, list[Any]]] = [
    (parse_size, r"limit=.* is no size.*'4GiB'", [
        True, 1.5, None, b"4", [], "", "GiB", "4 XB", "4 GiB/s", "four", "1e3", "0x10", "4,5GiB", "nan", "4Gi B",
    ]),
    (parse_size, r"limit=.* is negative", [-1, "-4GiB", "-0.001k"]),
    (parse_rate, "limit=", [True, None, "60MB", "60", "MB/s", "fast", "60MB/h", b"1/s", 0, "0/s", "-1MB/s", math.inf]),
    (parse_rate, "limit=", [math.nan]),
    (parse_seconds, r"limit='.*' has no unit: give a number with its unit, such as '80ms'", ["80", "0.08", " 1 "]),
    (parse_seconds, r"limit=.* is no time: .* units: ns, us, ms, s, min, h", [
        "", "ms", "-80ms", "+80ms", "80 m", "80MS", "80ms/s", "8e1ms", "nan", "infs", "1,5s", "1.s", 80, 0.08, b"1s",
        "9" * 400 + "h",
    ]),
    (lambda value, name: parse_whole(value, name, 0), r"limit is a number of \d+ bits: give one of 63", [1 << 63]),
    (lambda value, name: parse_whole(value, name, 1), "limit=0: give a whole number, 1 or more", [0]),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "message", "values"), WRONG)
def test_anything_else_is_one_clear_error(parse: Any, message: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(CapacityError if parse is parse_size else InputError, match=message) as caught:
            parse(value, "limit")
        assert repr(value) in str(caught.value) or parse not in (parse_size, parse_seconds) or len(value) > 20


def test_statistics_of_a_time_have_the_counts_of_that_time_and_the_states_of_now() -> None:
    names = [field.name for field in fields(LoaderStats)]
    counted = LoaderStats(*range(20, 20 + len(names))) - LoaderStats(*[2] * len(names))
    states = {"queue_depth", "staging_bytes", "num_workers"}
    assert asdict(counted) == {name: at + 20 - 2 * (name not in states) for at, name in enumerate(names)}


@given(st.integers(min_value=0, max_value=1 << 60), st.floats(min_value=1e-9, max_value=900))
def test_what_is_shown_reads_back_nearly_the_same(size: int, seconds: float) -> None:
    assert parse_size(f"{size}B") == size
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.06, abs=1)
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=0.005)
