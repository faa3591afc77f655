"""`stallfree run`: runs an unchanged script and times its data loaders."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stallfree.cli._output import STDOUT, writable
from stallfree.errors import file_unreadable

SETTINGS: dict[str, Any] = {"allow_interspersed_args": False}
"""Registration settings of this command: arguments after the script belong to the script."""


def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the name of a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", help="Arguments of the script.", show_default=False)
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for `python -m`.")] = False,
    cache: Annotated[
        bool, typer.Option("--cache", help="Replace torch's loaders by ones of stallfree with cache='auto'.")
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(help="Write the summary as JSON; with -, after the script's own output.", metavar="FILE"),
    ] = None,
) -> None:
    """Run a training script unchanged, and show how long it waited for data.

    Times every DataLoader of torch or stallfree that the script iterates in its own process. Prints a summary to
    standard error. Options of this command stand before SCRIPT.

    Example: stallfree run train.py --lr 0.1
    """
    if not module and not Path(target).is_file():
        what = "is a folder" if Path(target).is_dir() else "is not there"
        raise file_unreadable(f"the script {target} {what}: give a Python file, or `-m` and the name of a module")
    writable(json)
    out = "" if json is None else "-" if json == STDOUT else str(json.absolute())  # the script may change the folder
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    how = [out, "cache" if cache else "", "module" if module else "script", target, *(arguments or [])]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *flags, "-m", "stallfree.analysis.run", *how])
