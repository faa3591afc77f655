"""A report as text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

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
    spread,
)

_MARKS = {"compute": "█", "copy": "▓", "prep_stall": "▒", "fetch_stall": "░"}
_WIDTH = 80


def render_report(data: Mapping[str, Any]) -> str:
    """The report `data` (the JSON of `stallfree analyze`) as text of 80 columns.

    Args:
        data: format "stallfree-report", version 1.

    Raises `InputError` for other data.
    """
    expect(data, "stallfree-report", REPORT_KEYS)
    file = io.StringIO()
    console = Console(
        file=file,
        width=_WIDTH,
        force_terminal=False,
        color_system=None,
        highlight=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    parts: list[RenderableType] = [_plain(data["bottleneck"])]
    if data["advice"]:
        parts += ["What to do: first without other hardware, each in order of gain", *_advice(data["advice"])]
    elif no_advice(data) != data["bottleneck"]:
        parts.append(_plain(no_advice(data)))
    parts += [
        "\nWhere the time goes",
        _shares(data),
        "\nRates, in samples/s, with the interval of 95%",
        _rates(data["rates"]),
        "Job",
        _plain(job_line(data)),
        _plain(machine_line(data)),
    ]
    if data["notes"]:
        parts += ["\nNotes", *(_item("-", _plain(note)) for note in data["notes"])]
    console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _plain(text: object) -> Text:
    """Text of the report, without terminal control sequences."""
    return Text("".join(char if char.isprintable() else "\ufffd" for char in " ".join(str(text).split())))


def _shares(data: Mapping[str, Any]) -> RenderableType:
    rows: list[RenderableType] = ["  ".join(f"{_MARKS[part]} {name}" for part, name in SHARES.items())]
    for run, meaning in RUNS.items():
        measured, shares = data["runs"][run], data["shares"][run]
        ends = f" ({spread(measured)})" if spread(measured) else ""
        unit = "" if measured["value"] is None else " samples/s"
        rows.append(f"\n{run} ({meaning}): {rate(measured)}{unit}{ends}")
        if measured["note"]:
            rows.append(_plain(measured["note"]))
        if shares:
            rows.append(_bar(shares))
            rows.append(", ".join(f"{name} {percent(shares[part])}" for part, name in SHARES.items()))
    return Group(*rows)


def _bar(shares: Mapping[str, float]) -> str:
    """A full line, split in proportion to the shares. Cumulative sums are rounded, so the parts fill the line."""
    bar, reached, total = "", 0.0, sum(shares[part] for part in SHARES)
    for part, mark in _MARKS.items():
        reached += shares[part]
        bar = bar.ljust(round(_WIDTH * reached / total), mark)
    return bar


def _rates(rates: Mapping[str, Any]) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("what it is")
    table.add_column("samples/s", justify="right", no_wrap=True)
    table.add_column("interval", justify="right", no_wrap=True)
    table.add_column("repeats", justify="right", no_wrap=True)
    for name, meaning in RATES.items():
        measured = rates[name]
        described = Text(meaning)
        if measured["note"]:
            described.append_text(Text.assemble("\n", _plain(measured["note"])))
        repeats = str(measured["repeats"]) if measured["repeats"] else ""
        table.add_row(name, described, rate(measured), spread(measured), repeats)
    return table


def _advice(advice: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    for count, item in enumerate(advice, 1):
        reached = MISSING if item["throughput"] is None else f"{number(item['throughput'])} samples/s"
        text = Text.assemble(_plain(item["do"]), f"  ({reached}, {gain(item['gain'])})\n", _plain(item["why"]))
        yield _item(f"{count}.", text)


def _item(mark: str, text: Text) -> RenderableType:
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(no_wrap=True)
    row.add_column()
    row.add_row(mark, text)
    return row
