"""Draws the pictures of the documentation: `python docs/pictures/draw.py` writes them beside this file.

An SVG looks by itself whether the page around it is light or dark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

STYLE = """
text{font:14px system-ui,sans-serif;fill:#1c2b2f}
.small{font-size:12px}.faint{fill:#5b6b70}.mid{text-anchor:middle}.end{text-anchor:end}.bold{font-weight:600}
.box{fill:#eef4f4;stroke:#5b7d83}.main{fill:#bfe3dd;stroke:#00796b}.warm{fill:#ffe0b8;stroke:#b26a00}
.cool{fill:#d5def5;stroke:#3f5fa8}.none{fill:none;stroke:#5b7d83}.gone{fill:none;stroke:#8a979b;stroke-dasharray:4 3}
.line{fill:none;stroke:#44575c;stroke-width:1.5}.curve{fill:none;stroke:#00796b;stroke-width:3}
.other{fill:none;stroke:#b26a00;stroke-width:2;stroke-dasharray:7 4}
.third{fill:none;stroke:#3f5fa8;stroke-width:2;stroke-dasharray:2 3}
.head{fill:#44575c}
@media (prefers-color-scheme:dark){
text{fill:#e3ecee}.faint{fill:#a3b4b9}
.box{fill:#26343a;stroke:#8fb0b6}.main{fill:#0d4f48;stroke:#4db6ac}.warm{fill:#5c3f14;stroke:#ffb74d}
.cool{fill:#2b3a63;stroke:#9fb4ec}.none{stroke:#8fb0b6}.gone{stroke:#7d8c91}
.line{stroke:#b4c5ca}.curve{stroke:#4db6ac}.other{stroke:#ffb74d}.third{stroke:#9fb4ec}.head{fill:#b4c5ca}
}
"""


class Point(NamedTuple):
    """In units of the picture, y downwards."""

    x: float
    y: float


class Picture:
    """An SVG that grows by what is drawn on it.

    Args:
        title: text for readers who cannot see it.
        width, height: its size.
    """

    def __init__(self, title: str, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title><style>{STYLE.replace(chr(10), '')}</style>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path class="head" d="M0 0L10 5L0 10z"/></marker></defs>',
        ]

    def text(self, at: tuple[float, float], words: str, kind: str = "mid") -> None:
        """Words whose baseline is at a point: its middle there, unless `kind` says "start" or "end"."""
        self.parts.append(f'<text x="{at[0]:g}" y="{at[1]:g}" class="{kind}">{escape(words)}</text>')

    def box(self, at: tuple[float, float], size: tuple[float, float], kind: str, *lines: str) -> None:
        """A box with its left upper corner at a point, and lines in its middle, the first of several bold."""
        (x, y), (width, height) = at, size
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>')
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            weight = "mid bold" if number == 0 and len(lines) > 1 else "mid"
            self.text((x + width / 2, top + 18 * number), line, weight + (" small" if number else ""))

    def arrow(self, *points: tuple[float, float], ends: str = "end") -> None:
        """An arrow along points, with a head at its "end", or at "both" ends."""
        path = " ".join(f"{'L' if number else 'M'}{x:g} {y:g}" for number, (x, y) in enumerate(points))
        start = ' marker-start="url(#head)"' if ends == "both" else ""
        self.parts.append(f'<path d="{path}" class="line"{start} marker-end="url(#head)"/>')

    def curve(self, points: list[Point], kind: str) -> None:
        """A line through points."""
        path = " ".join(f"{point.x:.1f},{point.y:.1f}" for point in points)
        self.parts.append(f'<polyline points="{path}" class="{kind}"/>')

    def svg(self) -> str:
        """The file."""
        return "\n".join([*self.parts, "</svg>", ""])


def icon() -> Picture:
    """Three bars without a gap."""
    picture = Picture("stallfree", 32, 32)
    for row, (left, kind) in enumerate([(2, "cool"), (6, "main"), (10, "warm")]):
        picture.box((left, 3 + 9 * row), (20, 7), kind)
    return picture


def parts() -> Picture:
    """From storage to the training loop."""
    picture = Picture("Samples are fetched into a cache, prepared into a ring of batches, and trained on", 760, 150)
    names = [("storage",), ("sample cache", "single samples"), ("staging ring", "ready batches"), ("training loop",)]
    kinds = ("box", "main", "main", "warm")
    for place, (lines, kind) in enumerate(zip(names, kinds, strict=True)):
        picture.box((10 + 200 * place, 45), (140, 56), kind, *lines)
        if place < 3:
            picture.arrow((154 + 200 * place, 73), (206 + 200 * place, 73))
            picture.text((180 + 200 * place, 62), ("fetch", "prep", "copy")[place], "mid small")
    for x, words in ((80, "S samples/s"), (280, "C samples/s"), (380, "P samples/s"), (680, "G samples/s")):
        picture.text((x, 128), words, "mid small faint")
    picture.text((380, 25), "memory that all processes of a host share", "mid small faint")
    picture.parts.append('<path d="M210 38V32H550V38" class="none"/>')
    return picture


def speed() -> Picture:
    """The throughput over the share of samples that hit."""
    storage, cache, prep, device, top = 300.0, 60000.0, 900.0, 1080.0, 1300.0
    picture = Picture("Throughput rises with the share of hits until prep or compute is the limit", 560, 300)

    def at(share: float, rate: float) -> Point:
        return Point(60 + 440 * share, 250 - 220 * min(rate, top) / top)

    def fetch(share: float) -> float:
        return 1 / (share / cache + (1 - share) / storage)

    picture.arrow((60, 250), (60, 20))
    picture.arrow((60, 250), (520, 250))
    shares = [place / 100 for place in range(101)]
    picture.curve([at(share, prep) for share in shares], "other")
    picture.curve([at(share, device) for share in shares], "third")
    picture.curve([at(share, fetch(share)) for share in shares if fetch(share) <= top], "none")
    picture.curve([at(share, min(fetch(share), prep, device)) for share in shares], "curve")
    picture.text((508, at(1, prep).y + 5), "P", "start bold")
    picture.text((508, at(1, device).y + 5), "G", "start bold")
    picture.text((at(0.74, top).x - 4, at(0, top).y + 14), "F", "end bold")
    picture.text((74, at(0, storage).y - 8), "S", "start bold")
    picture.text((290, 285), "x, the share of samples that hit", "mid small")
    picture.text((66, 16), "samples/s", "start small")
    knee = at(1 - storage / prep, prep)
    picture.text((knee.x - 8, knee.y + 85), "fetch stalls", "end small faint")
    picture.text((knee.x + 20, knee.y + 85), "prep stalls", "start small faint")
    picture.parts.append(f'<path d="M{knee.x:.1f} {knee.y:.1f}V250" class="gone"/>')
    for share in (0, 0.5, 1):
        picture.text((at(share, 0).x, 267), f"{share:g}", "mid small")
    return picture


def record() -> Picture:
    """The index and the arena."""
    picture = Picture("The index says where a record begins; its blocks lie in the arena", 720, 270)
    picture.text((10, 24), "index, by id", "start bold")
    for row, name in enumerate(["first block", "length", "generation"]):
        picture.text((95, 58 + 30 * row), name, "end small")
    cells = [("1", "5", "", "2", ""), ("210", "96", "", "150", ""), ("7", "3", "8", "5", "0")]
    for row, values in enumerate(cells):
        for column, value in enumerate(values):
            kind = "cool" if column == 1 else "main" if value and values is not cells[2] else "box"
            picture.box((105 + 58 * column, 38 + 30 * row), (54, 26), kind, value)
    for column in range(5):
        picture.text((132 + 58 * column, 30), f"id {column}", "mid small faint")
    picture.text((405, 56), "not resident: no first block.", "start small faint")
    picture.text((405, 74), "The generation changes whenever", "start small faint")
    picture.text((405, 92), "a record comes or goes.", "start small faint")
    picture.text((10, 264), "arena, in blocks", "start bold")
    owners = ["id 0", "id 3", "id 0", "id 3", "id 1", "", "id 0", "", ""]
    for place, owner in enumerate(owners):
        kind = {"id 0": "main", "id 3": "main", "id 1": "cool", "": "gone"}[owner]
        picture.box((10 + 78 * place, 185), (74, 40), kind, owner or "free")
        picture.text((47 + 78 * place, 243), str(place + 1), "mid small faint")
    picture.arrow((190, 120), (359, 183))
    picture.parts.append('<path d="M47 185C80 150 160 150 200 183" class="line" marker-end="url(#head)"/>')
    picture.parts.append('<path d="M206 185C270 150 450 150 512 183" class="line" marker-end="url(#head)"/>')
    picture.text((660, 165), "records of several", "end small faint")
    picture.text((660, 181), "blocks are chains", "end small faint")
    return picture


def ring() -> Picture:
    """The slots, and who has them."""
    picture = Picture("Workers fill slots, the training loop holds leases on them", 720, 240)
    names = [
        ("slot 0", "on lease"),
        ("slot 1", "on lease"),
        ("slot 2", "ready"),
        ("slot 3", "being filled"),
        ("slot 4", "free"),
    ]
    kinds = ("warm", "warm", "main", "cool", "gone")
    for place, (lines, kind) in enumerate(zip(names, kinds, strict=True)):
        picture.box((40 + 130 * place, 100), (116, 52), kind, *lines)
    picture.box((70, 10), (250, 40), "box", "training loop")
    picture.box((410, 10), (170, 40), "box", "workers, threads")
    picture.arrow((130, 98), (130, 54))
    picture.arrow((200, 98), (200, 54))
    picture.arrow((488, 54), (488, 98))
    picture.arrow((356, 98), (300, 54))
    picture.text((345, 84), "next", "start small faint")
    picture.text((496, 80), "one gather", "start small faint")
    picture.parts.append('<path d="M98 156C98 230 612 230 612 158" class="line" marker-end="url(#head)"/>')
    picture.text((355, 189), "when the last tensor of a batch is freed, its slot is free", "mid small")
    return picture


def plan() -> Picture:
    """From seed and epoch to batches."""
    picture = Picture("The order of an epoch is a function of seed and epoch", 720, 190)
    picture.box((10, 60), (120, 50), "box", "seed, epoch")
    picture.arrow((134, 85), (176, 85))
    ids = [7, 2, 9, 0, 4, 8, 1, 5, 3, 6]
    for place, number in enumerate(ids):
        picture.box((182 + 50 * place, 62), (46, 46), "warm" if place < 4 else "main", str(number))
    for batch in range(5):
        left = 182 + 100 * batch
        picture.parts.append(f'<path d="M{left} 52V46H{left + 96}V52" class="none"/>')
        picture.text((left + 48, 38), f"batch {batch}", "mid small")
    picture.text((280, 132), "trained on", "mid small faint")
    picture.text((530, 132), "known ahead: fetched before they are asked for", "mid small faint")
    picture.text((440, 170), "a resume is (seed, epoch, batches done)", "mid small")
    return picture


def window() -> Picture:
    """The window of a Smart Cache over three epochs."""
    picture = Picture("The window moves over a random order of all samples", 720, 210)
    order = [3, 8, 1, 6, 0, 9, 4, 7, 2, 5, 3, 8]
    for epoch in range(3):
        begin = 2 * epoch
        top = 40 + 56 * epoch
        picture.text((84, top + 24), f"epoch {epoch}", "end")
        for place, number in enumerate(order):
            inside, coming = begin <= place < begin + 5, begin + 5 <= place < begin + 7
            kind = "main" if inside else "cool" if coming else "gone"
            picture.box((96 + 51 * place, top), (46, 38), kind, str(number))
    picture.text((96, 24), "the window: trained on, out of memory", "start small")
    picture.text((712, 24), "next: prepared in the background, meanwhile", "end small")
    return picture


def shared() -> Picture:
    """One prep for several jobs."""
    picture = Picture("One coordinator prepares each batch once, and all jobs read it", 720, 240)
    picture.box((10, 90), (120, 54), "box", "source", "and cache")
    picture.arrow((134, 117), (176, 117))
    picture.box((180, 80), (150, 74), "cool", "coordinator", "workers, once", "for all jobs")
    picture.arrow((334, 117), (376, 117))
    for place in range(4):
        picture.box((382, 42 + 40 * place), (110, 34), "main", f"batch {12 + place}")
    for job in range(3):
        picture.box((590, 20 + 74 * job), (120, 54), "warm", f"job {'ABC'[job]}", f"at batch {(12, 13, 15)[job]}")
        picture.arrow((496, (59, 99, 179)[job]), (586, 47 + 74 * job))
    picture.text((437, 225), "a slot is free when all jobs have let go of it", "mid small")
    return picture


def nodes() -> Picture:
    """What a node has, and where it reads a sample."""
    title = "Each node has a server that holds its share, and memory in front of all servers"
    picture = Picture(title, 720, 290)
    for node in range(2):
        left = 10 + 380 * node
        picture.box((left, 34), (320, 210), "none")
        picture.text((left + 160, 24), f"node {node}", "mid bold")
        picture.box((left + 20, 52), (280, 40), "warm", "training processes and workers")
        picture.box((left + 20, 116), (280, 40), "main", "memory of the node: capacity")
        picture.box((left + 20, 190), (280, 44), "cool", "server: capacity_per_node", "ids it owns")
        picture.arrow((left + 80, 114), (left + 80, 94))
        picture.arrow((left + 80, 188), (left + 80, 158))
    picture.parts.append('<path d="M408 200C370 180 350 165 314 142" class="line" marker-end="url(#head)"/>')
    picture.parts.append('<path d="M312 200C350 180 370 165 406 142" class="line" marker-end="url(#head)"/>')
    picture.text((360, 270), "one request per server for a batch; what no server holds comes from storage", "mid small")
    return picture


def timeline(picture: Picture, top: int, rows: list[tuple[str, str, list[tuple[int, int, str]]]]) -> None:
    """Rows of (name, kind, bars), a bar being (begin, length, words)."""
    for row, (name, kind, bars) in enumerate(rows):
        y = top + 34 * row
        picture.text((92, y + 19), name, "end small")
        for begin, length, words in bars:
            picture.box((100 + begin, y), (length - 3, 28), kind, words)


def device() -> Picture:
    """Copies and steps, one after the other and at the same time."""
    picture = Picture("With a prefetcher the copy of a batch and the step on the one before overlap", 720, 230)
    picture.text((100, 20), "one after the other", "start bold")
    copies = [(170 * batch, 60, str(batch)) for batch in range(3)]
    steps = [(170 * batch + 60, 110, str(batch)) for batch in range(3)]
    timeline(picture, 30, [("copy", "cool", copies), ("step", "warm", steps)])
    picture.text((100, 130), "with DevicePrefetcher", "start bold")
    ahead = [(0, 60, "0"), *((60 + 110 * batch, 60, str(batch + 1)) for batch in range(4))]
    steps = [(60 + 110 * batch, 110, str(batch)) for batch in range(4)]
    timeline(picture, 140, [("copy stream", "cool", ahead), ("step", "warm", steps)])
    picture.arrow((100, 218), (690, 218))
    picture.text((700, 222), "t", "start small")
    return picture


def stalls() -> Picture:
    """An epoch with and without stalls."""
    picture = Picture(
        "Without stallfree the GPU waits for fetch and prep; with it the GPU works all the time", 720, 270
    )
    picture.text((100, 20), "before: the GPU waits for data", "start bold")
    fetch = [(190 * batch, 110, "fetch") for batch in range(3)]
    prep = [(190 * batch + 110, 80, "prep") for batch in range(3)]
    step = [(190 * batch + 190, 50, "step") for batch in range(2)]
    timeline(picture, 30, [("storage", "cool", fetch), ("CPUs", "main", prep), ("GPU", "warm", step)])
    picture.text((100, 152), "after: samples come from memory, and the parts overlap", "start bold")
    prep = [(55 * batch, 50, "prep") for batch in range(10)]
    step = [(55 * batch + 50, 55, "step") for batch in range(9)]
    timeline(picture, 162, [("CPUs", "main", prep), ("GPU", "warm", step)])
    picture.arrow((100, 250), (690, 250))
    picture.text((700, 254), "t", "start small")
    return picture


def pictures() -> Iterator[tuple[str, str]]:
    """The names of all files and what is in them."""
    for draw in (icon, parts, speed, record, ring, plan, window, shared, nodes, device, stalls):
        yield f"{draw.__name__}.svg", draw().svg()


if __name__ == "__main__":
    for name, text in pictures():
        Path(__file__).with_name(name).write_text(text, encoding="utf-8")
