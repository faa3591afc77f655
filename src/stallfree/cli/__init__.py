"""The command line, one command per file. Only this package imports typer."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from stallfree.cli import analyze, cache, predict, replay, run, simulate
from stallfree.errors import StallfreeError
from stallfree.raising import described, is_users

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
app.command("run", context_settings=run.SETTINGS)(run.run)
app.command("analyze")(analyze.analyze)
app.command("predict")(predict.predict)
app.command("simulate")(simulate.simulate)
app.command("replay")(replay.replay)
app.add_typer(cache.app, name="cache")


@app.callback(invoke_without_command=True)
def _stallfree(
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if show_version:
        typer.echo(f"stallfree {version('stallfree')}")
        raise typer.Exit


def main() -> None:
    """Run the command in the arguments of this process, and exit with its code.

    A `StallfreeError` is printed with the address of its page, and an error of the user's data set with what was being
    done, with exit code 2. Any other error is a bug and keeps its traceback.
    """
    try:
        app(prog_name="stallfree")
    except Exception as error:
        if not (isinstance(error, StallfreeError) or is_users(error)):
            raise
        text = str(error) if isinstance(error, StallfreeError) else described(error)
        typer.echo(f"error: {text}", err=True)
        sys.exit(USER_ERROR)
