"""The benchmark pages are made from the results."""

from __future__ import annotations

import re

from benchmarks import harness, scale
from benchmarks.run import NAMED, NAMES

FOLDER = harness.PAGES


def test_generated_pages_and_charts_equal_the_results_and_are_linked() -> None:
    made = harness.pages(NAMES + NAMED)
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
    assert not stale, f"run benchmarks/run.py --page; stale: {stale}"
    assert {*FOLDER.glob("results/*"), *FOLDER.glob("charts/*")} == {path for path in made if path.parent != FOLDER}
    linked = set(re.findall(r"\(results/(\w+)\.md\)", "".join(page.read_text() for page in FOLDER.glob("*.md"))))
    assert linked >= {path.stem for path in FOLDER.glob("results/*.md")}


def test_the_tables_of_growth_are_those_of_the_results() -> None:
    text = scale.SITE.read_text(encoding="utf-8")
    assert scale.page(text, scale.measured()) == text, "run: python -m benchmarks.scale"
