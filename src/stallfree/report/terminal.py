"""A report as text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping
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
    interval,
    job_line,
    machine_line,
    no_advice,
    number,
    percent,
    rate,
    spread,
)

_MARKS = {"compute": ("█", "blue"), "copy": ("▓", "bright_black"), "prep_stall": ("▒", "yellow")} | {
    "fetch_stall": ("░", "magenta")
}


def render_report(data: Mapping[str, Any], *, width: int = 80, colour: bool = False) -> str:
    """The report `data` (the JSON of `stallfree analyze`) as text: where the time goes, the rates, what to do.

    Args:
        data: format "stallfree-report", version 1.
        width: columns of the terminal; best from 60 on.
        colour: with the escape sequences of a terminal. Nothing is said by colour alone.

    Raises `InputError` for what is no such report.
    """
    expect(data, "stallfree-report", REPORT_KEYS)
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    parts: list[RenderableType] = [
        _plain(job_line(data), "bold"),
        _plain(machine_line(data), "dim"),
        *_section("Where the time goes"),
        _shares(data, width),
        *_section("Rates, in samples/s, with the interval of 95%"),
        _rates(data["rates"]),
        *_section("Bottleneck"),
        _plain(data["bottleneck"]),
        *_section("What to do: first without other hardware, each in order of gain"),
        _advice(data),
    ]
    if data["notes"]:
        parts += [*_section("Notes"), Group(*(_item("-", _plain(note)) for note in data["notes"]))]
    console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _plain(text: object, style: str = "") -> Text:
    """What the report says, without anything that a terminal would obey."""
    return Text("".join(char if char.isprintable() else "\ufffd" for char in " ".join(str(text).split())), style)


def _section(title: str) -> tuple[RenderableType, ...]:
    return "", Text(title, "bold underline")


def _shares(data: Mapping[str, Any], width: int) -> RenderableType:
    legend = Text("  ").join(Text.assemble(_MARKS[part], " ", name) for part, name in SHARES.items())
    rows: list[RenderableType] = [legend]
    for run, meaning in RUNS.items():
        measured, shares = data["runs"][run], data["shares"][run]
        head = Text.assemble((f"{run} ", "bold"), f"({meaning}): {rate(measured)}")
        if measured["value"] is not None:
            head.append(f" samples/s{interval(measured)}")
        rows += ["", head]
        if measured["note"]:
            rows.append(_plain(measured["note"], "dim"))
        if shares:
            rows.append(_bar(shares, width))
            rows.append(Text(", ".join(f"{name} {percent(shares[part])}" for part, name in SHARES.items())))
    return Group(*rows)


def _bar(shares: Mapping[str, float], width: int) -> Text:
    """All of `width`, split as the shares are; sums are rounded and not parts, so that nothing is lost or added."""
    bar, total, drawn = Text(), sum(shares[part] for part in SHARES), 0
    reached = 0.0
    for part in SHARES:
        reached += shares[part]
        end = round(width * reached / total) if total else 0
        mark, style = _MARKS[part]
        bar.append(mark * (end - drawn), style)
        drawn = end
    return bar


def _rates(rates: Mapping[str, Any]) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True, style="bold")
    table.add_column("what it is")
    table.add_column("samples/s", justify="right", no_wrap=True)
    table.add_column("interval", justify="right", no_wrap=True)
    table.add_column("repeats", justify="right", no_wrap=True)
    for name, meaning in RATES.items():
        measured = rates[name]
        described = Text(meaning)
        if measured["note"]:
            described.append_text(Text.assemble("\n", _plain(measured["note"], "dim")))
        repeats = str(measured["repeats"]) if measured["repeats"] else ""
        table.add_row(name, described, rate(measured), spread(measured), repeats)
    return table


def _advice(data: Mapping[str, Any]) -> RenderableType:
    if not data["advice"]:
        return _plain(no_advice(data))
    items = []
    for count, item in enumerate(data["advice"], 1):
        reached = MISSING if item["throughput"] is None else f"{number(item['throughput'])} samples/s"
        text = Text.assemble(
            (str(_plain(item["do"])), "bold"), f"  ({reached}, {gain(item['gain'])})\n", _plain(item["why"])
        )
        items.append(_item(f"{count}.", text))
    return Group(*items)


def _item(mark: str, text: Text) -> RenderableType:
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(no_wrap=True)
    row.add_column()
    row.add_row(mark, text)
    return row
