"""The benchmark pages are made from the results, and the figures in their sentences are those of the results."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from benchmarks import harness
from benchmarks.run import NAMED, NAMES

FOLDER = harness.PAGES
QUESTIONS = sorted(page for page in FOLDER.glob("*.md") if page.name not in ("index.md", "method.md", "missed.md"))


def test_generated_pages_and_charts_equal_the_results() -> None:
    found = harness.pages(NAMES + NAMED)
    stale = [path.name for path, text in found.items() if not path.exists() or path.read_text() != text]
    there = {*FOLDER.glob("results/*"), *FOLDER.glob("charts/*")}

    assert not stale, f"run benchmarks/run.py --page; stale: {stale}"
    assert there == {path for path in found if path.parent != FOLDER}


def test_each_result_is_linked_from_a_page_or_the_overview() -> None:
    linked = set(re.findall(r"\(results/(\w+)\.md\)", "".join(page.read_text() for page in FOLDER.glob("*.md"))))

    assert linked >= {path.stem for path in FOLDER.glob("results/*.md")}


@pytest.mark.parametrize("page", QUESTIONS, ids=lambda page: page.stem)
def test_a_page_opens_with_a_chart_and_its_figures_are_in_its_results(page: Path) -> None:
    text = page.read_text()
    blocks = text.split("\n\n")
    sentences = re.sub(r"\[[^]]*\]\([^)]*\)|`[^`]*`", "", blocks[2])
    results = "\n".join((FOLDER / link).read_text() for link in re.findall(r"\((results/\w+\.md)\)", text))
    figures = re.findall(r"(?<![\w.])\d[\d,]*\.\d+|\d{1,3}(?:,\d{3})+", sentences)

    assert blocks[1].startswith("![")
    assert results
    assert [figure for figure in figures if figure not in results] == []


@pytest.mark.parametrize("chart", sorted(FOLDER.glob("charts/*.svg")), ids=lambda chart: chart.stem)
def test_nothing_in_a_chart_lies_outside_of_it(chart: Path) -> None:
    root = ET.parse(chart).getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        at = element.attrib
        if element.tag.endswith("rect"):
            assert 0 <= float(at["x"]) <= width - float(at["width"])
            assert 0 <= float(at["y"]) <= height - float(at["height"])
        if element.tag.endswith("text"):
            words = 6.6 * len(element.text or "")  # of an average character at 13 px
            left = float(at["x"]) - {"end": words, "mid": words / 2}.get(at["class"], 0.0)
            assert -1 <= left <= width + 1 - words, element.text
            assert 0 <= float(at["y"]) <= height
