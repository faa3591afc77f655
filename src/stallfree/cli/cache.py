"""`stallfree cache`: lists and removes caches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stallfree.errors import cache_not_found
from stallfree.units import format_size

if TYPE_CHECKING:
    from stallfree.cache.memory.admin import CacheInfo

app = typer.Typer(
    help="List the caches of this user, remove one, sweep up what killed processes left.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Store = Annotated[
    str,
    typer.Option(
        help="Where the caches lie: memory, or a folder on a disk as given to CachedDataset.", metavar="STORE"
    ),
]


@app.command("ls")
def ls(store: Store = "memory") -> None:
    """List the caches of this user."""
    from stallfree.cache.memory.admin import list_caches

    root = _root(store)
    found = list_caches(root)
    console = Console()
    if found:
        console.print(_table(found))
    else:
        console.print(f"no caches in {root}", soft_wrap=True, highlight=False)


@app.command("rm")
def rm(
    names: Annotated[list[str], typer.Argument(help="Names, as `cache ls` shows them.")],
    store: Store = "memory",
) -> None:
    """Remove caches that no process is attached to, persistent ones too."""
    from stallfree.cache.memory.admin import remove

    root = _root(store)
    for name in names:
        remove(root, name)
        typer.echo(f"removed {name}")


@app.command("gc")
def gc(store: Store = "memory") -> None:
    """Remove what killed processes left behind. Caches in use and persistent ones stay."""
    from stallfree.cache.memory.admin import collect_garbage

    removed = collect_garbage(_root(store))
    for name in removed:
        typer.echo(f"removed {name}")
    if not removed:
        typer.echo("nothing to remove")


def _root(store: str) -> Path:
    from stallfree.cache.memory.admin import caches_root

    root = caches_root(store)
    if store != "memory" and not Path(store).expanduser().is_dir():
        raise cache_not_found(f"--store {store}: there is no such folder. Give the one that CachedDataset was given")
    return root


def _table(caches: list[CacheInfo]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", overflow="fold")
    for heading in ("resident", "samples", "used", "capacity"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("policy", "state"):
        table.add_column(heading, no_wrap=True)
    for cache in caches:
        state = [word for word, holds in (("in use", cache.in_use), ("persistent", cache.persist)) if holds]
        readable = cache.capacity_bytes > 0
        table.add_row(
            cache.name,
            *(f"{cache.resident_items:,}", f"{cache.samples:,}") if readable else ("?", "?"),
            *(format_size(cache.used_bytes), format_size(cache.capacity_bytes)) if readable else ("?", "?"),
            cache.policy or "?",
            ", ".join(state) or "left behind",
        )
    return table
