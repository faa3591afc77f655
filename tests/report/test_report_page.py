"""A report as a page, without a browser: what stands in it, and that nothing in it is obeyed."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from typing import Any

import pytest

from report_examples import Page, measured, report
from stallfree.errors import InputError, MissingExtraError
from stallfree.report import report_page
from stallfree.report.document import embedded


def test_the_json_is_in_the_page() -> None:
    page = Page(report_page(report()))
    assert json.loads(page.texts["data"]) == report()
    assert ("script", {"type": "application/json", "id": "data"}) in page.elements


def test_the_numbers_are_those_of_the_json() -> None:
    page, data = Page(report_page(report())), report()
    shares, rates, cache, cpus, storage = page.tables
    assert shares[0][1:] == ["cold", "warm"]
    parts = ("compute", "copy", "prep_stall", "fetch_stall")
    for part, row in zip(parts, shares[1:], strict=True):
        assert [float(cell.strip("%")) / 100 for cell in row[1:]] == [
            pytest.approx(data["shares"][run][part], abs=0.005) for run in ("cold", "warm")
        ]
    for name, row in zip("GPSCF", rates[1:], strict=True):
        rate = data["rates"][name]
        assert row[0].startswith(name)
        if rate["value"] is None:
            assert row[1:] == ["not measured", "", ""]
        else:
            shown = [figure(row[1]), *map(figure, row[2].split(" to ")), int(row[3])]
            assert shown == [pytest.approx(rate[key], abs=0.5) for key in ("value", "low", "high", "repeats")]
    for name, shown, lines in (
        ("cache", cache, ("throughput", "F", "P", "G")),
        ("cpus", cpus, ("throughput",)),
        ("storage", storage, ("throughput",)),
    ):
        curve = data["curves"][name]
        assert shown[0][1:] == list(lines)
        assert len(shown) == 1 + len(curve["x"])
        for index, row in enumerate(shown[1:]):
            assert [figure(cell) for cell in row[1:]] == [pytest.approx(curve[line][index], abs=0.5) for line in lines]
    for said in ("best: 62%", "now: 2", "now: 19.1 MB/s", data["bottleneck"], "2.69 times", *data["notes"]):
        assert said in page.text
    assert "the samples are larger than the memory" in page.text


def figure(text: str) -> float:
    return float(text.replace(",", ""))


def test_every_word_is_escaped() -> None:
    harm = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;"
    data = everywhere(harm)
    page = Page(report_page(data))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in Page(report_page(everywhere("x"))).elements]
    assert json.loads(page.texts["data"]) == data
    assert harm in page.text


def everywhere(word: str) -> dict[str, Any]:
    """A report with `word` at the end of every string."""

    def add(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: add(item) for key, item in value.items()}
        if isinstance(value, list):
            return [add(item) for item in value]
        return value + word if isinstance(value, str) else value

    return {key: value if key == "format" else add(value) for key, value in report().items()}


def test_no_parser_of_html_sees_a_tag_in_the_json() -> None:
    data = {"format": "x", "words": ["</script >", "<!--<script ", "]]>", "&lt;", "\u2028", "é"]}
    text = embedded(data)
    assert not set("<>&") & set(text)
    assert json.loads(text) == data


def test_the_page_asks_for_nothing() -> None:
    page = Page(report_page(report()))
    links = [found for found in page.with_attributes() if found[1] in ("src", "href", "srcset", "action", "data")]
    assert links == [("link", "href", "data:,")]
    policy = next(attributes for tag, attributes in page.elements if attributes.get("http-equiv"))
    assert policy["content"] is not None
    assert policy["content"].startswith("default-src 'none'; ")


def test_structure_for_those_who_do_not_see_it() -> None:
    page = Page(report_page(report()))
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(headings))
    charts = [attributes for tag, attributes in page.elements if attributes.get("class") == "chart"]
    assert [chart["id"] for chart in charts] == ["chart-epoch", "chart-cache", "chart-cpus", "chart-storage"]
    assert all(chart["role"] == "img" and len(chart["aria-label"] or "") > 40 for chart in charts)
    assert "fetch stall 62%" in (charts[0]["aria-label"] or "")
    tags = [tag for tag, _ in page.elements]
    assert tags.count("table") == tags.count("caption") == len(page.tables)
    assert ("html", {"lang": "en"}) in page.elements
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_nothing_measured() -> None:
    data = report()
    for group in ("rates", "runs"):
        data[group] = {name: measured(None, f"no {name}") for name in data[group]}
    data.update(advice=[], notes=[], shares={"cold": None, "warm": None})
    empty = {
        "x": [0.0, 1.0],
        "throughput": [None, None],
        "F": [None] * 2,
        "P": [None] * 2,
        "G": [None] * 2,
        "best": None,
    }
    data["curves"] = {"cache": empty, "cpus": None, "storage": {"x": [], "throughput": [], "now": None}}
    page = Page(report_page(data))
    for name in data["curves"]:
        assert page.texts[f"curve-{name}"].endswith("not measured")
        assert f"chart-{name}" not in page.texts
    for name in (*"GPSCF", "cold", "warm"):
        assert f"no {name}" in page.text
    assert {cell for row in page.tables[0][1:] for cell in row[1:]} == {"not measured"}
    assert "no change that was looked at" in page.text


def test_gaps_in_a_curve() -> None:
    data = report()
    data["curves"]["cache"]["F"][0] = None
    data["curves"]["cache"]["best"] = None
    page = Page(report_page(data))
    assert page.tables[2][1] == ["0%", "312", "not measured", "811", "1,234"]
    assert "best:" not in page.texts["curve-cache"]


def test_a_number_that_is_none() -> None:
    with pytest.raises(InputError, match=r"holds a number that is none .*give null"):
        embedded(report() | {"notes": [float("inf")]})


def test_another_format() -> None:
    with pytest.raises(InputError, match="no stallfree-report"):
        report_page({"format": "stallfree-simulation", "version": 1})
    with pytest.raises(InputError, match="lacks bottleneck"):
        report_page({key: value for key, value in report().items() if key != "bottleneck"})


def test_without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError, match=r"stallfree\[report\]"):
        report_page(report())
