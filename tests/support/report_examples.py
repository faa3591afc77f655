"""Reports and a simulation made by hand, and the page as a browser would find it."""

from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import torch

from stallfree.analysis.measure import Rate
from stallfree.analysis.model import Option
from stallfree.analysis.report import Report, make_report
from stallfree.analysis.simulate import Event, run_data

NAME = "Pictures</script><b>&\"'[red]"
"""A data set's name that means harm to a page and to a terminal."""


def make(
    rates: dict[str, float | None], *, name: str = "Source", parted: bool = True, cache: Any = None,
    remedy: Option | None = None, placement: dict[str, Any] | None = None, measured: dict[str, Rate] | None = None,
    workers: int = 4,
) -> Report:  # fmt: skip
    """A report with these rates: G, P, P_miss, P_hit, S, C, cold, warm; 10,000 samples of 50,000 bytes."""
    job = {"dataset": name, "samples": 10_000, "batch_size": 32, "num_workers": workers}
    job |= {"loader": "stallfree" if parted else "torch", "parted": parted}
    job |= {"sample_bytes": 50_000.0 if parted else None, "record_bytes": 50_000.0}
    default: dict[str, float | None] = {"G": 1000, "P": 2000, "S": 250, "C": 50_000, "copy": None}
    merged = {**default, "cold": 250, "warm": 1000, **rates}
    merged = {"P_miss": merged["P"], "P_hit": merged["P"], **merged}
    all_rates = {
        name: Rate(None, note="not measured here") if value is None else Rate(float(value), 0.99 * value, 1.01 * value)
        for name, value in merged.items()
    } | (measured or {})
    return make_report(job, torch.device("cpu"), all_rates, cache, [], remedy=remedy, placement=placement)


def report() -> dict[str, Any]:
    """A report in which F crosses P within the range of cache sizes, and C was not measured."""
    rates = {"G": 1234.5, "P": 811.25, "S": 312.5, "C": None, "copy": 100_000.0, "cold": 301.75, "warm": 797.5}
    data = make(rates, name=NAME, workers=2).data
    data["notes"].append("<i>a note</i>")
    return data


def worked_out(prefetch: bool) -> list[Event]:
    """Two loaders of 100 ms, a copy of 10 ms, a step of 40 ms: four batches with constant times, by hand."""
    loads = [(0, 0, 0), (1, 1, 0), (0, 2, 100), (1, 3, 100)]
    ends = [(100, 110, 150), (150, 160, 200), (200, 210, 250), (250, 260, 300)]
    if prefetch:
        ends = [(100, 110, 150), (110, 150, 190), (200, 210, 250), (210, 250, 290)]
    events = [_ms(start, start + 100, f"loader {loader}", "load", batch) for loader, batch, start in loads]
    for batch, (copied, used, done) in enumerate(ends):
        events += [_ms(copied, copied + 10, "copy", "copy", batch), _ms(used, done, "device", "compute", batch)]
    return events


def recording() -> list[Event]:
    """What a real loader may log: fetches ahead of prep, a batch out of the cache, two epochs, a beginning above 0."""
    log = [
        (5000, 5040, "loader 0", "fetch", 0, 1), (5000, 5060, "loader 10", "fetch", 1, 1),
        (5040, 5100, "loader 0", "prep", 0, 1), (5040, 5070, "loader 0", "fetch", 2, 1),
        (5045, 5090, "loader 0", "fetch", 3, 1), (5060, 5110, "loader 10", "prep", 1, 1),
        (5100, 5130, "device", "compute", 0, 1), (5100, 5140, "loader 0", "prep", 2, 1),
        (5130, 5160, "device", "compute", 1, 1), (5140, 5180, "loader 0", "prep", 3, 1),
        (5150, 5155, "gather", "gather", 0, 2), (5160, 5190, "device", "compute", 2, 1),
        (5190, 5220, "device", "compute", 3, 1), (5220, 5250, "device", "compute", 0, 2),
    ]  # fmt: skip
    return [_ms(*event) for event in log]


def _ms(start: int, end: int, actor: str, what: str, batch: int, epoch: int = 0) -> Event:
    return Event(start / 1000, end / 1000, actor, what, batch, epoch)


def simulation(title: str = "two loaders") -> dict[str, Any]:
    """The data of a page with both runs."""
    runs = [
        run_data(name, worked_out(prefetch), seconds=0.3, queue=1, depth=int(prefetch))
        for name, prefetch in (("without prefetch", False), ("with prefetch", True))
    ]
    return {
        "format": "stallfree-simulation", "version": 1, "title": title, "runs": runs, "shown": 1, "pipeline": None,
        "comparison": {
            "seeds": 30, "seconds": 0.3, "singles": [[4, 4], [3, 5]], "law": [20.0, 20.0],
            "first": [{"mean": 4.0, "low": 3.9, "high": 4.1}, {"mean": 4.5, "low": 4.25, "high": 4.75}],
            "steady": [{"mean": 19.987, "low": 19.97, "high": 20.004}, {"mean": 20.0, "low": 20.0, "high": 20.0}],
            "advice": "prefetch gains nothing here: add loaders (3 would keep the device busy)",
        },
    }  # fmt: skip


class Page(HTMLParser):
    """What a browser would find: every element with its attributes, and the text of each element with an id."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._open: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.elements.append((tag, named))
        if tag not in ("meta", "link", "input", "br"):
            self._open.append((tag, named.get("id")))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, text: str) -> None:
        tags = [tag for tag, _ in self._open]
        if tags and tags[-1] not in ("script", "style"):
            self.text += text
        for _, name in self._open:
            if name is not None:
                self.texts[name] = self.texts.get(name, "") + text
        if "th" in tags or "td" in tags:
            self.tables[-1][-1][-1] += text

    def with_attributes(self) -> Iterator[tuple[str, str, str]]:
        """(tag, attribute, value) of all."""
        for tag, attributes in self.elements:
            for name, value in attributes.items():
                yield tag, name, value or ""
