"""`stallfree predict`: predicts the effect of another cache, more CPUs, faster storage, more devices or more jobs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stallfree.cli._output import JsonFlag, print_json


def predict(
    report: Annotated[Path, typer.Argument(help="What `stallfree analyze --json` wrote.", metavar="REPORT")],
    cache: Annotated[
        str | None, typer.Option(help="Size of the cache, such as 50% of the samples, or 64GiB.", metavar="SIZE")
    ] = None,
    cpus: Annotated[int | None, typer.Option(help="Cores for prep, with a worker on each.", metavar="N")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Bandwidth of the storage, such as 530MB/s.", metavar="RATE")
    ] = None,
    devices: Annotated[int, typer.Option(help="Devices that share each batch.", metavar="N")] = 1,
    jobs: Annotated[int, typer.Option(help="Equal jobs on the host, each with its own devices.", metavar="N")] = 1,
    json: JsonFlag = False,
) -> None:
    """Predict a job's speed on another machine or with a cache.

    Prints the bottleneck, the speed, and what would help.

    Example: stallfree predict report.json --cache 50% --cpus 16
    """
    from stallfree.analysis.report import Report

    prediction = Report.load(report).predict(cache=cache, cpus=cpus, storage=storage, devices=devices, jobs=jobs)
    if json:
        print_json({key: None if value == float("inf") else value for key, value in asdict(prediction).items()})
    else:
        typer.echo(str(prediction))
