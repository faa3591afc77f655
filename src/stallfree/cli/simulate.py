"""`stallfree simulate`: loaders, queue, copy and device, simulated or from the log of a real loader."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stallfree.cli._output import writable, writable_page
from stallfree.errors import InputError, argument_conflict
from stallfree.units import format_seconds, parse_seconds

if TYPE_CHECKING:
    from stallfree.analysis.simulate import Pipeline


def simulate(
    loaders: Annotated[int | None, typer.Option(help="Loader processes.", metavar="W")] = None,
    load: Annotated[str | None, typer.Option(help="A loader's time for a batch, such as 80ms.", metavar="TIME")] = None,
    transfer: Annotated[str | None, typer.Option(help="The copy of a batch to the device.", metavar="TIME")] = None,
    compute: Annotated[str | None, typer.Option(help="The step.", metavar="TIME")] = None,
    prefetch: Annotated[
        bool, typer.Option("--prefetch", help="Show the run with a prefetcher first. The table has both.")
    ] = False,
    variation: Annotated[float, typer.Option(help="Coefficient of variation of all times.", metavar="SHARE")] = 0.1,
    seeds: Annotated[int, typer.Option(help="Runs of which the means are taken.", metavar="N")] = 30,
    seconds: Annotated[
        float | None,
        typer.Option(help="How much is counted as the beginning, and animated: 1, or all of a log.", metavar="SECONDS"),
    ] = None,
    events: Annotated[
        Path | None, typer.Option(help="Show this log of a real loader instead of a simulation.", metavar="FILE")
    ] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write the figures and the events.", metavar="FILE")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write an animated page.", metavar="FILE")] = None,
) -> None:
    """Simulate a pipeline without and with a prefetcher: what it trains at first, and in the steady state."""
    writable(json_)
    writable_page(html)
    console = Console(highlight=False)
    times = {"--load": load, "--transfer": transfer, "--compute": compute}
    if events is not None:
        if given := [name for name, value in {"--loaders": loaders, **times}.items() if value is not None]:
            raise argument_conflict(
                f"--events shows a log and simulates nothing: leave out {', '.join(given)}, or --events"
            )
        data = _recorded(events, seconds, console)
    else:
        pipeline = _pipeline(loaders, times, prefetch, variation)
        data = _simulated(pipeline, seeds, 1.0 if seconds is None else seconds, console)
    data = {"format": "stallfree-simulation", "version": 1, **data}
    if json_ is not None:
        json_.write_text(json.dumps(data, allow_nan=False) + "\n", encoding="utf-8")
        console.print(Text(f"wrote {json_}"), soft_wrap=True)
    if html is not None:
        from stallfree.report import simulation_page

        html.write_text(simulation_page(data), encoding="utf-8")
        console.print(Text(f"wrote {html}"), soft_wrap=True)


def _pipeline(loaders: int | None, times: dict[str, str | None], prefetch: bool, variation: float) -> Pipeline:
    from stallfree.analysis.simulate import Pipeline

    missing = [name for name, value in {"--loaders": loaders, **times}.items() if value is None]
    if loaders is None or missing:
        raise argument_conflict(
            f"{', '.join(missing)} missing: give, for instance, --loaders 8 --load 80ms --transfer 15ms "
            "--compute 30ms, or a log with --events"
        )
    load, transfer, compute = (parse_seconds(text, name) for name, text in times.items() if text is not None)
    return Pipeline(loaders, load, transfer, compute, prefetch, variation=variation)


def _simulated(pipeline: Pipeline, seeds: int, seconds: float, console: Console) -> dict[str, Any]:
    from stallfree.analysis.simulate import compare
    from stallfree.analysis.simulate import simulate as run_pipeline
    from stallfree.report import run_data

    runs = []
    with console.status("simulating"):
        figures = asdict(compare(pipeline, seeds=seeds, seconds=seconds))
        for prefetch, name in enumerate(("without prefetch", "with prefetch")):  # of seed 0
            run = run_pipeline(replace(pipeline, prefetch=bool(prefetch)), seconds=seconds)
            places = {"queue": pipeline.queue_size, "depth": pipeline.depth if prefetch else 0}
            runs.append(run_data(name, (*run.events, *run.unfinished), seconds=seconds, **places))
    title = _title(pipeline)
    _show(title, figures, console)
    return {
        "title": title,
        "runs": runs,
        "shown": int(pipeline.prefetch),
        "pipeline": asdict(pipeline),
        "comparison": figures,
    }


def _title(pipeline: Pipeline) -> str:
    load, transfer, compute = map(format_seconds, (pipeline.load, pipeline.transfer, pipeline.compute))
    return (
        f"{pipeline.loaders} loader{'' if pipeline.loaders == 1 else 's'}, {load} to load a batch, {transfer} to copy "
        f"it, {compute} to compute; variation {pipeline.variation:g}"
    )


def _show(title: str, comparison: dict[str, Any], console: Console) -> None:
    from stallfree.report.simulation import CAPTION, LAW, comparison_rows

    table = Table(title=CAPTION, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("without prefetch", justify="right")
    table.add_column("with prefetch", justify="right")
    for row in comparison_rows(comparison):
        table.add_row(*row)
    console.print(title, soft_wrap=True)
    console.print()
    console.print(table)
    for line in (LAW, comparison["caution"]):
        console.print(line, soft_wrap=True)
    console.print(comparison["advice"], style="bold", soft_wrap=True)


def _recorded(path: Path, seconds: float | None, console: Console) -> dict[str, Any]:
    from stallfree.events import read_events
    from stallfree.report import run_data

    if seconds is not None and not 0 < seconds < math.inf:
        raise InputError(f"--seconds {seconds:g}: give a number above 0")
    run = run_data(path.name, read_events(path), seconds=seconds)
    _show_log(run, console)
    return {"title": path.name, "runs": [run], "shown": 0, "pipeline": None, "comparison": None}


def _show_log(run: dict[str, Any], console: Console) -> None:
    """Print the number and duration of each process's events within the shown time."""
    spent: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for start, end, actor, what, *_ in run["events"]:
        spent[actor, what].append(end - start)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("who", "what"):
        table.add_column(heading)
    for heading in ("batches", "mean", "share of the time"):
        table.add_column(heading, justify="right")
    for (actor, what), times in sorted(spent.items()):
        mean = format_seconds(sum(times) / len(times))
        table.add_row(Text(actor), Text(what), f"{len(times):,}", mean, f"{sum(times) / run['seconds']:.0%}")
    console.print(Text(f"{run['name']}: {format_seconds(run['seconds'])}"))
    console.print(table)
    if run["left_out"]:
        console.print(f"{run['left_out']:,} later events are left out: give --seconds, or a shorter log")
