"""The training of `questions/training.py` with the loaders of tf.data and FFCV, in an environment that has both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import torch
from PIL import Image

from benchmarks.questions.training import AREA, BATCH, RATIO, SIDE, WORKERS, Photographs, train


class Converted:
    """A loader whose batches become pairs of tensors."""

    def __init__(self, loader: Any, convert: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.loader, self.convert = loader, convert

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return map(self.convert, self.loader)


def tfdata(photos: str, epochs: int, disk: str = "", throttled: bool = False) -> dict[str, Any]:
    """As its guides recommend: the files are cached in memory, then decoded in part, shuffled and batched."""
    import tensorflow as tf

    from benchmarks.peers.tfdata import random_part

    def prepare(encoded: Any, label: Any) -> Any:
        return tf.transpose(random_part(encoded, SIDE, AREA), [2, 0, 1]), label

    def make() -> Converted:
        data = Photographs(photos)
        labels = np.array([data.classes.index(file.parent.name) for file in data.files])
        options = tf.data.Options()
        options.threading.private_threadpool_size = WORKERS
        with tf.device("CPU:0"):
            files = tf.data.Dataset.from_tensor_slices(([str(file) for file in data.files], labels))
            encoded = files.map(lambda file, label: (tf.io.read_file(file), label), num_parallel_calls=WORKERS)
            shuffled = encoded.cache().shuffle(len(labels)).map(prepare, num_parallel_calls=WORKERS)
            batches = shuffled.batch(BATCH).prefetch(2).with_options(options)
        return Converted(batches, lambda pair: (torch.from_numpy(pair[0].numpy()), torch.from_numpy(pair[1].numpy())))

    return train(make, photos, epochs, disk if throttled else "")


class WholePictures(Photographs):
    """Whole pictures, for FFCV's writer."""

    def __getitem__(self, index: int) -> Any:
        file = self.files[index]
        return Image.open(file).convert("RGB"), self.classes.index(file.parent.name)


def ffcv(photos: str, epochs: int, disk: str = "", throttled: bool = False) -> dict[str, Any]:
    """Over a file in its own format, JPEG inside, which is written before."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    path = Path(photos) / "photographs.beton"
    if not path.exists():
        draft = path.with_suffix(f".{os.getpid()}")
        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}
        DatasetWriter(str(draft), fields, num_workers=WORKERS).from_indexed_dataset(WholePictures(photos))
        draft.rename(path)

    def make() -> Converted:
        picture = [RandomResizedCropRGBImageDecoder((SIDE, SIDE), AREA, RATIO), RandomHorizontalFlip(), ToTensor()]
        loader = Loader(
            str(path),
            batch_size=BATCH,
            num_workers=WORKERS,
            os_cache=True,
            order=OrderOption.RANDOM,
            pipelines={"image": [*picture, ToTorchImage(channels_last=False)], "label": [IntDecoder(), ToTensor()]},
        )
        return Converted(loader, lambda batch: (batch[0], batch[1].squeeze(1)))

    return train(make, photos, epochs, disk if throttled else "")
