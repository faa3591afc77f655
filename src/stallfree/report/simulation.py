"""An animated page of a pipeline, from a simulation or the event log of a real loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stallfree.errors import InputError, file_unreadable
from stallfree.events import Event
from stallfree.report.document import asset, document, escape, table
from stallfree.report.figures import expect, number, plural

MOST_EVENTS = 20_000

_KEYS = ("title", "runs", "shown", "comparison")
_KINDS = ("without prefetch", "with prefetch")


def run_data(
    name: str,
    events: Iterable[Event],
    *,
    seconds: float | None = None,
    queue: int | None = None,
    depth: int | None = None,
) -> dict[str, Any]:
    """A run, in the format of `simulation_page`. Times are relative to the first event.

    Args:
        name: title of the run on the page.
        events: in any order. Only the first 20,000 by start time are kept; `left_out` counts the others.
        seconds: length of the shown part; up to the last kept end if None.
        queue: capacity of the queue in batches; None if unknown.
        depth: batches on the device in addition to the one in use; None if unknown.

    Raises `InputError` if there are no events, or if they take no time.
    """
    ordered = sorted(events, key=lambda event: (event.start, event.end))
    if not ordered:
        raise file_unreadable(f"{name}: there are no events: give a log of at least one batch")
    first = ordered[0].start
    if seconds is not None:
        ordered = [event for event in ordered if event.start - first < seconds]
    kept = ordered[:MOST_EVENTS]
    if len(ordered) > len(kept):
        seconds = ordered[len(kept)].start - first
    elif seconds is None:
        seconds = max(event.end for event in kept) - first
    if not seconds > 0:
        raise file_unreadable(f"{name}: all events are at one instant: give a log of something that took time")
    return {
        "name": name,
        "seconds": seconds,
        "queue": queue,
        "depth": depth,
        "left_out": len(ordered) - len(kept),
        "events": [
            [event.start - first, event.end - first, str(event.actor), str(event.what), event.batch, event.epoch]
            for event in kept
        ],
    }


def simulation_page(data: Mapping[str, Any]) -> str:
    """One or more runs as an animated page with a Gantt chart by plotly. The page makes no network requests.

    Args:
        data: the JSON of the page, which also holds it in its element "data":

            - "format": "stallfree-simulation"; "version": 1
            - "title": a line about the pipeline
            - "runs": the result of `run_data` for each: "name"; "seconds", the shown time; "queue" and "depth", places
              in the queue and on the device, or null; "left_out", events that are not shown; "events", each
              [start, end, actor, what, batch, epoch] as in `stallfree.events.Event`, times in seconds from the
              beginning, by their start
            - "shown": the index of the run that is shown first
            - "pipeline": the simulated pipeline, or null (any object)
            - "comparison": null, or without and with a prefetcher: "seeds"; "seconds", the length of the beginning;
              "first" (batches in it) and "steady" (batches/s later), each two of {"mean", "low", "high"}; "singles",
              two of [minimum, maximum] over the seeds; "law", two numbers; "advice" and "caution", sentences

    Raises `InputError` for other data, `MissingExtraError` if `plotly` is not installed.
    """
    expect(data, "stallfree-simulation", _KEYS)
    runs = data["runs"]
    if not runs or not 0 <= data["shown"] < len(runs):
        raise InputError(f"shown={data['shown']!r} with {len(runs)} runs: give at least a run, and the index of one")
    simulated = data["comparison"] is not None
    body = "".join(
        [
            '<header>\n<p class="kicker">stallfree ',
            "simulation" if simulated else "recording",
            f'</p>\n<h1>A pipeline at work</h1>\n<p class="job">{escape(data["title"])}</p>\n</header>\n<main>\n',
            _comparison(data["comparison"]) if simulated else "",
            _controls(runs, data["shown"]),
            asset("stage.html"),
            "".join(_left_out(run) for run in runs),
            "</main>",
        ]
    )
    return document(f"stallfree: {data['title']}", body, data, assets=["simulation.css", "state.js", "simulation.js"])


def comparison_rows(comparison: Mapping[str, Any]) -> list[list[str]]:
    """The comparison as text rows for page and terminal: quantity, without prefetch, with prefetch."""
    first = f"first {comparison['seconds']:g} s"
    laws = zip(comparison["law"], comparison["steady"], strict=True)  # with the decimals of the compared value
    return [
        [f"{first}: mean of {plural(comparison['seeds'], 'seed')}", *(_interval(part) for part in comparison["first"])],
        [f"{first}: single seeds", *(_range(part) for part in comparison["singles"])],
        ["steady state, per second", *(_interval(part) for part in comparison["steady"])],
        ["law, per second", *(number(law, part["high"] - part["low"]) for law, part in laws)],
    ]


CAPTION = "Batches trained, with intervals of 95%"
LAW = "The law: min(W/l, 1/(t+m)) without, min(W/l, 1/max(t,m)) with prefetch: W loaders, l load, t copy, m compute."


def _interval(part: Mapping[str, float]) -> str:
    width = part["high"] - part["low"]
    return f"{number(part['mean'], width)} ({number(part['low'], width)} to {number(part['high'], width)})"


def _range(part: Sequence[int]) -> str:
    least, most = part
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _comparison(comparison: Mapping[str, Any]) -> str:
    advice = comparison["advice"]
    rows = [[escape(cell) for cell in row] for row in comparison_rows(comparison)]
    return (
        f'<p class="verdict" id="advice">{escape(advice[:1].upper() + advice[1:])}.</p>\n'
        '<section aria-labelledby="compared">\n<h2 id="compared">Without and with prefetch</h2>\n'
        + table(CAPTION, ["", *_KINDS], rows, classes="numbers compared")
        + f'<p class="small">{escape(comparison["caution"])}</p>\n<p class="small">{escape(LAW)}</p>\n</section>\n'
    )


def _controls(runs: Sequence[Mapping[str, Any]], shown: int) -> str:
    choices = "".join(
        f'<label><input type="radio" name="run" value="{index}"{" checked" if index == shown else ""}>'
        f'<span>{escape(run["name"])}: <b class="count" id="count-{index}">0</b> batches trained</span></label>\n'
        for index, run in enumerate(runs)
    )
    return (
        '<section class="controls" aria-label="Animation">\n'
        f'<fieldset class="runs"><legend>Run</legend>\n{choices}</fieldset>\n'
        '<div class="buttons">\n<button type="button" id="play">Play</button>\n'
        '<button type="button" id="pause" disabled>Pause</button>\n<button type="button" id="back">Step back</button>\n'
        '<button type="button" id="step">Step</button>\n<label>Speed <select id="speed"></select></label>\n'
        '<output id="time" for="slider"></output>\n</div>\n'
        '<input type="range" id="slider" min="0" max="1000" step="1" value="0" aria-label="Time">\n'
        '<p class="small" id="news" aria-live="polite"></p>\n</section>\n'
    )


def _left_out(run: Mapping[str, Any]) -> str:
    if not run["left_out"]:
        return ""
    return (
        f'<p class="small">{escape(run["name"])}: the first {len(run["events"]):,} events are shown, '
        f"{run['left_out']:,} later ones are not.</p>\n"
    )
