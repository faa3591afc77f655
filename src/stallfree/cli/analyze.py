"""`stallfree analyze`: measures where a job waits, with recommendations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def analyze(
    job: Annotated[
        str,
        typer.Argument(
            help="A function that returns (dataset, loader_arguments, step): FILE.py:NAME or MODULE:NAME.",
            metavar="my_job.py:build",
        ),
    ],
    cache: Annotated[
        str | None, typer.Option(help="What the job may cache, such as 4GiB or 50%.", show_default="no cache")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where the step works.", show_default="cpu")] = None,
    seconds: Annotated[
        float, typer.Option(help="The longest time for each of the eight runs, all rounds together.")
    ] = 10.0,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON, for `stallfree predict`.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write it as a page that works offline.")] = None,
) -> None:
    """Measure where a training job waits: compute, copies, prep, storage. Needs no root and changes nothing."""
    from stallfree.analysis import analyze as run
    from stallfree.analysis.job import load_job
    from stallfree.cli._output import writable, writable_page

    writable(json)
    writable_page(html)
    dataset, arguments, step = load_job(job)
    given: dict[str, Any] = {"cache": cache, "device": device, "seconds": seconds}
    report = run(dataset, step, **{**arguments, **{key: value for key, value in given.items() if value is not None}})
    typer.echo(str(report))
    if json is not None:
        report.save(json)
        typer.echo(f"Report: {json}. What would be if: stallfree predict {json} --cache 50%")
    if html is not None:
        report.html(html)
        typer.echo(f"Page: {html}")
