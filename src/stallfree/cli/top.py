"""`stallfree top`: the caches and loaders of this host, and the servers of its stores, live."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from stallfree.errors import InputError, argument_conflict
from stallfree.units import format_size, parse_seconds

if TYPE_CHECKING:
    from stallfree.observe.jobs import CacheRow, LoaderRow, Look
    from stallfree.observe.servers import ServerRow

_FILE_WIDTH = 140
"""Columns of a table written to a file or a pipe."""

_SILENT = 3.0
"""Seconds without an update of a loader after which its age is shown."""


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    interval: Annotated[str, typer.Option(help="Time between two looks.", metavar="TIME")] = "1s",
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
) -> None:
    """Show what the caches in memory and the loaders of this user on this host are doing. Ctrl-C ends it."""
    from stallfree.observe.jobs import Jobs

    seconds = parse_seconds(interval, "interval")
    if seconds <= 0:
        raise InputError(f"interval={interval!r} must be above 0: give a time such as '1s' or '500ms'")
    if as_json and not once:
        raise argument_conflict("--json prints one look: give --once too")
    jobs, console = Jobs(), Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    look = jobs.look()
    if as_json:
        typer.echo(json.dumps({"format": "stallfree-top", "version": 1, **asdict(look)}, indent=1))
    elif not look:
        console.print(f"no caches and no loaders in {jobs.root}", soft_wrap=True, highlight=False)
    elif once:
        console.print(tables(look))
    elif not console.is_terminal:
        raise argument_conflict("the standard output is no terminal: give --once for one table")
    else:
        try:
            with Live(tables(look), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(seconds)
                    live.update(tables(jobs.look()), refresh=True)
        except KeyboardInterrupt:
            return


def tables(look: Look) -> RenderableType:
    """The tables of loaders, caches and servers of one snapshot."""
    parts: list[RenderableType] = []
    if look.loaders:
        parts.append(_loaders(look.loaders))
    if look.caches:
        parts.append(_caches(look.caches))
    if look.servers:
        parts.append(_servers(look.servers))
    return Group(*parts) if parts else "no caches and no loaders"


def _table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in words:
        table.add_column(heading, overflow="ellipsis")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _loaders(rows: list[LoaderRow]) -> Table:
    table = _table(
        "loaders (fetch, prep: share of the time that training waits for them)",
        ("pid", "script", "data set"),
        ("epoch", "samples", "per s", "fetch", "prep", "ready", "workers"),
    )
    for row in rows:
        silent = "" if row.silent_seconds < _SILENT else f" (silent for {row.silent_seconds:.0f} s)"
        table.add_row(
            str(row.pid),
            row.script + silent,
            row.dataset,
            str(row.epoch),
            f"{row.samples:,}",
            "-" if row.samples_per_second is None else f"{row.samples_per_second:,.0f}",
            _share(row.fetch_stall),
            _share(row.prep_stall),
            str(row.queue_depth),
            str(row.workers),
        )
    return table


def _caches(rows: list[CacheRow]) -> Table:
    table = _table(
        "caches (hits: now, and since they were made)",
        ("name", "policy"),
        ("records", "used", "hits", "in all", "evicted", "processes"),
    )
    for row in rows:
        readable = row.capacity_bytes > 0
        recent = f" (+{row.recent_evictions:,})" if row.recent_evictions else ""
        table.add_row(
            row.name,
            row.policy or "?",
            f"{row.resident_items:,} / {row.samples:,}" if readable else "?",
            f"{row.used_bytes / row.capacity_bytes:.0%} of {format_size(row.capacity_bytes)}" if readable else "?",
            _share(row.recent_hit_ratio),
            _share(row.hit_ratio),
            "?" if row.evictions is None else f"{row.evictions:,}{recent}",
            "?" if row.processes is None else str(row.processes),
        )
    return table


def _servers(rows: list[ServerRow]) -> Table:
    table = _table(
        "servers (hits: of all nodes, since the start of the server)",
        ("store", "server", "state"),
        ("keys", "used", "hits", "clients"),
    )
    for row in rows:
        if row.lost:
            table.add_row(row.store, row.address, "lost", "-", "-", "-", "-")
            continue
        asked = row.hits + row.misses
        table.add_row(
            row.store,
            row.address,
            "answers",
            f"{row.keys:,}",
            f"{row.used_bytes / max(1, row.capacity_bytes):.0%} of {format_size(row.capacity_bytes)}",
            _share(row.hits / asked if asked else None),
            str(row.connections),
        )
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
