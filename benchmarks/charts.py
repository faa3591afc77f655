"""Draws the charts of the benchmark pages from `benchmarks/results/NAME.json`: `charts(content)` gives SVG files.

A chart is declared by the columns of the result's table; a cell's value is its first number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1c2b2f}.end{text-anchor:end}.mid{text-anchor:middle}.faint{fill:#526166}"
    ".ours{fill:#00796b}.theirs{fill:#9fb3b8}.c0{fill:#00796b}.c1{fill:#c77700}.c2{fill:#3f5fa8}.c3{fill:#8a4f9e}"
    ".l0{stroke:#00796b}.l1{stroke:#c77700}.l2{stroke:#3f5fa8}.l3{stroke:#8a4f9e}.line{fill:none;stroke-width:2}"
    ".axis{fill:none;stroke:#8a979b}"
    "@media (prefers-color-scheme:dark){text{fill:#e3ecee}.faint{fill:#a3b4b9}.ours,.c0{fill:#4db6ac}"
    ".theirs{fill:#5f757b}.c1{fill:#ffb74d}.c2{fill:#9fb4ec}.c3{fill:#ce93d8}.l0{stroke:#4db6ac}.l1{stroke:#ffb74d}.l2{stroke:#9fb4ec}"
    ".l3{stroke:#ce93d8}}"
)
WIDTH = 720


@dataclass(frozen=True)
class Bars:
    """One bar per row, or a group of bars if there are several values.

    Attributes:
        values: columns with the values.
        unit: printed below the bars.
        labels: columns that name a row.
        rows: which rows; all without.
    """

    values: tuple[int, ...]
    unit: str
    labels: tuple[int, ...] = (0,)
    rows: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Lines:
    """Values over a column of numbers.

    Attributes:
        x: column of the abscissa.
        values: columns with values; one line each.
        unit: printed beside the axes.
        by: a column whose different cells give a line each.
        rows: which rows; all without.
    """

    x: int
    values: tuple[int, ...]
    unit: str
    by: int | None = None
    rows: tuple[int, ...] | None = None


CHARTS: dict[str, Bars | Lines] = {
    "prepared_224": Bars((1,), "samples/s"),
    "prepared_32": Bars((1,), "samples/s"),
    "jpeg_warm": Bars((1,), "samples/s"),
    "fast_prep": Bars((1,), "samples/s"),
    "plain_loader": Bars((4,), "times torch's speed; 1.00: equal", (0, 1)),
    "cold_storage": Bars((5,), "seconds per epoch after the first"),
    "tiers": Bars((2,), "samples/s in the second epoch"),
    "bound": Bars((10,), "share of min(F, P, G)", (0, 1)),
    "real_programs": Bars((5,), "times torch's speed on warm files, behind 20 MB/s", rows=tuple(range(11))),
    "end_to_end": Bars((2, 3, 4), "seconds for five epochs"),
    "auto_cache": Bars((3, 4), "times the samples/s"),
    "lru_formula": Lines(0, (1, 2, 3), "hit ratio"),
    "smart_cache": Bars((2,), "steps/s", (0, 1)),
    "shared_jobs": Bars((4,), "samples/s of each job", (0, 1)),
    "shared_storage": Bars((3,), "samples/s of each job", (0, 1)),
    "shared_search": Bars((1,), "seconds for eight trials"),
    "importance_counts": Bars((4,), "storage operations per epoch / samples, cache of 20%"),
    "importance_time": Bars((3,), "seconds per epoch"),
    "importance_accuracy": Lines(4, (5,), "top-1 in % over storage operations per sample, cache of 20%", by=1),
    "store_partitioned": Bars((2,), "seconds per epoch"),
    "device_law": Bars((2, 4), "batches/s"),
    "cores": Lines(0, (3, 4, 5, 6), "samples/s over workers"),
    "gpu_photos": Bars((2,), "share of an epoch in which the GPU works"),
    "predicted": Lines(1, (3, 4), "samples/s over hits in %, storage of 25 MB/s", rows=tuple(range(7))),
    "ray_workers": Bars((2,), "batches/s", (0, 1)),
}


def chart(content: dict[str, Any]) -> str | None:
    """The chart of a result as an SVG; None if there is none for it."""
    spec = CHARTS.get(content["name"])
    if spec is None:
        return None
    rows = content["rows"] if spec.rows is None else [content["rows"][row] for row in spec.rows]
    if content["name"] == "importance_accuracy":
        rows = [row for row in rows if row[0] == "20%"]
    draw = _bars if isinstance(spec, Bars) else _lines
    title = f"{content['question']} {spec.unit}"
    return _svg(title, *draw(spec, content["columns"], rows))  # type: ignore[operator]


def number(cell: str) -> float | None:
    """The first number of a cell; None if there is none."""
    found = re.search(r"[-+]?\d[\d,]*\.?\d*", cell)
    return float(found.group().replace(",", "")) if found else None


def _shown(cell: str) -> str:
    found = re.search(r"[-+]?\d[\d,]*\.?\d*%?", cell)
    return found.group().rstrip(",") if found else ""


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def _plain(words: str) -> str:
    return words.replace("`", "").replace("**", "")


def _bars(spec: Bars, columns: list[str], rows: list[list[str]]) -> tuple[int, list[str]]:
    parts, top = [], 18
    most = max(value for row in rows for column in spec.values if (value := number(row[column])) is not None)
    left, room = 300, WIDTH - 300 - 70
    if len(spec.values) > 1:
        for place, column in enumerate(spec.values):
            parts.append(f'<rect x="{left}" y="{top - 10}" width="10" height="10" class="c{place}"/>')
            parts.append(_text(left + 16, top, _plain(columns[column])))
            top += 18
        top += 6
    for row in rows:
        label = _plain(
            ", ".join(row[column] + (" workers" if columns[column] == "workers" else "") for column in spec.labels)
        )
        lines = list(_wrapped(label, 42))
        shown = [(place, column) for place, column in enumerate(spec.values) if number(row[column]) is not None]
        thick = 14 if len(spec.values) > 1 else 18
        height = max(16 * len(lines), (thick + 2) * len(shown))
        for line, words in enumerate(lines):
            parts.append(_text(left - 10, top + height / 2 - 8 * (len(lines) - 1) + 16 * line + 4, words, "end"))
        y = top + (height - (thick + 2) * len(shown)) / 2
        for place, column in shown:
            value = number(row[column]) or 0.0
            kind = f"c{place}" if len(spec.values) > 1 else "ours" if _is_ours(label, rows, spec) else "theirs"
            wide = max(1.0, room * value / most)
            parts.append(f'<rect x="{left}" y="{y:g}" width="{wide:.1f}" height="{thick}" rx="2" class="{kind}"/>')
            parts.append(_text(left + wide + 6, y + thick - 4, _shown(row[column])))
            y += thick + 2
        top += height + 9
    parts.append(_text(left, top + 10, spec.unit, "faint"))
    return top + 22, parts


def _is_ours(label: str, rows: list[list[str]], spec: Bars) -> bool:
    """Whether the bar is stallfree's; if no row names another loader, all are."""
    names = ("stallfree", "sharedloader", "redisstore", "one store", "icache", "unbiased", "memory for", "over a disk")
    peers = (
        "torch",
        "ffcv",
        "tf.data",
        "monai",
        "ray data",
        "no cache",
        "own",
        "cache for each",
        "cache of 100%",
        "default",
    )
    low = label.lower()
    labels = "\n".join(row[column] for row in rows for column in spec.labels).lower()
    if not any(re.search(rf"(?<!\w){re.escape(peer)}(?!\w)", labels) for peer in peers):  # whole words
        return True
    return any(name in low for name in names) and "own torch" not in low


def _wrapped(words: str, most: int) -> Iterator[str]:
    line = ""
    for word in words.split():
        if line and len(line) + len(word) + 1 > most:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


def _lines(spec: Lines, columns: list[str], rows: list[list[str]]) -> tuple[int, list[str]]:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for column in spec.values:
            name = _plain(columns[column] if spec.by is None else row[spec.by])
            x, y = number(row[spec.x]), number(row[column])
            if x is not None and y is not None:
                series.setdefault(name, []).append((x, y))
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    low = 0.0 if min(ys) < 0.5 * max(ys) else math.floor(min(ys))
    left, right, top, bottom = 60, WIDTH - 20, 20, 300

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (right - left) * (x - min(xs)) / (max(xs) - min(xs)),
            bottom - (bottom - top) * (y - low) / (max(ys) - low),
        )

    parts = [f'<path d="M{left} {top}V{bottom}H{right}" class="axis"/>']
    for share in (0.0, 0.5, 1.0):
        x, y = min(xs) + share * (max(xs) - min(xs)), low + share * (max(ys) - low)
        parts.append(_text(at(x, 0)[0], bottom + 18, f"{x:.3g}", "mid"))
        parts.append(_text(left - 6, at(0, y)[1] + 4, f"{y:,.4g}", "end"))
    parts.append(_text(left, bottom + 40, spec.unit, "faint"))
    for place, (name, points) in enumerate(series.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in sorted(points)))
        parts.append(f'<polyline points="{path}" class="line l{place % 4}"/>')
        parts += [
            f'<circle cx="{at(*point)[0]:.1f}" cy="{at(*point)[1]:.1f}" r="3" class="c{place % 4}"/>'
            for point in points
        ]
        parts.append(f'<rect x="{left}" y="{bottom + 52 + 18 * place}" width="10" height="10" class="c{place % 4}"/>')
        parts.append(_text(left + 16, bottom + 62 + 18 * place, name))
    return bottom + 60 + 18 * len(series), parts
