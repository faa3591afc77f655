"""`stallfree run`: runs an unchanged script and times its data loaders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stallfree.errors import file_unreadable

SETTINGS: dict[str, Any] = {"allow_interspersed_args": False}
"""Registration settings of this command: arguments after the script belong to the script."""


def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the name of a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="Its own arguments.")] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for `python -m`.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the summary to this file too.", metavar="FILE")
    ] = None,
) -> None:
    """Run a training script unchanged, and show how long it waited for its data loaders.

    Every torch.utils.data.DataLoader and stallfree.DataLoader that the script iterates in its own process is timed
    from outside: the time in `next`, and the time between two calls. The summary goes to the standard error. Options
    of this command stand before SCRIPT.
    """
    from stallfree.cli._output import writable
    from stallfree.observe import start

    if not module and not Path(target).is_file():
        what = "is a folder" if Path(target).is_dir() else "is not there"
        raise file_unreadable(f"the script {target} {what}: give a Python file, or `-m` and the name of a module")
    if json_file is not None:
        json_file = json_file.absolute()  # the script may change the working folder
        writable(json_file)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    kind = "module" if module else "script"
    given = [str(start.__file__), str(json_file or ""), kind, target, *(arguments or [])]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *flags, *given])
