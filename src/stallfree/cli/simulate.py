"""`stallfree simulate`: loaders, queue, copy and device, simulated or from the log of a real loader."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from stallfree.cli._output import JsonFile, console, table, writable, writable_page, write_json
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
    json: JsonFile = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write an animated page.", metavar="FILE")] = None,
) -> None:
    """Simulate a pipeline without and with a prefetcher.

    Prints what a prefetcher gains, at first and in the steady state; or, with --events, what a real loader did.

    Example: stallfree simulate --loaders 8 --load 80ms --transfer 15ms --compute 30ms
    """
    writable(json)
    writable_page(html)
    out = console(json)
    times = {"--load": load, "--transfer": transfer, "--compute": compute}
    if events is not None:
        if given := [name for name, value in {"--loaders": loaders, **times}.items() if value is not None]:
            raise argument_conflict(
                f"--events shows a log and simulates nothing: leave out {', '.join(given)}, or --events"
            )
        data = _recorded(events, seconds, out)
    else:
        pipeline = _pipeline(loaders, times, prefetch, variation)
        data = _simulated(pipeline, seeds, 1.0 if seconds is None else seconds, out)
    data = {"format": "stallfree-simulation", "version": 1, **data}
    write_json(json, data, out)
    if html is not None:
        from stallfree.report import simulation_page

        html.write_text(simulation_page(data), encoding="utf-8")
        out.out(f"wrote {html}")


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


def _simulated(pipeline: Pipeline, seeds: int, seconds: float, out: Console) -> dict[str, Any]:
    from stallfree.analysis.simulate import compare
    from stallfree.analysis.simulate import simulate as run_pipeline
    from stallfree.report import run_data

    runs = []
    with Console(stderr=True).status("simulating"):
        figures = asdict(compare(pipeline, seeds=seeds, seconds=seconds))
        for prefetch, name in enumerate(("without prefetch", "with prefetch")):  # of seed 0
            run = run_pipeline(replace(pipeline, prefetch=bool(prefetch)), seconds=seconds)
            places = {"queue": pipeline.queue_size, "depth": pipeline.depth if prefetch else 0}
            runs.append(run_data(name, (*run.events, *run.unfinished), seconds=seconds, **places))
    title = _title(pipeline)
    _show(title, figures, out)
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


def _show(title: str, comparison: dict[str, Any], out: Console) -> None:
    from stallfree.report.simulation import CAPTION, LAW, comparison_rows

    out.out(title)
    out.out(comparison["advice"], style="bold")
    out.out(comparison["caution"])
    shown = table(CAPTION, [""], ("without prefetch", "with prefetch"))
    for row in comparison_rows(comparison):
        shown.add_row(*row)
    out.print("", shown)
    out.out(LAW)


def _recorded(path: Path, seconds: float | None, out: Console) -> dict[str, Any]:
    """Print the number and duration of each process's events within the shown time. Returns the data of the page."""
    from stallfree.events import read_events
    from stallfree.report import run_data

    if seconds is not None and not 0 < seconds < math.inf:
        raise InputError(f"--seconds {seconds:g}: give a number above 0")
    run = run_data(path.name, read_events(path), seconds=seconds)
    spent: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for start, end, actor, what, *_ in run["events"]:
        spent[actor, what].append(end - start)
    shown = table(None, ("process", "step"), ("batches", "mean", "share of the time"))
    for (actor, what), times in sorted(spent.items()):
        mean = format_seconds(sum(times) / len(times))
        shown.add_row(escape(actor), escape(what), f"{len(times):,}", mean, f"{sum(times) / run['seconds']:.0%}")
    out.out(f"{run['name']}: {format_seconds(run['seconds'])}")
    out.print(shown)
    if run["left_out"]:
        out.out(f"{run['left_out']:,} later events are left out: give --seconds, or a shorter log")
    return {"title": path.name, "runs": [run], "shown": 0, "pipeline": None, "comparison": None}
