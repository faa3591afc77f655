"""Figures as people read them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree.errors import InputError
from stallfree.report.figures import expect, gain, number, percent, plural, rate, speed, spread


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (0.854, "0.85"),
        (9.99, "9.99"),
        (9.996, "10.0"),
        (20.07, "20.1"),
        (99.94, "99.9"),
        (99.96, "100"),
        (12_345.6, "12,346"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@given(st.floats(0.01, 1e9))
def test_a_number_reads_back_within_half_a_percent(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=0.005, abs=0.005 + 1e-9)


def test_a_narrow_interval_shows_its_ends() -> None:
    narrow = {"value": 22.207, "low": 22.185, "high": 22.228, "repeats": 30, "note": ""}
    assert (rate(narrow), spread(narrow)) == ("22.21", "22.18 to 22.23")
    point = {"value": 22.207, "low": 22.207, "high": 22.207, "repeats": 1, "note": ""}
    assert (rate(point), spread(point)) == ("22.2", "22.2 to 22.2")


def test_what_was_not_measured() -> None:
    missing = {"value": None, "low": None, "high": None, "repeats": 0, "note": "no device"}
    assert (rate(missing), spread(missing)) == ("not measured", "")


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0%"), (0.004, "0.4%"), (0.0099, "1.0%"), (0.01, "1%"), (0.385, "38%"), (1, "100%")]
)
def test_shares(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(5, "5 B/s"), (19_062_500.0, "19.1 MB/s"), (530e6, "530 MB/s"), (3.2e9, "3.2 GB/s"), (4e12, "4,000 GB/s")],
)
def test_speeds(value: float, text: str) -> None:
    assert speed(value) == text


def test_words() -> None:
    assert (plural(1, "CPU"), plural(3670, "sample"), gain(1.416)) == ("1 CPU", "3,670 samples", "1.42 times")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "its format is 'NoneType'"),
        ([], "its format is 'list'"),
        ({}, "its format is None"),
        ({"format": "stallfree-trace", "version": 1}, "its format is 'stallfree-trace'"),
        ({"format": "stallfree-report"}, "of version None"),
        ({"format": "stallfree-report", "version": 2}, "of version 2, and version 1 can be read"),
        ({"format": "stallfree-report", "version": 1, "a": 1}, "lacks b, c"),
    ],
)
def test_what_is_no_report(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        expect(data, "stallfree-report", "abc")
