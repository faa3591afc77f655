"""`stallfree top`: the caches and loaders of this host, and the servers of its stores, live."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from stallfree.cli._output import JsonFlag, console, print_json, table
from stallfree.errors import InputError, argument_conflict
from stallfree.units import format_size, parse_seconds

if TYPE_CHECKING:
    from stallfree.observe.jobs import CacheRow, LoaderRow, Look
    from stallfree.observe.servers import ServerRow

_SILENT = 3.0
"""Seconds without an update of a loader after which its age is shown."""


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    interval: Annotated[str, typer.Option(help="Time between two snapshots.", metavar="TIME")] = "1s",
    json: JsonFlag = False,
) -> None:
    """Show this user's loaders, caches and servers on this host, live.

    Ctrl-C ends it. With --json: one snapshot.

    Example: stallfree top --interval 5s
    """
    from stallfree.observe.jobs import Jobs

    seconds = parse_seconds(interval, "interval")
    if seconds <= 0:
        raise InputError(f"interval={interval!r} must be above 0: give a time such as '1s' or '500ms'")
    jobs, out = Jobs(), console()
    look = jobs.look()
    if json:
        print_json({"format": "stallfree-top", "version": 1, **asdict(look)})
    elif not look:
        out.out(f"no caches and no loaders in {jobs.root}")
    elif once:
        out.print(tables(look))
    elif not out.is_terminal:
        raise argument_conflict("the standard output is no terminal: give --once for one table")
    else:
        try:
            with Live(tables(look), console=out, auto_refresh=False) as live:
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


def _loaders(rows: list[LoaderRow]) -> Table:
    shown = table(
        "loaders (fetch, prep: share of the time that training waits for them)",
        ("pid", "script", "data set"),
        ("epoch", "samples", "per s", "fetch", "prep", "ready", "workers"),
    )
    for row in rows:
        silent = "" if row.silent_seconds < _SILENT else f" (silent for {row.silent_seconds:.0f} s)"
        shown.add_row(
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
    return shown


def _caches(rows: list[CacheRow]) -> Table:
    shown = table(
        "caches (hits: now, and since they were made)",
        ("name", "policy"),
        ("records", "used", "hits", "in all", "evicted", "processes"),
    )
    for row in rows:
        readable = row.capacity_bytes > 0
        recent = f" (+{row.recent_evictions:,})" if row.recent_evictions else ""
        shown.add_row(
            row.name,
            row.policy or "?",
            f"{row.resident_items:,} / {row.samples:,}" if readable else "?",
            f"{row.used_bytes / row.capacity_bytes:.0%} of {format_size(row.capacity_bytes)}" if readable else "?",
            _share(row.recent_hit_ratio),
            _share(row.hit_ratio),
            "?" if row.evictions is None else f"{row.evictions:,}{recent}",
            "?" if row.processes is None else str(row.processes),
        )
    return shown


def _servers(rows: list[ServerRow]) -> Table:
    shown = table(
        "servers (hits: of all nodes, since the start of the server)",
        ("store", "server", "state"),
        ("keys", "used", "hits", "clients"),
    )
    for row in rows:
        if row.lost:
            shown.add_row(row.store, row.address, "lost", "-", "-", "-", "-")
            continue
        asked = row.hits + row.misses
        shown.add_row(
            row.store,
            row.address,
            "answers",
            f"{row.keys:,}",
            f"{row.used_bytes / max(1, row.capacity_bytes):.0%} of {format_size(row.capacity_bytes)}",
            _share(row.hits / asked if asked else None),
            str(row.connections),
        )
    return shown


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
