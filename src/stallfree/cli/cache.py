"""`stallfree cache`: lists caches, once or live, and removes them."""

import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box, console, live, table

from stallfree.cli._output import JsonFlag, print_json
from stallfree.errors import StorageError, cache_not_found
from stallfree.units import format_size

app = typer.Typer(help="List or remove the caches of this user.", no_args_is_help=True, rich_markup_mode=None)

_SECONDS = 1.0
"""Time between two tables of `ls --watch`."""

_FILE_WIDTH = 140
"""Minimum columns of a table written to a file or a pipe."""

Store = Annotated[
    str, typer.Option(help="Where the caches are: memory, or a folder as given to CachedDataset.", metavar="FOLDER")
]


@app.command("ls")
def ls(
    store: Store = "memory",
    watch: Annotated[bool, typer.Option("--watch", help="Refresh the table every second, until Ctrl-C.")] = False,
    json: JsonFlag = False,
) -> None:
    """List the caches, and the servers that stores have started.

    Hits and misses are sums over all processes since the cache was made. Without a terminal, or with --json, --watch
    prints once and ends.

    Example: stallfree cache ls --watch
    """
    from stallfree.cache.store import list_caches

    root, out = _root(store), console.Console(highlight=False, markup=False)
    if not out.is_terminal:
        out.width = max(out.width, _FILE_WIDTH)
    if json:
        print_json([asdict(cache) | {"path": str(cache.path), **_requests(cache.path)} for cache in list_caches(root)])
    elif watch and out.is_terminal:
        with suppress(KeyboardInterrupt), live.Live(_listing(root), console=out, auto_refresh=False) as shown:
            while True:
                time.sleep(_SECONDS)
                shown.update(_listing(root), refresh=True)
    else:
        out.print(_listing(root), crop=False)


def _listing(root: Path) -> console.RenderableType:
    """Return a table of the caches and one of the servers."""
    from stallfree.cache.redis.servers import running_servers
    from stallfree.cache.store import list_caches

    caches = _table("", "name", "policy", "state", "hits", "misses", "resident", "samples", "used", "capacity")
    for cache in list_caches(root):
        states = [word for word, holds in (("in use", cache.in_use), ("persistent", cache.persist)) if holds]
        counts = [*_requests(cache.path).values(), cache.resident_items, cache.samples]
        cells = _figures(counts, cache.used_bytes, cache.capacity_bytes) if cache.capacity_bytes > 0 else ["?"] * 6
        caches.add_row(cache.name, cache.policy or "?", ", ".join(states) or "left behind", *cells)
    servers = _table("servers of this host", "store", "state", "hits", "misses", "keys", "used", "capacity")
    for store, info in running_servers(root):
        if info is None:
            servers.add_row(store, "lost", *"-----")
        else:
            counts = [info[name] for name in ("keyspace_hits", "keyspace_misses", "keys")]
            servers.add_row(store, "in use", *_figures(counts, info["used_memory"], info["maxmemory"]))
    tables = [shown for shown in (caches, servers) if shown.row_count]
    return console.Group(*tables) if tables else f"no caches in {root}"


def _figures(counts: list[int | None], used: int, capacity: int) -> list[str]:
    return [*("?" if n is None else f"{n:,}" for n in counts), format_size(used), format_size(capacity)]


def _table(title: str, *headings: str) -> table.Table:
    """A table of columns of words and of numbers, which are cut if there is no room."""
    made = table.Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left")
    for heading in headings:
        is_word = heading in ("name", "store", "policy", "state")
        made.add_column(heading, justify="left" if is_word else "right", no_wrap=True)
    return made


def _requests(path: Path) -> dict[str, int | None]:
    """Return the hits and misses of all processes, current and past; None if the cache cannot be read."""
    from stallfree.cache.layout import Count, Index, Meta

    try:
        totals = Index(path, Meta.load(path)).counters.totals()
    except (StorageError, OSError):
        return {"hits": None, "misses": None}
    return {"hits": totals[Count.HITS], "misses": totals[Count.MISSES]}


@app.command("rm")
def rm(
    names: Annotated[list[str], typer.Argument(help="Names, as shown by `cache ls`.", metavar="NAME...")],
    store: Store = "memory",
    json: JsonFlag = False,
) -> None:
    """Remove caches that no process is attached to, also persistent ones.

    Example: stallfree cache rm train
    """
    from stallfree.cache.store import remove

    root = _root(store)
    for name in names:
        remove(root, name)
        if not json:
            typer.echo(f"removed {name}")
    if json:
        print_json({"removed": names})


@app.command("gc")
def gc(store: Store = "memory", json: JsonFlag = False) -> None:
    """Remove what killed processes left behind.

    Caches in use and persistent ones are kept.

    Example: stallfree cache gc
    """
    from stallfree.ipc.folders import sweep

    removed = sweep(_root(store))
    if json:
        print_json({"removed": removed})
    else:
        typer.echo("\n".join(f"removed {name}" for name in removed) or "nothing to remove")


def _root(store: str) -> Path:
    from stallfree.cache.store import caches_root

    root = caches_root(store)
    if store != "memory" and not Path(store).expanduser().is_dir():
        raise cache_not_found(f"--store {store}: there is no such folder. Give the one that CachedDataset was given")
    return root
