"""The rates G, P, S, C and F of three small networks, in the form of the appendix of the DS-Analyzer paper."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.harness import Options, Report, run_child, scratch_folder
from benchmarks.photos import SIDE, CropAndFlip, make_photos

NAME = "model_rates"
QUESTION = "What are G, P, S, C and F of three small networks, and what follows for them?"
NETWORKS = ("convnet", "resnet-10", "vit-micro")
BATCH = 32
WORKERS = 2
BANDWIDTH = 60
CACHE = "35%"
CLASSES = 10


def run(options: Options) -> Report:
    with scratch_folder() as scratch:
        what = make_photos(scratch / "photos", options.data, 400 if options.quick else 2000)
        params = {"photos": str(scratch / "photos"), "seconds": 1.0 if options.quick else 10.0}
        found = {
            name: run_child("benchmarks.model_rates", params | {"network": name}, scratch=scratch) for name in NETWORKS
        }
    rows = []
    for name in NETWORKS:
        data = found[name]
        rates, cold, warm = data["rates"], data["shares"]["cold"], data["shares"]["warm"]
        advice = data["advice"][0] if data["advice"] else {"do": "nothing", "gain": 1.0}
        rows.append(
            [
                f"{name} ({data['parameters']:,} parameters)",
                *(_show(rates[letter]) for letter in "GPSCF"),
                _show(data["runs"]["cold"]),
                _show(data["runs"]["warm"]),
                f"{cold['fetch_stall']:.0%}, {warm['prep_stall']:.0%}",
                f"{advice['do']}: {advice['gain']:.2f}x",
            ]
        )
    return Report(
        columns=["network", *"GPSCF", "cold", "warm", "fetch stall cold, prep stall warm", "first advice, predicted"],
        rows=rows,
        notes=[
            f"{what} behind a `ThrottledSource` of {BANDWIDTH} MB/s; decode, random crop of {SIDE} pixels, flip; "
            f"batches of {BATCH}, {WORKERS} workers; training on the CPU, which prep and compute share. Samples/s with "
            f"95% intervals, from `stallfree.analyze(..., cache={CACHE!r})`: F is for that cache, cold and "
            "warm are the job without one and with all data in memory.",
        ],
        versions=found[NETWORKS[0]]["versions"],
        raw=found,
    )


def _show(rate: dict[str, Any]) -> str:
    if rate["low"] is None:
        return f"{rate['value']:,.0f}"
    return f"{rate['value']:,.0f} (±{100 * (rate['high'] / rate['value'] - 1):.1f}%)"


def network(name: str) -> nn.Module:
    """One of the three, for pictures of 224 pixels."""
    if name == "convnet":
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        return nn.Sequential(nn.AvgPool2d(2), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    if name == "resnet-10":
        blocks = [Residual(before, after) for before, after in ((16, 16), (16, 32), (32, 64), (64, 128))]
        stem = [nn.Conv2d(3, 16, 7, stride=4, padding=3), nn.BatchNorm2d(16), nn.ReLU()]
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))
    layer = nn.TransformerEncoderLayer(96, 3, 192, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Conv2d(3, 96, 32, stride=32),
        nn.Flatten(2),
        Turned(),
        nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        Mean(),
        nn.Linear(96, CLASSES),
    )


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.inner = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x) + self.around(x))


class Turned(nn.Module):
    """(batch, channels, places) to (batch, places, channels)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


class Mean(nn.Module):
    """The mean over the places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def child() -> None:
    given = json.loads(sys.argv[1])
    torch.manual_seed(0)
    model = network(given["network"])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(batch: Any) -> None:
        pictures, labels = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pictures.float() / 255), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    source = sf.testing.ThrottledSource(sf.ImageFolder(given["photos"], CropAndFlip()), bandwidth=BANDWIDTH * 1e6)
    report = sf.analyze(
        source, step, batch_size=BATCH, num_workers=WORKERS, cache=CACHE, seconds=given["seconds"], progress=False
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    emit(report.data | {"parameters": parameters}, stallfree=version("stallfree"), torch=torch.__version__)


if __name__ == "__main__":
    child()
