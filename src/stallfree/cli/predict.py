"""`stallfree predict`: predicts the effect of another cache, more CPUs, faster storage, more devices or more jobs."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer


def predict(
    report: Annotated[Path, typer.Argument(help="What `stallfree analyze --json` wrote.", metavar="report.json")],
    cache: Annotated[str | None, typer.Option(help="Size of the cache, such as 50% of the samples, or 64GiB.")] = None,
    cpus: Annotated[int | None, typer.Option(help="Cores that prepare, with a worker on each.")] = None,
    storage: Annotated[str | None, typer.Option(help="Bandwidth of the storage, such as 530MB/s.")] = None,
    devices: Annotated[int, typer.Option(help="Devices that share each batch.")] = 1,
    jobs: Annotated[int, typer.Option(help="Equal jobs on the host, each with devices of its own.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Predict a job's speed from its report, with F, P and G and which of them binds."""
    from stallfree.analysis.report import Report

    found = Report.load(report).predict(cache=cache, cpus=cpus, storage=storage, devices=devices, jobs=jobs)
    typer.echo(dumps(asdict(found), indent=1) if json else str(found))
