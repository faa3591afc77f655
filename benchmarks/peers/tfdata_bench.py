"""tf.data over prepared pictures in memory, shuffled anew each epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from benchmarks.contender import Epoch, emit, load_samples, measure_settings, read_task

AUTO = tf.data.AUTOTUNE


def main() -> None:
    task = read_task()
    images, labels = load_samples(task)
    with tf.device("CPU:0"):
        all_images, all_labels = tf.constant(images), tf.constant(labels)
    options = tf.data.Options()
    options.threading.private_threadpool_size = task.workers
    options.deterministic = False

    def gather(calls: int | None, ahead: int) -> Epoch:
        """Shuffle the indices, gather whole batches: tf.data's fastest form."""
        data = tf.data.Dataset.range(task.samples).shuffle(task.samples).batch(task.batch, drop_remainder=True)
        data = data.map(lambda ids: (tf.gather(all_images, ids), tf.gather(all_labels, ids)), num_parallel_calls=calls)
        return repeat(data.prefetch(ahead))

    def by_sample(cache: bool, calls: int | None) -> Epoch:
        """Samples one by one, from the tensors or out of `cache()`."""
        data = tf.data.Dataset.from_tensor_slices((all_images, all_labels))
        if cache:
            data = data.cache()
        data = data.shuffle(task.samples).batch(task.batch, drop_remainder=True, num_parallel_calls=calls)
        return repeat(data.prefetch(AUTO))

    def repeat(data: tf.data.Dataset) -> Epoch:
        made = data.with_options(options)

        def epoch() -> Iterable[Any]:
            return made

        return epoch

    settings: dict[str, Callable[[], Epoch]] = {
        f"shuffled indices, gather, {task.workers} calls, prefetch 1": lambda: gather(task.workers, 1),
        f"shuffled indices, gather, {task.workers} calls, prefetch 2": lambda: gather(task.workers, 2),
        "shuffled indices, gather, AUTOTUNE": lambda: gather(AUTO, AUTO),
        "shuffled indices, gather, serial, prefetch AUTOTUNE": lambda: gather(None, AUTO),
        "from_tensor_slices, shuffle, batch, AUTOTUNE": lambda: by_sample(False, AUTO),
        "cache(), shuffle, batch, AUTOTUNE": lambda: by_sample(True, AUTO),
        "cache(), shuffle, batch, serial": lambda: by_sample(True, None),
    }
    result = measure_settings(settings, task, images)
    emit(result, tensorflow=tf.__version__, numpy=np.__version__)


if __name__ == "__main__":
    main()
