"""The pages of a report and of a simulation in a headless Chromium, compared with their JSON, instant by instant.

Without a Chromium, or without playwright, they are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from report_examples import recording, report, simulation, worked_out
from stallfree.analysis.report import report_page
from stallfree.analysis.simulate import Event, run_data, simulation_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("plotly", reason="needs plotly: pip install 'stallfree[report]'")

PATIENCE = 120_000  # milliseconds that playwright waits for what must come, however busy the machine is
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """In place of the check after each test: a browser keeps and starts processes as it likes. `browser` checks."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a file. When it is closed, none of its processes is left."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("needs a Chromium: make test-browser, or apt install chromium")
    before = set(psutil.Process().children(recursive=True))
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=ARGUMENTS, timeout=PATIENCE)
        yield browser
        browser.close()
    left = [process for process in psutil.Process().children(recursive=True) if process not in before]
    assert not psutil.wait_procs(left, timeout=30)[1]


@dataclass
class Opened:
    """A page of playwright, its address, and what it did that it should not do: errors, warnings, and requests."""

    page: Page
    address: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        """The text of the one element that is meant."""
        return self.page.locator(selector).inner_text()

    def box(self, selector: str) -> Any:
        """The box of the one element that is meant: x, y, width, height."""
        box = self.page.locator(selector).bounding_box()
        assert box is not None
        return box

    def until(self, condition: str) -> None:
        """Return as soon as the page is drawn and this JavaScript is true."""
        look = f"() => ({condition}) ? done() : requestAnimationFrame(look)"
        self.page.evaluate(f"new Promise((done) => {{ const look = {look}; look(); }})")


Open = Callable[..., Opened]


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens pages from files. At the end of the test they have had no error and asked for nothing but the file."""
    opened: list[Opened] = []

    def open_(html: str, width: int = 1280, scheme: str = "light") -> Opened:
        path = tmp_path / f"page-{len(opened)}.html"
        path.write_text(html, encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
        page.set_default_timeout(PATIENCE)
        made = Opened(page, path.as_uri())
        opened.append(made)
        page.on("console", lambda message: made.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: made.complaints.append(str(error)))
        page.on("requestfailed", lambda request: made.complaints.append(f"failed: {request.url}"))
        page.on("dialog", lambda dialog: (made.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: made.requests.append(request.url))
        page.goto(made.address)
        return made

    yield open_
    for made in opened:
        made.page.close()
        assert (made.complaints, made.requests) == ([], [made.address])


def now(opened: Opened) -> float:
    return float(opened.page.locator("#time").get_attribute("data-seconds") or "nan")


def seek(opened: Opened, place: int) -> None:
    """Move the slider to so many thousandths."""
    opened.page.locator("#slider").fill(str(place))


def trained(opened: Opened) -> list[int]:
    return [int(text) for text in opened.page.locator(".count").all_inner_texts()]


def doing(opened: Opened) -> dict[str, str]:
    """What the boxes say, by actor."""
    boxes = {box.get_attribute("data-actor") or "": box for box in opened.page.locator("#loaders .box").all()}
    named = boxes | {name: opened.page.locator(f"#{name}") for name in ("copy", "device")}
    return {name: box.locator(".holds").inner_text() for name, box in named.items() if box.is_visible()}


def queued(opened: Opened) -> list[str]:
    return [text for text in opened.page.locator("#queue li").all_inner_texts() if text]


@pytest.fixture
def page(open_page: Open) -> Opened:
    """The page of most tests, on a desktop and in light colours, at the beginning."""
    return open_page(simulation_page(simulation()))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark")])
def test_it_fits(open_page: Open, width: int, scheme: str) -> None:
    """Nothing is wider than the window, the chart is beside the boxes if there is room, the cursor is on its axis."""
    opened = open_page(simulation_page(simulation()), width, scheme)
    lines = []
    for place in (0, 500, 1000):
        seek(opened, place)
        assert opened.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        cursor = opened.box("#cursor")
        lines.append(cursor["x"] + cursor["width"] / 2)
    boxes, gantt = opened.box("#loaders"), opened.box("#gantt")
    beside = gantt["x"] >= boxes["x"] + boxes["width"]
    below = gantt["y"] >= boxes["y"] + boxes["height"]
    assert (beside, below) == ((True, False) if width > 800 else (False, True))
    assert lines[1] - lines[0] == pytest.approx(lines[2] - lines[1], abs=1)
    grid = opened.page.evaluate("document.querySelector('#gantt .nsewdrag').getBoundingClientRect().toJSON()")
    assert [lines[0], lines[2]] == [pytest.approx(grid[edge], abs=2) for edge in ("left", "right")]


def test_play_and_pause(page: Opened) -> None:
    assert now(page) == 0
    assert page.page.locator("#pause").is_disabled()
    page.page.locator("#speed").select_option("60")
    page.page.locator("#play").click()
    page.until("Number(document.getElementById('time').dataset.seconds) > 0")
    assert page.page.locator("#play").is_disabled()
    page.page.locator("#pause").click()
    stopped = now(page)
    assert 0 < stopped < 0.3
    page.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
    assert now(page) == stopped
    assert page.page.locator("#slider").input_value() == str(round(1000 * stopped / 0.3))
    page.page.locator("#play").click()
    page.until(f"Number(document.getElementById('time').dataset.seconds) > {stopped}")


def test_step_goes_from_event_to_event(page: Opened) -> None:
    events = worked_out(prefetch=True)
    instants = sorted({0.0, 0.3} | {at for event in events for at in (event.start, event.end) if at <= 0.3})
    seen = [now(page)]
    for _ in instants[1:]:
        page.page.locator("#step").click()
        seen.append(now(page))
    assert seen == instants
    page.page.locator("#step").click()
    assert now(page) == 0.3, "there is nothing after the end"
    page.page.locator("#back").click()
    assert now(page) == instants[-2]
    seek(page, 333)
    assert now(page) == pytest.approx(0.0999)
    page.page.locator("#slider").press("ArrowRight")
    assert now(page) == pytest.approx(0.1002)
    assert page.text("#time").startswith("0.1002 s of 0.3000 s")


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_boxes_at_every_instant(page: Opened, prefetch: bool) -> None:
    page.page.locator(f"input[name=run][value='{int(prefetch)}']").check()
    events = worked_out(prefetch)
    by = {(event.what, event.batch): event for event in events}
    assert gantt(page) == {
        (e.actor, e.what, str(e.batch), round(1000 * e.start), round(1000 * e.end)) for e in events if e.start < 0.3
    }
    for place in range(0, 1001, 37):
        seek(page, place)
        at = 0.3 * place / 1000
        assert trained(page)[prefetch] == sum(e.what == "compute" and e.end <= at for e in events)
        working = {e.actor: f"{e.what} {e.batch}" for e in events if e.start <= at < e.end}
        ready = [e.batch for e in events if e.what == "load" and e.end <= at]
        waiting = [batch for batch in ready if ("copy", batch) not in by or by["copy", batch].start > at]
        assert queued(page) == ([str(waiting[0])] if waiting else []), "the queue has one place"
        held = {by["load", batch].actor: f"waits with {batch}" for batch in waiting[1:]}
        idle = dict.fromkeys(("loader 0", "loader 1", "copy", "device"), "idle")
        assert doing(page) == idle | held | working
        copied = [e.batch for e in events if e.what == "copy" and e.end <= at]
        staged = [str(batch) for batch in copied if ("compute", batch) not in by or by["compute", batch].start > at]
        assert page.text("#waiting") == (f"On the device, next: {', '.join(staged)}" if staged else "")


def gantt(opened: Opened) -> set[tuple[str, str, str, int, int]]:
    """The bars: who, what, which batch, from, to, in milliseconds."""
    bars: list[list[Any]] = opened.page.evaluate(
        """() => {
            const chart = document.getElementById("gantt");
            const names = chart.layout.yaxis.ticktext;
            return chart.data.flatMap((trace) => trace.x.map((length, bar) =>
                [names[Math.round(trace.y[bar])], trace.name, trace.text[bar],
                 trace.base[bar], trace.base[bar] + length]));
        }"""
    )
    return {(who, what, batch, round(1000 * start), round(1000 * end)) for who, what, batch, start, end in bars}


def recorded(**changes: Any) -> dict[str, Any]:
    """What a page of the recorded run shows."""
    return simulation() | {"runs": [run_data("run.jsonl", recording(), **changes)], "shown": 0, "comparison": None}


def test_a_recorded_run(open_page: Open) -> None:
    opened = open_page(simulation_page(recorded()))
    assert not opened.page.locator("#copy-part").is_visible()
    assert gantt(opened) == {
        (e.actor, e.what, f"{e.epoch}/{e.batch}", round(1000 * e.start) - 5000, round(1000 * e.end) - 5000)
        for e in recording()
    }
    seek(opened, 200)  # 50 ms: two fetches beside a prep
    assert doing(opened) == {
        "gather": "idle", "loader 0": "prep 1/0, fetch 1/2, fetch 1/3", "loader 10": "fetch 1/1", "device": "idle",
    }  # fmt: skip
    assert queued(opened) == ["–"], "a batch that is fetched and not prepared is not ready"
    cut = open_page(simulation_page(recorded(seconds=0.095)))
    seek(cut, 1000)
    assert trained(cut) == [0]
    assert queued(cut) == ["–"], "nor is it if the log ends before that"
    seek(opened, 650)  # 162.5 ms
    assert queued(opened) == ["2/0"]
    assert trained(opened) == [2]
    seek(opened, 1000)
    assert trained(opened) == [5]


def test_a_long_run_is_shown_page_by_page(open_page: Open) -> None:
    events = [Event(float(n), n + 1.0, "device", "compute", n) for n in range(400)]
    data = simulation() | {"runs": [run_data("long", events)], "shown": 0, "comparison": None}
    opened = open_page(simulation_page(data))
    shown: set[int] = set()
    for place in range(0, 1001, 50):
        seek(opened, place)
        bars = gantt(opened)
        assert len(bars) <= 42
        shown |= {int(bar[2]) for bar in bars}
        left, right = opened.page.evaluate("document.getElementById('gantt').layout.xaxis.range")
        assert left - 1e-9 <= now(opened) <= right + 1e-9
    assert shown == set(range(400))


def traces(opened: Opened, chart: str) -> dict[str, Any]:
    """What a chart has drawn, by the name of the line."""
    drawn = opened.page.evaluate(f"document.getElementById('{chart}').data.map(({{name, x, y}}) => ({{name, x, y}}))")
    return {trace["name"]: trace for trace in drawn}


@pytest.mark.parametrize(("width", "scheme", "word"), [(1280, "light", "x"), (375, "dark", "x" * 300)])
def test_a_report_fits(open_page: Open, width: int, scheme: str, word: str) -> None:
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


def test_the_charts_are_the_json(open_page: Open) -> None:
    data = report()
    opened = open_page(report_page(data))
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
    """The ratio of luminances that accessibility guidelines ask for, between words, bars and ground."""
    bars = ("compute", "copy", "prep", "fetch", "load", "gather")
    for scheme in ("dark", "light"):
        page.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        names = ("ground", "card", "ink", "soft", "accent", "on", *bars)
        light = {name: luminance(page.page.evaluate(f"colour('{name}')")) for name in names}
        pairs = [(word, ground, 4.5) for word in ("ink", "soft", "accent") for ground in ("ground", "card")]
        for one, other, least in [*pairs, *(("on", bar, 4.5) for bar in bars), *(("card", bar, 3) for bar in bars)]:
            darker, lighter = sorted((light[one], light[other]))
            assert (lighter + 0.05) / (darker + 0.05) >= least, (one, other)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
