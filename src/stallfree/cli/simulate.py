"""`stallfree simulate`: loaders, queue, copy and device, simulated or from the log of a real loader."""

from pathlib import Path
from typing import Annotated

import typer

from stallfree.cli._output import JsonFile, show, writable, write
from stallfree.errors import argument_conflict
from stallfree.units import parse_seconds, parse_whole


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
        typer.Option(help="How much is counted as the beginning, and animated: 1, or all of a log.", metavar="N"),
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
    from stallfree.analysis import render
    from stallfree.analysis import simulate as simulation

    writable(json, html)
    if html is not None:
        render.plotly()
    times = {"--load": load, "--transfer": transfer, "--compute": compute}
    arguments = [name for name, value in {"--loaders": loaders, **times}.items() if value is not None]
    if len(arguments) != (4 if events is None else 0):
        raise argument_conflict(
            f"given: {', '.join(arguments) or 'nothing'}. Give all of --loaders 8 --load 80ms --transfer 15ms "
            "--compute 30ms, or none of them and a log with --events"
        )
    if events is not None:
        run = simulation.run_data(events.name, simulation.read_events(events), seconds=seconds)
        data = simulation.page_data(events.name, [run])
    else:
        spent = [parse_seconds(text or "", name) for name, text in times.items()]
        count = parse_whole(loaders, "--loaders", 1)
        pipeline = simulation.Pipeline(count, spent[0], spent[1], spent[2], prefetch, variation=variation)
        data = simulation.simulation_data(pipeline, seeds=seeds, seconds=1.0 if seconds is None else seconds)
    show(f"{data['title']}\n{render.as_text(simulation.simulation_blocks(data))}", data, json)
    if html is not None:
        write(html, simulation.simulation_page(data))
