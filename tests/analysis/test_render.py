"""Reports and simulations as text and as pages, without a browser."""

import json
import random
import re
import sys
from typing import Any

import pytest

from report_examples import NAME, Page, recording, report, simulation
from stallfree import Report
from stallfree.analysis.render import interval, number, percent, plural, speed
from stallfree.analysis.report import report_page
from stallfree.analysis.simulate import MOST_EVENTS, Event, run_data, simulation_page
from stallfree.errors import MissingExtraError

HARM = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;"


def test_figures() -> None:
    figures = {0: "0.00", 0.854: "0.85", 9.996: "10.0", 99.94: "99.9", 99.96: "100", 12_345.6: "12,346"}
    assert {value: number(value) for value in figures} == figures
    assert (interval(22.18, 104), interval(None, None)) == ("22.2 to 104", "")
    assert [percent(share) for share in (0, 0.004, 0.01, 0.385, 1)] == ["0%", "0.4%", "1%", "38%", "100%"]
    assert [speed(value) for value in (25e4, 530e6, 2e9)] == ["0.25 MB/s", "530 MB/s", "2,000 MB/s"]
    assert (plural(1, "sample"), plural(3670, "sample")) == ("1 sample", "3,670 samples")


def everywhere(value: Any, word: str) -> Any:
    """A value with `word` at the end of every string."""
    if isinstance(value, dict):
        return {key: item if key == "format" else everywhere(item, word) for key, item in value.items()}
    if isinstance(value, list):
        return [everywhere(item, word) for item in value]
    return value + word if isinstance(value, str) else value


@pytest.mark.parametrize(("page_of", "example"), [(report_page, report), (simulation_page, simulation)])
def test_a_page_escapes_data_and_asks_for_nothing(page_of: Any, example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = everywhere(example(), HARM)
    page = Page(page_of(data))
    links = [found for found in page.with_attributes() if found[1] in ("src", "href", "srcset", "action", "data")]
    assert links == [("link", "href", "data:,")]
    policy = next(attributes for tag, attributes in page.elements if attributes.get("http-equiv"))
    assert str(policy["content"]).startswith("default-src 'none'; ")
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in Page(page_of(everywhere(example(), "x"))).elements]
    assert json.loads(page.texts["data"]) == data
    assert HARM in page.text
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError, match=r"stallfree\[report\]"):
        page_of(example())


def test_everything_is_said_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says, and a terminal obeys nothing in it."""
    data = report()
    text = str(Report(data))
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    for said in (NAME, data["bottleneck"], *data["notes"], *(item["do"] for item in data["advice"])):
        assert " ".join(said.split()) in flat
    assert flat.startswith(data["bottleneck"])
    assert re.search(r"G: training on ready batches +1,234 +1,222 to 1,247\n", text)
    first, second, *_ = data["advice"]
    assert f"1. {first['do']} ({first['gain']:.2f} times, {first['throughput']:,.0f} samples/s)" in flat
    assert f"2. {second['do']}" in flat
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    assert str(Report(data)) == text
    data["job"]["dataset"] = data["notes"][0] = "a\x1b[31mb\rc\x07 [bold]d[/bold] :smile: \x1b]0;title\x07"
    text = str(Report(data))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert text.count("[bold]d[/bold] :smile:") == 2


def test_the_table_of_a_simulation_is_its_comparison() -> None:
    page = Page(simulation_page(simulation()))
    assert ["first 0.3 s: single seeds", "4", "3 to 5"] in page.tables[0]
    assert "Prefetch gains nothing here: add loaders (3 would keep the device busy)." in page.text
    for shown in (0, 1):
        page = Page(simulation_page(simulation() | {"shown": shown}))
        choices = [attributes for _, attributes in page.elements if attributes.get("name") == "run"]
        assert ["checked" in choice for choice in choices] == [shown == 0, shown == 1]


def test_a_run_is_its_events_from_the_first_on() -> None:
    events = recording()
    random.Random(0).shuffle(events)
    run = run_data("log", events)
    assert (run["seconds"], run["left_out"]) == (pytest.approx(0.25), 0)
    for row, e in zip(run["events"], sorted(recording(), key=lambda e: (e.start, e.end)), strict=True):
        assert row == [pytest.approx(e.start - 5.0), pytest.approx(e.end - 5.0), e.actor, e.what, e.batch, e.epoch]
    part = run_data("log", recording(), seconds=0.095)
    assert len(part["events"]) == sum(event.start < 5.095 for event in recording()) == 6
    assert max(row[1] for row in part["events"]) > 0.1, "what began is shown to its end"
    # a long log is cut where it is still complete
    events = [Event(float(n), n + 1.0, "device", "compute", n) for n in range(MOST_EVENTS + 25)]
    run = run_data("log", events)
    assert (len(run["events"]), run["left_out"], run["seconds"]) == (MOST_EVENTS, 25, float(MOST_EVENTS))
    page = Page(simulation_page(simulation() | {"runs": [run], "shown": 0, "comparison": None}))
    assert "25 later events are not shown" in page.text
