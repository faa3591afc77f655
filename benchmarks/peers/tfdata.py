"""tf.data over prepared pictures in memory, and over encoded ones with its fused decoding of a random part."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from benchmarks.timing import (
    CROP_AREA,
    CROP_RATIO,
    CROP_SIDE,
    Epoch,
    best_of,
    crop_rates,
    find_photos,
    load_noise_pictures,
    prepared_rates,
)

AUTO = tf.data.AUTOTUNE


def epoch_of(data: tf.data.Dataset, threads: int) -> Epoch:
    """Return what starts an epoch of `data`, with a pool of so many threads."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    options.deterministic = False
    made = data.with_options(options)
    return lambda: made


def prepared(folder: str, side: int, batch: int, workers: int, seconds: float, setting: str = "") -> dict[str, Any]:
    pictures = load_noise_pictures(folder, side)
    count = len(pictures)
    with tf.device("CPU:0"):
        images, labels = tf.constant(pictures), tf.constant(np.arange(count))

    def gather(calls: int | None, ahead: int) -> Epoch:
        """Shuffle the indices, gather whole batches: tf.data's fastest form."""
        data = tf.data.Dataset.range(count).shuffle(count).batch(batch, drop_remainder=True)
        data = data.map(lambda ids: (tf.gather(images, ids), tf.gather(labels, ids)), num_parallel_calls=calls)
        return epoch_of(data.prefetch(ahead), workers)

    def by_sample(cache: bool, calls: int | None) -> Epoch:
        """Samples one by one, from the tensors or out of `cache()`."""
        data = tf.data.Dataset.from_tensor_slices((images, labels))
        data = (data.cache() if cache else data).shuffle(count)
        return epoch_of(data.batch(batch, drop_remainder=True, num_parallel_calls=calls).prefetch(AUTO), workers)

    settings: dict[str, Callable[[], Epoch]] = {
        f"shuffled indices, gather, {workers} calls, prefetch 1": lambda: gather(workers, 1),
        f"shuffled indices, gather, {workers} calls, prefetch 2": lambda: gather(workers, 2),
        "shuffled indices, gather, AUTOTUNE": lambda: gather(AUTO, AUTO),
        "shuffled indices, gather, serial, prefetch AUTOTUNE": lambda: gather(None, AUTO),
        "from_tensor_slices, shuffle, batch, AUTOTUNE": lambda: by_sample(False, AUTO),
        "cache(), shuffle, batch, AUTOTUNE": lambda: by_sample(True, AUTO),
        "cache(), shuffle, batch, serial": lambda: by_sample(True, None),
    }
    return best_of(settings, setting, lambda epoch: prepared_rates(epoch, pictures, batch, seconds))


def random_part(encoded: Any, side: int, area: tuple[float, float], **decoding: Any) -> Any:
    """A random part of an encoded picture, decoded, resized and mirrored half the time, as bytes."""
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(encoded),
        tf.zeros([1, 0, 4]),
        min_object_covered=0.0,
        aspect_ratio_range=CROP_RATIO,
        area_range=area,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.stack([begin[0], begin[1], size[0], size[1]])
    picture = tf.image.decode_and_crop_jpeg(encoded, window, channels=3, **decoding)
    picture = tf.image.random_flip_left_right(tf.image.resize(picture, [side, side]))
    return tf.cast(picture, tf.uint8)


def crops(photos: str, batch: int, workers: int, seconds: float, setting: str = "") -> dict[str, Any]:
    with tf.device("CPU:0"):
        encoded = tf.constant([path.read_bytes() for path in find_photos(photos)])
    count = int(encoded.shape[0])

    def make(calls: int, ahead: int, threads: int, fancy: bool, method: str) -> Callable[[], Epoch]:
        def prepare(id: Any) -> Any:
            decoding = {"fancy_upscaling": fancy, "dct_method": method}
            return random_part(encoded[id], CROP_SIDE, CROP_AREA, **decoding), id

        def start() -> Epoch:
            data = tf.data.Dataset.range(count).shuffle(count).map(prepare, num_parallel_calls=calls)
            return epoch_of(data.batch(batch, drop_remainder=True).prefetch(ahead), threads)

        return start

    settings = {
        f"{workers} calls, default decoding": make(workers, 2, workers, True, ""),
        f"{workers} calls, exact decoding": make(workers, 2, workers, True, "INTEGER_ACCURATE"),
        f"{workers} calls, fast decoding": make(workers, 2, workers, False, "INTEGER_FAST"),
        f"AUTOTUNE of {workers} threads, fast decoding": make(AUTO, AUTO, workers, False, "INTEGER_FAST"),
        f"{2 * workers} calls, {workers} threads, fast decoding": make(2 * workers, 4, workers, False, "INTEGER_FAST"),
        f"{workers} calls, {workers + 1} threads, fast decoding": make(workers, 4, workers + 1, False, "INTEGER_FAST"),
    }
    return best_of(settings, setting, lambda epoch: crop_rates(epoch, count, batch, seconds))
