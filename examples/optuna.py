"""Search hyper-parameters with Optuna: eight trials, four at a time, and each picture is decoded once for all of them.

Only the loader differs from a search without stallfree. The trials are threads of one process here, which is Optuna's
`n_jobs`. Trials in several processes (the same study, kept in a `storage`) share just as well: the name of the group is
all that they need to have in common.
"""

import io
import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn import functional

import stallfree as sf

# This script has the name of the package, and Python looks into the folder of the script first: it must not.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
import optuna  # noqa: E402

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


def train(trial: optuna.Trial, data: Shapes, held_out: list[torch.Tensor]) -> float:
    """One trial: how often its model is right on held-out pictures. The pruner ends it early if that looks bad."""
    model = make_model(trial.suggest_int("width", 4, 32, log=True))
    optimizer = torch.optim.Adam(model.parameters(), trial.suggest_float("rate", 1e-4, 1e-1, log=True))
    # A trial that begins while others are in mid-epoch takes part at once, and catches up on what it has missed. `with`
    # is needed: Optuna keeps what a pruned trial held until the garbage is collected, and the others would wait for it.
    with sf.SharedLoader(data, group=f"search-{os.getpid()}", batch_size=32, shuffle=True) as loader:
        for epoch in range(EPOCHS):
            for pictures, labels in loader:
                optimizer.zero_grad()
                functional.cross_entropy(model(pictures), labels).backward()
                optimizer.step()
            with torch.no_grad():
                right = float((model(held_out[0]).argmax(1) == held_out[1]).float().mean())
            trial.report(right, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
    return right


def main() -> None:
    torch.set_num_threads(1)  # the trials are threads enough
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "decodes")
        data = Shapes(PICTURES, 0, log)
        unseen = Shapes(96, 1, Path(os.devnull))
        held_out = torch.utils.data.default_collate([unseen[id] for id in range(len(unseen))])
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=0),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
        )
        study.optimize(lambda trial: train(trial, data, held_out), n_trials=TRIALS, n_jobs=4)
        decodes = log.stat().st_size / PICTURES

    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    epochs = sum(len(trial.intermediate_values) for trial in study.trials)
    print(f"{TRIALS} trials, {pruned} of them ended early; best: {study.best_value:.0%} right, {study.best_params}")
    print(f"trained for {epochs} epochs in all; each picture was decoded {decodes:.1f} times")


if __name__ == "__main__":
    main()
