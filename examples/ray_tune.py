"""Search hyper-parameters with Ray Tune: eight trials under HyperBand, each picture is decoded once for all of them.

Only the loader differs from a search without stallfree. Each trial is a process, which HyperBand may pause, go on with
in another process, or end. On several hosts each host has a group of its own under the same name, because the jobs of a
group meet in a folder in the host's memory: Ray is the engine across hosts, and nothing is to be set up for it.
"""

import io
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from PIL import Image, ImageDraw
from ray import tune
from ray.tune.schedulers import HyperBandScheduler
from torch import nn
from torch.nn import functional

import stallfree as sf

TRIALS, EPOCHS, PICTURES = 8, 9, 512


class Shapes(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """JPEG pictures, each with a disc, a square or a line. Every decode adds a byte to the file `log`."""

    def __init__(self, count: int, seed: int, log: Path) -> None:
        dice = random.Random(seed)
        self.files = [draw(dice, id % 3) for id in range(count)]
        self.log = log

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        with open(self.log, "ab") as log:
            log.write(b".")
        with Image.open(io.BytesIO(self.files[id])) as picture:
            pixels = np.array(picture.convert("L").resize((32, 32)), np.float32)
        return torch.from_numpy(pixels)[None] / 128 - 1, id % 3


def draw(dice: random.Random, shape: int) -> bytes:
    """A JPEG file of 256 x 256 pixels with one shape somewhere in the noise."""
    picture = Image.effect_noise((256, 256), 40)
    left, top, size, shade = (dice.randint(*limits) for limits in ((0, 128), (0, 128), (64, 128), (190, 255)))
    brush, box = ImageDraw.Draw(picture), (left, top, left + size, top + size)
    if shape == 2:
        brush.line(box, shade, width=16)
    else:
        (brush.ellipse, brush.rectangle)[shape](box, shade)
    picture.save(file := io.BytesIO(), "JPEG")
    return file.getvalue()


def make_model(width: int) -> nn.Module:
    look = [nn.Conv2d(1, width, 5, 2, 2), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*look, nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(32 * width, 3))


def train(config: dict[str, Any], group: str, data: Shapes, held_out: list[torch.Tensor]) -> None:
    """One trial: reports after each epoch how often its model is right on held-out pictures."""
    model = make_model(config["width"])
    optimizer = torch.optim.Adam(model.parameters(), config["rate"])
    first = 0
    if paused := tune.get_checkpoint():
        with paused.as_directory() as folder:
            saved = torch.load(Path(folder, "trial.pt"))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epochs"]
    # A trial that begins while others are in mid-epoch takes part at once, and catches up on what it has missed.
    with sf.SharedLoader(data, group=group, batch_size=32, shuffle=True) as loader:
        for epoch in range(first, EPOCHS):
            for pictures, labels in loader:
                optimizer.zero_grad()
                functional.cross_entropy(model(pictures), labels).backward()
                optimizer.step()
            with torch.no_grad():
                right = float((model(held_out[0]).argmax(1) == held_out[1]).float().mean())
            Path("state").mkdir(exist_ok=True)  # in a folder that Ray made for this trial
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
            torch.save(saved, "state/trial.pt")
            tune.report({"right": right}, checkpoint=tune.Checkpoint.from_directory("state"))


def main() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray reports nothing to anybody
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "decodes")
        data = Shapes(PICTURES, 0, log)
        unseen = Shapes(96, 1, Path(os.devnull))
        held_out = torch.utils.data.default_collate([unseen[id] for id in range(len(unseen))])
        trial = tune.with_parameters(train, group=f"search-{os.getpid()}", data=data, held_out=held_out)
        scheduler = HyperBandScheduler(max_t=EPOCHS, reduction_factor=3)
        tuner = tune.Tuner(
            tune.with_resources(trial, {"cpu": 0.25}),  # all eight at once on two processors
            param_space={"width": tune.choice([4, 8, 16, 32]), "rate": tune.loguniform(1e-4, 1e-1)},
            tune_config=tune.TuneConfig(metric="right", mode="max", num_samples=TRIALS, scheduler=scheduler),
            # Without `stop`, HyperBand would pause those that have all their epochs, and may never end the last.
            run_config=tune.RunConfig(storage_path=folder, verbose=0, stop={"training_iteration": EPOCHS}),
        )
        results = tuner.fit()
        decodes = log.stat().st_size / PICTURES
    ray.shutdown()

    metrics = [results[trial].metrics or {} for trial in range(len(results))]
    epochs = [metric["training_iteration"] for metric in metrics]
    best = results.get_best_result()
    right = (best.metrics or {})["right"]
    early = sum(count < EPOCHS for count in epochs)
    print(f"{TRIALS} trials, {early} of them ended early; best: {right:.0%} right, {best.config}")
    print(f"trained for {sum(epochs)} epochs in all; each picture was decoded {decodes:.1f} times")


if __name__ == "__main__":
    main()
