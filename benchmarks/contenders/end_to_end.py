"""Trains a small residual network on a folder of photographs for some epochs, with one of several loaders.

`Photographs` and the line in `torch_loader` are the script of a user. `auto` and `shared` change that line; `tfdata`
and `ffcv` replace the data set as well. The time runs from before the data set is made to the end of the last epoch.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from benchmarks.contender import emit
from benchmarks.slow_disk import forget_pages, join
from benchmarks.small_resnet import Net

SIDE = 64
BATCH = 50
WORKERS = 2
SCALE, RATIO = (0.35, 1.0), (0.75, 4 / 3)
RATE = 0.02
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Task:
    """What a contender does.

    Attributes:
        photos: folder with a folder of JPEG files per class.
        who: name of a function in `LOADERS`.
        epochs: to train.
        slow: control group whose processes read `photos` slowly; if given, the page cache is emptied before each epoch.
        group: of the shared loader.
    """

    photos: str
    who: str
    epochs: int
    slow: str = ""
    group: str = "training"


# -- the script of a user ---------------------------------------------------------------------------------------------


class Photographs(torch.utils.data.Dataset[Any]):
    """Pictures in folders that are named after their class: a random part, of one size, mirrored half the time."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*/*.jpg"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file = self.files[index]
        with Image.open(file) as picture:
            pixels = np.array(random_part(picture.convert("RGB")))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), self.classes.index(file.parent.name)


def random_part(picture: Image.Image) -> Image.Image:
    """A random part of the picture, resized; mirrored half the time."""
    area = picture.width * picture.height * random.uniform(*SCALE)
    ratio = random.uniform(*RATIO)
    width = min(picture.width, round((area * ratio) ** 0.5))
    height = min(picture.height, round((area / ratio) ** 0.5))
    left, top = random.randint(0, picture.width - width), random.randint(0, picture.height - height)
    part = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else part


def torch_loader(task: Task) -> Any:
    dataset = Photographs(task.photos)
    return torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )


def auto(task: Task) -> Any:
    import stallfree as sf

    dataset = Photographs(task.photos)
    return sf.DataLoader(
        dataset, batch_size=BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True, cache="auto"
    )


def shared(task: Task) -> Any:
    import stallfree as sf

    dataset = Photographs(task.photos)
    return sf.SharedLoader(dataset, group=task.group, batch_size=BATCH, shuffle=True, num_workers=WORKERS)


def train(loader: Any, task: Task) -> tuple[list[float], float]:
    """The times at which the epochs ended, and the mean loss of the last."""
    torch.manual_seed(0)
    net = Net().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    ends, losses = [], []
    for _ in range(task.epochs):
        if task.slow:
            forget_pages(Path(task.photos))
        losses.clear()
        for pictures, labels in loader:
            scaled = (pictures.float() / 255 - 0.45) / 0.25
            loss = functional.cross_entropy(net(scaled.contiguous(memory_format=torch.channels_last)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += [loss.item()] * len(labels)
        ends.append(time.perf_counter())
    return ends, sum(losses) / len(losses)


# -- the loaders of others --------------------------------------------------------------------------------------------


class Converted:
    """A loader whose batches become pairs of tensors."""

    def __init__(self, loader: Any, convert: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.loader, self.convert = loader, convert

    def __iter__(self) -> Batches:
        return map(self.convert, self.loader)


def tfdata(task: Task) -> Any:
    """tf.data as its guides recommend: the files are cached in memory, then decoded in part, shuffled and batched."""
    import tensorflow as tf

    data = Photographs(task.photos)
    labels = np.array([data.classes.index(file.parent.name) for file in data.files])

    def prepare(encoded: Any, label: Any) -> Any:
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(encoded),
            tf.zeros([1, 0, 4]),
            min_object_covered=0.0,
            aspect_ratio_range=RATIO,
            area_range=SCALE,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        picture = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
        picture = tf.image.random_flip_left_right(tf.image.resize(picture, [SIDE, SIDE]))
        return tf.transpose(tf.cast(picture, tf.uint8), [2, 0, 1]), label

    options = tf.data.Options()
    options.threading.private_threadpool_size = WORKERS
    with tf.device("CPU:0"):
        files = tf.data.Dataset.from_tensor_slices(([str(file) for file in data.files], labels))
        batches = (
            files.map(lambda file, label: (tf.io.read_file(file), label), num_parallel_calls=WORKERS)
            .cache()
            .shuffle(len(labels))
            .map(prepare, num_parallel_calls=WORKERS)
            .batch(BATCH)
            .prefetch(2)
            .with_options(options)
        )
    return Converted(batches, lambda batch: (torch.from_numpy(batch[0].numpy()), torch.from_numpy(batch[1].numpy())))


def ffcv(task: Task) -> Any:
    """FFCV over a file in its own format, JPEG inside, which `convert` has written."""
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage

    picture = [
        RandomResizedCropRGBImageDecoder((SIDE, SIDE), SCALE, RATIO),
        RandomHorizontalFlip(),
        ToTensor(),
        ToTorchImage(channels_last=False),
    ]
    loader = Loader(
        str(Path(task.photos) / "photographs.beton"),
        batch_size=BATCH,
        num_workers=WORKERS,
        os_cache=True,
        order=OrderOption.RANDOM,
        pipelines={"image": picture, "label": [IntDecoder(), ToTensor()]},
    )
    return Converted(loader, lambda batch: (batch[0], batch[1].squeeze(1)))


def convert(task: Task) -> None:
    """Write the file of FFCV."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}
    start = time.perf_counter()
    DatasetWriter(str(Path(task.photos) / "photographs.beton"), fields, num_workers=WORKERS).from_indexed_dataset(
        Whole(task.photos)
    )
    emit({"seconds": time.perf_counter() - start})


class Whole(Photographs):
    """Whole pictures, for FFCV's writer."""

    def __getitem__(self, index: int) -> Any:
        file = self.files[index]
        return Image.open(file).convert("RGB"), self.classes.index(file.parent.name)


MODULES = {
    "auto": ("stallfree", "stallfree.loader", "stallfree.analysis.auto"),
    "shared": ("stallfree", "stallfree.shared"),
    "tfdata": ("tensorflow",),
    "ffcv": ("ffcv.loader", "ffcv.transforms", "ffcv.fields.rgb_image"),
}
LOADERS = (torch_loader, auto, shared, tfdata, ffcv)


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    if task.who == "convert":
        return convert(task)
    torch.set_num_threads(1)
    random.seed(0)
    make = {loader.__name__: loader for loader in LOADERS}[task.who]
    if task.slow:
        join(Path(task.slow))
    for module in MODULES.get(task.who, ()):
        importlib.import_module(module)
    _warm_up()
    start = time.perf_counter()
    loader = make(task)
    ends, loss = train(loader, task)
    seconds = [end - start for end in ends]
    emit({"seconds": seconds, "loss": loss}, torch=torch.__version__, **_versions(task.who))


def _warm_up() -> None:
    """The network's first step, whose time is nobody's."""
    Net()(torch.rand(BATCH, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)).sum().backward()


def _versions(who: str) -> dict[str, str]:
    names = {"tfdata": "tensorflow-cpu", "ffcv": "ffcv", "auto": "stallfree", "shared": "stallfree"}
    return {names[who]: version(names[who])} if who in names else {}


if __name__ == "__main__":
    main()
