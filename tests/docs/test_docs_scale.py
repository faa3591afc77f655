"""The tables of the page on growth follow from the measured constants."""

from __future__ import annotations

from benchmarks import scale


def test_the_tables_are_those_of_the_results() -> None:
    text = scale.SITE.read_text(encoding="utf-8")
    assert scale.page(text, scale.measured()) == text, "run: python -m benchmarks.scale"
