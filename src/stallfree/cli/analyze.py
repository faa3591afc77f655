"""`stallfree analyze`: measures where a job waits, with recommendations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stallfree.cli._output import JsonFile, console, writable, writable_page, write_json


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
    device: Annotated[str | None, typer.Option(help="Where the step works. Default: cpu.", metavar="DEVICE")] = None,
    seconds: Annotated[float, typer.Option(help="Time for each of the five runs.", metavar="SECONDS")] = 10.0,
    json: JsonFile = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that works offline.", metavar="FILE")] = None,
) -> None:
    """Measure where a training job waits, and what would help.

    It needs no root and changes nothing. `stallfree predict` reads the JSON.

    Example: stallfree analyze my_job.py:build --json report.json
    """
    from stallfree.analysis.analyze import analyze as run
    from stallfree.analysis.job import load_job

    writable(json)
    writable_page(html)
    dataset, arguments, step = load_job(job)
    options: dict[str, Any] = {"cache": cache, "device": device, "seconds": seconds}
    report = run(dataset, step, **arguments | {key: value for key, value in options.items() if value is not None})
    out = console(json)
    out.out(str(report))
    write_json(json, report.data, out)
    if json is not None:
        out.out(f"To compare caches and machines: stallfree predict {json} --cache 50%")
    if html is not None:
        report.html(html)
        out.out(f"wrote {html}")
