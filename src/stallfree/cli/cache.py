"""`stallfree cache`: lists and removes caches."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stallfree.cli._output import JsonFlag, console, print_json, table
from stallfree.errors import cache_not_found
from stallfree.units import format_size

app = typer.Typer(help="List or remove the caches of this user.", no_args_is_help=True, rich_markup_mode=None)

Store = Annotated[
    str, typer.Option(help="Where the caches are: memory, or a folder as given to CachedDataset.", metavar="STORE")
]


@app.command("ls")
def ls(store: Store = "memory", json: JsonFlag = False) -> None:
    """List the caches.

    Example: stallfree cache ls --store /data/cache
    """
    from stallfree.cache.admin import list_caches

    root = _root(store)
    found = list_caches(root)
    if json:
        print_json([asdict(cache) | {"path": str(cache.path)} for cache in found])
        return
    if not found:
        console().out(f"no caches in {root}")
        return
    shown = table(None, ("name", "policy", "state"), ("resident", "samples", "used", "capacity"))
    for cache in found:
        state = [word for word, holds in (("in use", cache.in_use), ("persistent", cache.persist)) if holds]
        counts = [f"{count:,}" for count in (cache.resident_items, cache.samples)]
        sizes = [format_size(size) for size in (cache.used_bytes, cache.capacity_bytes)]
        figures = [*counts, *sizes] if cache.capacity_bytes > 0 else ["?"] * 4
        shown.add_row(cache.name, cache.policy or "?", ", ".join(state) or "left behind", *figures)
    console().print(shown)


@app.command("rm")
def rm(
    names: Annotated[list[str], typer.Argument(help="Names, as shown by `cache ls`.", metavar="NAME...")],
    store: Store = "memory",
    json: JsonFlag = False,
) -> None:
    """Remove caches that no process is attached to, also persistent ones.

    Example: stallfree cache rm train
    """
    from stallfree.cache.admin import remove

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
    from stallfree.cache.admin import collect_garbage

    removed = collect_garbage(_root(store))
    if json:
        print_json({"removed": removed})
    else:
        typer.echo("\n".join(f"removed {name}" for name in removed) or "nothing to remove")


def _root(store: str) -> Path:
    from stallfree.cache.admin import caches_root

    root = caches_root(store)
    if store != "memory" and not Path(store).expanduser().is_dir():
        raise cache_not_found(f"--store {store}: there is no such folder. Give the one that CachedDataset was given")
    return root
