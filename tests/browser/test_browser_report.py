"""The page of a report in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from report_examples import report
from stallfree.analysis.report import report_page

if TYPE_CHECKING:
    from conftest import Open, Opened

pytest.importorskip("plotly", reason="needs plotly: pip install 'stallfree[report]'")


def traces(opened: Opened, chart: str) -> dict[str, Any]:
    """What a chart has drawn, by the name of the line."""
    drawn = opened.page.evaluate(f"document.getElementById('{chart}').data.map(({{name, x, y}}) => ({{name, x, y}}))")
    return {trace["name"]: trace for trace in drawn}


@pytest.fixture
def page(open_page: Open) -> Opened:
    """The page of most tests, on a desktop and in light colours."""
    return open_page(report_page(report()))


@pytest.mark.parametrize(("width", "scheme", "word"), [(1280, "light", "x"), (375, "dark", "x" * 300)])
def test_it_fits(open_page: Open, width: int, scheme: str, word: str) -> None:
    """Nothing is wider than the window, and all charts can be seen."""
    data = report()
    data["job"]["dataset"] = data["notes"][0] = data["bottleneck"] = data["advice"][0]["do"] = word
    opened = open_page(report_page(data), width, scheme)
    assert opened.page.locator(".main-svg").count() >= 2, "all charts are drawn"
    assert opened.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    for chart in ("#chart-epoch", "#chart-cache"):
        box = opened.box(chart)
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width
        assert box["width"] > 250


def test_the_charts_are_the_json(page: Opened) -> None:
    opened, data = page, report()
    epoch = traces(opened, "chart-epoch")
    for part in ("compute", "copy", "prep_stall", "fetch_stall"):
        bar = epoch[part.replace("_", " ")]
        drawn = dict(zip(bar["y"], bar["x"], strict=True))
        assert drawn == {run: data["shares"][run][part] for run in ("cold", "warm")}
    drawn_lines = traces(opened, "chart-cache")
    assert set(drawn_lines) == {"throughput", "F", "P", "G"}
    for line, values in drawn_lines.items():
        assert values["x"] == data["curve"]["x"]
        assert values["y"] == data["curve"][line]
    shapes = opened.page.evaluate("document.getElementById('chart-cache').layout.shapes.map((shape) => shape.x0)")
    best = data["curve"]["best"]
    assert shapes == [best]
    assert f"best: {best:.0%}" in opened.text("#chart-cache")


def test_words_stand_out(page: Opened) -> None:
    """At least 4.5 to 1 between words and ground, and between the words in a bar and the bar."""
    bars = ("compute", "copy", "prep", "fetch", "load", "gather")
    for scheme in ("dark", "light"):
        page.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        names = ("ground", "card", "ink", "soft", "accent", "on", *bars)
        colours = {name: page.page.evaluate(f"colour('{name}')") for name in names}
        for word in ("ink", "soft", "accent"):
            assert min(contrast(colours[word], colours[ground]) for ground in ("ground", "card")) >= 4.5, word
        for bar in bars:
            assert contrast(colours["on"], colours[bar]) >= 4.5, bar
            assert contrast(colours["card"], colours[bar]) >= 3, bar


def contrast(one: str, other: str) -> float:
    """The ratio of luminances that accessibility guidelines ask for."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)
