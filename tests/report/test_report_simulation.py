"""The data and the page of a pipeline at work, without a browser."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from report_examples import Page, recording, simulation, worked_out
from stallfree.errors import InputError
from stallfree.events import Event
from stallfree.report import run_data, simulation_page
from stallfree.report.simulation import MOST_EVENTS


def test_a_run_is_its_events_from_the_first_on() -> None:
    events = recording()
    random.Random(0).shuffle(events)
    run = run_data("log", events)
    assert (run["seconds"], run["left_out"]) == (pytest.approx(0.25), 0)
    assert (run["queue"], run["depth"]) == (None, None)
    expected = sorted(recording(), key=lambda event: (event.start, event.end))
    assert [tuple(row[2:]) for row in run["events"]] == [(e.actor, e.what, e.batch, e.epoch) for e in expected]
    assert [row[:2] for row in run["events"]] == [
        [pytest.approx(e.start - 5.0), pytest.approx(e.end - 5.0)] for e in expected
    ]


def test_a_part_of_a_run() -> None:
    run = run_data("log", recording(), seconds=0.095)
    assert run["seconds"] == 0.095
    assert len(run["events"]) == sum(event.start < 5.095 for event in recording()) == 6
    assert max(row[1] for row in run["events"]) > 0.1, "what began is shown to its end"


def test_a_long_log_is_cut_where_it_is_still_whole() -> None:
    events = [Event(float(n), n + 1.0, "device", "compute", n) for n in range(MOST_EVENTS + 25)]
    run = run_data("log", events)
    assert (len(run["events"]), run["left_out"], run["seconds"]) == (MOST_EVENTS, 25, float(MOST_EVENTS))
    page = Page(simulation_page(simulation() | {"runs": [run], "shown": 0, "comparison": None}))
    assert f"the first {MOST_EVENTS:,} events are shown, 25 later ones are not" in page.text


@pytest.mark.parametrize(
    ("events", "message"), [([], "there are no events"), ([Event(1.0, 1.0, "device", "compute", 0)], "at one instant")]
)
def test_no_run(events: list[Event], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_data("log", events)


def test_the_table_is_the_comparison() -> None:
    page = Page(simulation_page(simulation()))
    assert page.tables == [
        [
            ["", "without prefetch", "with prefetch"],
            ["first 0.3 s: mean of 30 seeds", "4.00 (3.90 to 4.10)", "4.50 (4.25 to 4.75)"],
            ["first 0.3 s: single seeds", "4", "3 to 5"],
            ["steady state, per second", "19.99 (19.97 to 20.00)", "20.0 (20.0 to 20.0)"],
            ["law, per second", "20.00", "20.0"],
        ]
    ]
    assert page.texts["advice"] == "Prefetch gains nothing here: add loaders (3 would keep the device busy)."
    assert "One run is one draw. Go by the steady state." in page.text


def test_the_run_that_is_shown_first() -> None:
    for shown in (0, 1):
        page = Page(simulation_page(simulation() | {"shown": shown}))
        choices = [attributes for _, attributes in page.elements if attributes.get("name") == "run"]
        assert [("checked" in choice, choice["value"]) for choice in choices] == [
            (shown == 0, "0"),
            (shown == 1, "1"),
        ]


def test_a_recording_has_no_comparison() -> None:
    data = simulation() | {"runs": [run_data("log", recording())], "shown": 0, "comparison": None}
    page = Page(simulation_page(data))
    assert page.tables == []
    assert "advice" not in page.texts


def test_every_word_is_escaped() -> None:
    harm = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;"
    data = simulation(harm)
    data["comparison"] |= {"advice": harm, "caution": harm}
    data["runs"][0] |= {"name": harm, "left_out": 1}
    data["runs"][0]["events"][0][2:4] = [harm, harm]
    clean = simulation()
    clean["runs"][0]["left_out"] = 1
    page = Page(simulation_page(data))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in Page(simulation_page(clean)).elements]
    assert json.loads(page.texts["data"]) == data


def test_controls_have_names() -> None:
    page = Page(simulation_page(simulation()))
    names = {"play": "Play", "pause": "Pause", "step": "Step", "back": "Step back"}
    assert {name: page.texts[name] for name in names} == names
    slider = next(attributes for _, attributes in page.elements if attributes.get("id") == "slider")
    assert slider["aria-label"] == "Time"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "of version 2"),
        ({"runs": []}, "shown=1 with 0 runs"),
        ({"shown": 2}, "shown=2 with 2 runs"),
        ({"format": "stallfree-report"}, "no stallfree-simulation"),
    ],
)
def test_bad_data(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulation_page(simulation() | change)


def test_the_example_is_what_a_simulation_gives() -> None:
    """The example of these tests was worked out by hand; with constant times the simulation says the same."""
    simulate = pytest.importorskip("stallfree.analysis.simulate")
    for prefetch in (False, True):
        pipeline = simulate.Pipeline(2, 0.1, 0.01, 0.04, prefetch, variation=0)
        run = simulate.simulate(pipeline, seconds=0.295)
        found = {
            (event.actor, event.batch): (round(1000 * event.start), round(1000 * event.end))
            for event in (*run.events, *run.unfinished)
        }
        for event in worked_out(prefetch):
            times = (round(1000 * event.start), round(1000 * event.end))
            assert found[event.actor, event.batch] == times
