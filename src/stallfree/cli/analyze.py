"""`stallfree analyze`: measures where a job waits, with recommendations."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stallfree.cli._output import STDOUT, JsonFile, show, writable


def analyze(
    job: Annotated[
        str,
        typer.Argument(
            help="A function that returns (dataset, loader_arguments, step): FILE.py:NAME or MODULE:NAME.",
            metavar="JOB",
        ),
    ],
    cache: Annotated[
        str | None, typer.Option(help="What the job may cache, such as 4GiB or 50%. Default: nothing.", metavar="SIZE")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where the step works. Default: cpu.", metavar="NAME")] = None,
    seconds: Annotated[float, typer.Option(help="Time for each of the five runs.", metavar="N")] = 10.0,
    json: JsonFile = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that works offline.", metavar="FILE")] = None,
) -> None:
    """Measure where a training job waits, and what would help.

    It needs no root and changes nothing. `stallfree predict` reads the JSON.

    Example: stallfree analyze my_job.py:build --json report.json
    """
    from stallfree.analysis import analyze as analysis
    from stallfree.analysis import jobs, render

    writable(json, html)
    if html is not None:
        render.plotly()
    dataset, arguments, step = jobs.load_job(job)
    options: dict[str, Any] = {"cache": cache, "device": device, "seconds": seconds}
    overrides = {key: value for key, value in options.items() if value is not None}
    report = analysis.analyze(dataset, step, **arguments | overrides)
    show(str(report), report.data, json)
    if json not in (None, STDOUT):
        typer.echo(f"To compare caches and machines: stallfree predict {json} --cache 50%")
    if html is not None:
        report.html(html)
        typer.echo(f"wrote {html}", err=json == STDOUT)
