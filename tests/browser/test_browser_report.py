"""The page of a report in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest

from report_examples import NAME, report
from stallfree.analysis.report import report_page

if TYPE_CHECKING:
    from conftest import Open, Opened

pytest.importorskip("plotly", reason="needs plotly: pip install 'stallfree[report]'")


def overflow(opened: Opened) -> int:
    """Pixels by which the page is wider than the window."""
    wide: int = opened.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return wide


def traces(opened: Opened, chart: str) -> dict[str, Any]:
    """What a chart has drawn, by the name of the line."""
    drawn = opened.page.evaluate(f"document.getElementById('{chart}').data.map(({{name, x, y}}) => ({{name, x, y}}))")
    return {trace["name"]: trace for trace in drawn}


@pytest.fixture(scope="module")
def common(open_for_all: Open) -> Opened:
    """The page of most tests, on a desktop and in light colours."""
    return open_for_all(report_page(report()))


@pytest.fixture
def page(common: Opened) -> Iterator[Opened]:
    """This page, which a test leaves as it was but for words that are unfolded."""
    yield common
    common.page.emulate_media(color_scheme="light")
    common.check()


def test_it_fits(page: Opened) -> None:
    check_fit(page, 1280)


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (375, "dark"),
        pytest.param(375, "light", marks=pytest.mark.slow),
        pytest.param(1280, "dark", marks=pytest.mark.slow),
    ],
)
def test_it_fits_elsewhere(open_page: Open, width: int, scheme: str) -> None:
    check_fit(open_page(report_page(report()), width, scheme), width)


def check_fit(opened: Opened, width: int) -> None:
    """Nothing is wider than the window, and all charts can be seen."""
    assert opened.page.locator(".main-svg").count() >= 2, "all charts are drawn"
    assert overflow(opened) <= 0
    for chart in opened.page.locator(".chart").all():
        box = chart.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["width"] > 250


def test_long_words_fit_a_phone(open_page: Open) -> None:
    data = report()
    data["job"]["dataset"] = data["notes"][0] = data["bottleneck"] = "x" * 300
    data["advice"][0]["do"] = "y" * 300
    assert overflow(open_page(report_page(data), 375)) <= 0


def test_the_charts_are_the_json(page: Opened) -> None:
    opened, data = page, report()
    epoch = traces(opened, "chart-epoch")
    for part, name in (
        ("compute", "compute"),
        ("copy", "copy"),
        ("prep_stall", "prep stall"),
        ("fetch_stall", "fetch stall"),
    ):
        drawn = dict(zip(epoch[name]["y"], epoch[name]["x"], strict=True))
        assert drawn == {run: data["shares"][run][part] for run in ("cold", "warm")}
    drawn_lines = traces(opened, "chart-cache")
    assert set(drawn_lines) == {"throughput", "F", "P", "G"}
    for line, values in drawn_lines.items():
        assert values["x"] == data["curve"]["x"]
        assert values["y"] == data["curve"][line]
    shapes = opened.page.evaluate("document.getElementById('chart-cache').layout.shapes.map((shape) => shape.x0)")
    assert shapes == [0.62]
    assert "best: 62%" in opened.text("#chart-cache")


def test_a_name_that_ends_a_script_is_a_name(page: Opened) -> None:
    assert NAME in page.text(".job")
    assert page.page.locator(".job b").count() == 0
    assert NAME in page.page.title()
    assert json.loads(page.page.locator("#data").text_content() or "") == report()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out(page: Opened, scheme: Literal["light", "dark"]) -> None:
    """At least 4.5 to 1 between words and ground, and between the words in a bar and the bar."""
    page.page.emulate_media(color_scheme=scheme)
    names = ("ground", "card", "ink", "soft", "accent", "on", "compute", "copy", "prep", "fetch", "load", "gather")
    hexes = {name: page.page.evaluate(f"colour('{name}')") for name in names}
    for ground in ("ground", "card"):
        for word in ("ink", "soft", "accent"):
            assert contrast(hexes[word], hexes[ground]) >= 4.5, (word, ground)
    for bar in ("compute", "copy", "prep", "fetch", "load", "gather"):
        assert contrast(hexes["on"], hexes[bar]) >= 4.5, bar
        assert contrast(hexes["card"], hexes[bar]) >= 3, bar


def contrast(one: str, other: str) -> float:
    """The ratio of luminances that accessibility guidelines ask for."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)
