"""Whether what `stallfree run` forecasts is reached."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.harness import CHILD_SECONDS, ROOT, BenchmarkError, Check, Json, Options, Report, Spread, say
from benchmarks.harness import scratch_folder as scratch
from benchmarks.photos import CropAndFlip, jpeg_files, make_photos

NAME = "run_forecast"
QUESTION = (
    "`stallfree run` on an unchanged script names one line to change and says what that would reach. Is it reached?"
)
WANTED = 0.1
BATCH, EPOCHS = 32, 4

JOBS = {
    "photographs decoded in `__getitem__`, step that sleeps": ("decoded", True),
    "photographs decoded in `__getitem__`, step that computes": ("decoded", False),
    "photographs from storage of 5 MB/s, decoded and cropped at random, step that sleeps": ("slow", True),
    "photographs from storage of 5 MB/s, decoded and cropped at random, step that computes": ("slow", False),
}


def run(options: Options) -> Report:
    rows, checks, raw = [], [], {}
    rounds = 2 if options.quick else 5
    with scratch() as folder:
        photos = make_photos(folder / "photos", options.data, 160 if options.quick else 480)
        for what, (kind, sleeps) in JOBS.items():
            params = {"photos": str(folder / "photos"), "kind": kind, "sleeps": sleeps}
            told, now, reached = [], [], []
            for number in range(rounds):
                found = _run(params, folder)
                told.append(found["rate"])
                now.append(found["now"])
                reached.append(_changed(params, folder)["rate"])
                say(f"  round {number + 1}: {what}: {now[-1]:.0f}/s, {told[-1]:.0f} told, {reached[-1]:.0f} reached")
            off = Spread.of([one / other - 1 for one, other in zip(told, reached, strict=True)])
            raw[what] = {"told": told, "now": now, "reached": reached}
            rows.append(
                [what, *(Spread.of(figures).show(",.0f") for figures in (now, told, reached)), off.show("+.1%")]
            )
            checks.append(
                Check(
                    f"`stallfree run`, {what}: forecast away from what is reached",
                    abs(off.median),
                    WANTED,
                    "<",
                    ".1%",
                )
            )
    return Report(
        columns=["script", "now, samples/s", "forecast", "reached", "forecast over reached"],
        rows=rows,
        checks=checks,
        notes=[
            f"{photos}; batches of {BATCH}, 2 workers that persist, {EPOCHS} epochs. First the script runs under "
            "`stallfree run`, then with `stallfree.DataLoader` in place of its loader; reached is the median of the "
            f"epochs from the second on. {rounds} pairs in turn; medians (lowest to highest)."
        ],
        versions={name: version(name) for name in ("stallfree", "torch")},
        raw=raw,
    )


def _run(params: Json, folder: Path) -> Json:
    out = folder / "run.json"
    _start(["-m", "stallfree", "run", "--json", str(out), "-m", "benchmarks.run_forecast"], params, folder)
    found: Json = json.loads(out.read_text())
    if found["forecast"] is None:
        raise BenchmarkError(f"nothing was forecast for {params}: {found['total']}")
    return found["forecast"]  # type: ignore[no-any-return]


def _changed(params: Json, folder: Path) -> Json:
    found: Json = json.loads(_start(["-m", "benchmarks.run_forecast"], params | {"changed": True}, folder))
    return found


def _start(command: list[str], params: Json, folder: Path) -> str:
    environment = os.environ | {"STALLFREE_ROOT": str(folder / "stallfree")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, *command, json.dumps(params)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
    )
    if done.returncode:
        raise BenchmarkError(f"{command} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


class Photos(torch.utils.data.Dataset[Any]):
    """Decodes and resizes."""

    def __init__(self, folder: str) -> None:
        self.paths = jpeg_files(Path(folder))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[id]) as picture:
            pixels = np.asarray(picture.convert("RGB").resize((224, 224)))
        return torch.from_numpy(pixels.copy()), id % 10


def _data(kind: str, folder: str) -> Any:
    if kind == "decoded":
        return Photos(folder)
    return sf.testing.ThrottledSource(sf.ImageFolder(folder, transform=CropAndFlip()), bandwidth="5MB/s")


def child() -> None:
    params: dict[str, Any] = json.loads(sys.argv[1])
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": 2, "persistent_workers": True}
    data = _data(params["kind"], params["photos"])
    if params.get("changed"):
        loader: Any = sf.DataLoader(data, cache="auto", **options)
    else:
        loader = torch.utils.data.DataLoader(data, **options)
    torch.set_num_threads(1)
    weights = torch.rand(512, 512)
    seconds = []
    for _ in range(EPOCHS):
        began = time.perf_counter()
        for _ in loader:
            if params["sleeps"]:
                time.sleep(0.01)
            else:
                for _ in range(4):
                    weights = torch.tanh(weights @ weights)
        seconds.append(time.perf_counter() - began)
    emit({"rate": len(data) / statistics.median(seconds[1:])})


if __name__ == "__main__":
    child()
