"""A report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stallfree.report.document import document, escape, table
from stallfree.report.figures import (
    MISSING,
    RATES,
    REPORT_KEYS,
    RUNS,
    SHARES,
    expect,
    gain,
    job_line,
    machine_line,
    no_advice,
    number,
    percent,
    rate,
    speed,
    spread,
)

_RATE_HEADINGS = ("rate", "samples/s", "interval of 95%", "repeats")


def report_page(data: Mapping[str, Any]) -> str:
    """The report `data` (the JSON of `stallfree analyze`) as a page with text, tables and plotly charts.

    The page makes no network requests, and contains `data` in its element "data". Text and tables need no scripts.

    Args:
        data: format "stallfree-report", version 1.

    Raises `InputError` for other data, `MissingExtraError` if `plotly` is not installed.
    """
    expect(data, "stallfree-report", REPORT_KEYS)
    body = "".join(
        [
            '<header>\n<p class="kicker">stallfree report</p>\n<h1>Where the time goes</h1>\n',
            f'<p class="job">{escape(job_line(data))}</p>\n</header>\n<main>\n',
            f'<p class="verdict">{escape(data["bottleneck"])}</p>\n',
            _runs(data),
            _advice(data),
            _rates(data["rates"]),
            _curves(data["curves"]),
            _notes(data["notes"]),
            f"</main>\n<footer><p>{escape(machine_line(data))}</p></footer>",
        ]
    )
    return document(f"stallfree: {data['job']['dataset']}", body, data, assets=["report.css", "report.js"])


def _runs(data: Mapping[str, Any]) -> str:
    cards, described = [], []
    for run, meaning in RUNS.items():
        measured, shares = data["runs"][run], data["shares"][run]
        cards.append(f'<div class="card"><h3>{escape(meaning.capitalize())}</h3>{_figure_of(measured)}</div>\n')
        parts = ", ".join(f"{name} {percent(shares[part])}" for part, name in SHARES.items()) if shares else MISSING
        described.append(f"{run}: {parts}")
    rows = [
        [name, *(percent(data["shares"][run][part]) if data["shares"][run] else MISSING for run in RUNS)]
        for part, name in SHARES.items()
    ]
    meaning = "A prep stall is a wait for the CPUs, a fetch stall one for storage."
    return (
        '<section aria-labelledby="epoch">\n<h2 id="epoch">An epoch</h2>\n'
        f'<div class="cards">{"".join(cards)}</div>\n'
        + _figure("chart-epoch", "Shares of an epoch's time. " + "; ".join(described), meaning)
        + table("Shares of an epoch's time", ["", *RUNS], rows, classes="numbers shares")
        + "</section>\n"
    )


def _figure_of(measured: Mapping[str, Any]) -> str:
    if measured["value"] is None:
        return f'<p class="big missing">{MISSING}</p>\n<p class="small">{escape(measured["note"])}</p>'
    note = f"<br>{escape(measured['note'])}" if measured["note"] else ""
    return (
        f'<p class="big"><span class="value">{rate(measured)}</span> samples/s</p>\n'
        f'<p class="small">{spread(measured)}{note}</p>'
    )


def _advice(data: Mapping[str, Any]) -> str:
    if not data["advice"]:
        items = f"<p>{escape(no_advice(data))}</p>\n"
    else:
        items = '<ol class="advice">\n' + "".join(_advised(item) for item in data["advice"]) + "</ol>\n"
    return f'<section aria-labelledby="advice">\n<h2 id="advice">What to do</h2>\n{items}</section>\n'


def _advised(item: Mapping[str, Any]) -> str:
    reached = MISSING if item["throughput"] is None else f"{number(item['throughput'])} samples/s"
    return (
        f'<li><div class="do"><strong>{escape(item["do"])}</strong><span class="why">{escape(item["why"])}</span></div>'
        f'<div class="gain"><strong>{gain(item["gain"])}</strong><span>{reached}</span></div></li>\n'
    )


def _rates(rates: Mapping[str, Any]) -> str:
    rows = []
    for name, meaning in RATES.items():
        measured = rates[name]
        head = f'<b>{name}</b> <span class="meaning">{escape(meaning)}</span>'
        rows.append([head, rate(measured), spread(measured), str(measured["repeats"] or "")])
    remarks = "".join(
        f'<li class="note"><b>{name}</b>: {escape(rates[name]["note"])}</li>\n' for name in RATES if rates[name]["note"]
    )
    return (
        '<section aria-labelledby="rates">\n<h2 id="rates">The rates</h2>\n'
        + table("What each part delivers alone, in samples/s", _RATE_HEADINGS, rows, classes="numbers rates")
        + (f'<ul class="remarks">\n{remarks}</ul>\n' if remarks else "")
        + '<p class="small">Throughput is at most the least of F, P and G.</p>\n</section>\n'
    )


def _curves(curves: Mapping[str, Any]) -> str:
    lines = ["throughput", "F", "P", "G"]
    parts = [
        _curve("cache", "Throughput against cache size", "share cached", curves["cache"], lines, percent, "best"),
        _curve("cpus", "Throughput against CPUs", "CPUs", curves["cpus"], lines[:1], str, "now"),
        _curve("storage", "Throughput against storage speed", "storage", curves["storage"], lines[:1], speed, "now"),
    ]
    return (
        '<section aria-labelledby="curves">\n<h2 id="curves">What would change it</h2>\n'
        '<p class="small">Predicted from the rates.</p>\n'
        f'<div class="charts">{"".join(parts)}</div></section>\n'
    )


def _curve(
    name: str,
    title: str,
    axis: str,
    curve: Mapping[str, Any] | None,
    lines: Sequence[str],
    position: Callable[[Any], str],
    mark: str,
) -> str:
    heading = f"<h3>{escape(title)}</h3>\n"
    known = [(x, y) for x, y in zip(curve["x"], curve["throughput"], strict=True) if y is not None] if curve else []
    if not known or curve is None:
        return f'<div class="curve" id="curve-{name}">{heading}<p class="missing">{MISSING}</p></div>\n'
    marked = curve[mark]
    label = "" if marked is None else f"{mark}: {position(marked)}"
    rows = [
        [escape(position(x)), *(MISSING if y is None else number(y) for y in values)]
        for x, *values in zip(curve["x"], *(curve[line] for line in lines), strict=True)
    ]
    ends = [f"{number(y)} samples/s at {position(x)}" for x, y in known[:: max(len(known) - 1, 1)]]
    described = "; ".join([*ends, *([label] if label else [])]) + "."
    return (
        f'<div class="curve" id="curve-{name}">{heading}'
        + _figure(f"chart-{name}", f"{title}: {described}", described, label)
        + "<details><summary>The numbers</summary>"
        + table(f"{title}, in samples/s", [axis, *lines], rows, classes="numbers")
        + "</details></div>\n"
    )


def _figure(name: str, described: str, caption: str, mark: str = "") -> str:
    attributes = f'id="{name}" role="img" aria-label="{escape(described)}" data-mark="{escape(mark)}"'
    return f'<figure><div class="chart" {attributes}></div><figcaption>{escape(caption)}</figcaption></figure>\n'


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>\n" for note in notes)
    return f'<section aria-labelledby="notes">\n<h2 id="notes">Notes</h2>\n<ul>\n{items}</ul>\n</section>\n'
