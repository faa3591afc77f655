"""What the demo shows at its end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stallfree.cli._demo_rates import Rates
from stallfree.cli._demo_train import Epoch


def report(epochs: Sequence[Epoch], rates: Rates) -> RenderableType:
    """All tables of the demo."""
    return Group(_happened(epochs), "", _bounds(epochs, rates), _measured(rates), "", _summary(epochs))


def _happened(epochs: Sequence[Epoch]) -> Table:
    table = _table("What happened", "seconds", "samples/s", "storage", "fetch stall", "prep stall", "hits")
    for epoch in epochs:
        table.add_row(
            *_names(epoch),
            f"{epoch.seconds:.2f}",
            f"{epoch.rate:,.0f}",
            f"{epoch.waits.storage_bytes / 1e6:,.0f} MB",
            f"{epoch.waits.fetch / epoch.seconds:.0%}",
            f"{epoch.waits.prep / epoch.seconds:.0%}",
            f"{epoch.hit_ratio:.0%}",
        )
    return table


def _bounds(epochs: Sequence[Epoch], rates: Rates) -> Table:
    headings = ["F fetch", "P prep", "G train", "min", "reached", "share"]
    shared = rates.cores is not None
    table = _table("What the measured rates allow, in samples/s", *headings, *(["CPU limit"] if shared else []))
    for epoch in epochs:
        bound = rates.bound(epoch.hit_ratio)
        row = [_rate(rate) for rate in (bound.fetch, bound.prep, bound.compute, bound.rate, epoch.rate)]
        row.append(f"{epoch.rate / bound.rate:.0%}")
        if shared:
            row.append(_rate(rates.cpu_limit(epoch.hit_ratio)))
        table.add_row(*_names(epoch), *row)
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("loader", no_wrap=True)
    table.add_column("epoch", justify="right", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _names(epoch: Epoch) -> tuple[str, str]:
    return epoch.loader if epoch.number == 1 else "", str(epoch.number)


def _rate(rate: float) -> str:
    if rate < 1e5:
        return f"{rate:,.0f}"
    return f"{rate / 1e3:,.0f} k" if rate < 1e6 else f"{rate / 1e6:,.0f} M"


def _measured(rates: Rates) -> Text:
    lines = [
        f"Measured alone, in samples/s: storage S = {_rate(rates.storage)}, cache C = {_rate(rates.cache)}, prep P = "
        f"{_rate(rates.prep_miss)} after a miss and {_rate(rates.prep_hit)} after a hit, training G = "
        f"{_rate(rates.compute)}.",
        "F = 1 / (x/C + (1-x)/S), where x is the share of hits; min is min(F, P, G).",
    ]
    if rates.cores is not None:
        lines.append(
            f"Here the network trains on the CPU, so prep and training share {rates.cores} cores and cannot both reach "
            "their rates at once: the CPU limit is what the cores allow for both together."
        )
    return Text("\n".join(lines))


def _summary(epochs: Sequence[Epoch]) -> Text:
    lines = Text()
    for name in dict.fromkeys(epoch.loader for epoch in epochs):
        own = [epoch for epoch in epochs if epoch.loader == name]
        lines.append(f"{name}: ", "bold")
        lines.append(f"{sum(epoch.seconds for epoch in own):.1f} s for {len(own)} epochs")
        if len(own) > 1:
            later = [epoch.seconds for epoch in own[1:]]
            lines.append(f", {sum(later) / len(later):.2f} s for each after the first")
        last = own[-1]
        lines.append(f"; {last.correct / last.samples:.0%} of the last epoch's pictures classed right\n")
    lines.rstrip()
    return lines
