"""The command line, one command per file. Only this package imports typer."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from stallfree.cli.analyze import analyze as analyze_command
from stallfree.cli.cache import app as cache_app
from stallfree.cli.predict import predict as predict_command
from stallfree.cli.replay import replay as replay_command
from stallfree.cli.run import SETTINGS as run_settings
from stallfree.cli.run import run as run_command
from stallfree.cli.simulate import simulate as simulate_command
from stallfree.cli.top import top as top_command
from stallfree.errors import StallfreeError

__all__ = ["app", "main"]

USER_ERROR = 2
"""Exit code of errors that the user can fix, the same as for an invalid option."""

app = typer.Typer(
    name="stallfree",
    help="Keeps the accelerator fed while a neural network trains on PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", context_settings=run_settings)(run_command)
app.command("analyze")(analyze_command)
app.command("predict")(predict_command)
app.command("simulate")(simulate_command)
app.command("replay")(replay_command)
app.command("top")(top_command)
app.add_typer(cache_app, name="cache")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stallfree {version('stallfree')}")
        raise typer.Exit


@app.callback()
def _stallfree(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command in the arguments of this process, and exit with its code.

    A `StallfreeError` is printed with the address of its page, with exit code 2; any other error is a bug and keeps
    its traceback.
    """
    try:
        app(prog_name="stallfree")
    except StallfreeError as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(USER_ERROR)
