"""tf.data over encoded pictures in memory: its fused decoding of a random part, resized and mirrored."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from benchmarks.contender import Epoch, emit
from benchmarks.prep_steps import RATIO, SCALE, SIDE, PrepTask, find_photos, measure_settings, read_task

AUTO = tf.data.AUTOTUNE


def prepare(data: Any, *, fancy: bool, dct: str, antialias: bool = False) -> Any:
    """A random part of the picture in `data`, as bytes."""
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(data),
        tf.zeros([1, 0, 4]),
        min_object_covered=0.0,
        aspect_ratio_range=RATIO,
        area_range=SCALE,
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.stack([begin[0], begin[1], size[0], size[1]])
    picture = tf.image.decode_and_crop_jpeg(data, window, channels=3, fancy_upscaling=fancy, dct_method=dct)
    picture = tf.image.random_flip_left_right(tf.image.resize(picture, [SIDE, SIDE], antialias=antialias))
    return tf.cast(picture, tf.uint8)


def main() -> None:
    task = read_task()
    with tf.device("CPU:0"):
        encoded = tf.constant([path.read_bytes() for path in find_photos(task)])
    result = measure_settings(settings(task, encoded), task)
    emit(result, tensorflow=tf.__version__, numpy=np.__version__)


def settings(task: PrepTask, encoded: Any) -> dict[str, Callable[[], Epoch]]:
    """The settings worth trying, by name."""
    samples = int(encoded.shape[0])

    def make(calls: int, ahead: int, threads: int, **decoding: Any) -> Epoch:
        options = tf.data.Options()
        options.threading.private_threadpool_size = threads
        options.deterministic = False
        data = tf.data.Dataset.range(samples).shuffle(samples)
        data = data.map(lambda id: (prepare(encoded[id], **decoding), id), num_parallel_calls=calls)
        data = data.batch(task.batch, drop_remainder=True).prefetch(ahead).with_options(options)

        def epoch() -> Iterable[Any]:
            return data

        return epoch

    quick = {"fancy": False, "dct": "INTEGER_FAST"}
    two = task.workers
    return {
        f"{two} calls, as it decodes by default": lambda: make(two, 2, two, fancy=True, dct=""),
        f"{two} calls, exact decoding": lambda: make(two, 2, two, fancy=True, dct="INTEGER_ACCURATE"),
        f"{two} calls, fast decoding": lambda: make(two, 2, two, **quick),
        f"AUTOTUNE of {two} threads, fast decoding": lambda: make(AUTO, AUTO, two, **quick),
        f"{2 * two} calls, {two} threads, fast decoding": lambda: make(2 * two, 4, two, **quick),
        f"{two} calls, {two + 1} threads, fast decoding": lambda: make(two, 4, two + 1, **quick),
    }


if __name__ == "__main__":
    main()
