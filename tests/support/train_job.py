"""A training job of its own, to be killed: `train_job.py METHOD EPOCHS [END]`.

Says "ready" once a few batches have come, and checks each sample. END is how it leaves: "exit" without closing
anything, in the midst of an epoch, or "close" (the default).
"""

import sys
from typing import Any

import stallfree as sf
from loader_data import Made, Noisy, checksum, picture, pixels

SAMPLES = 96


def cached(**arguments: Any) -> sf.CachedDataset:
    return sf.CachedDataset(Made(SAMPLES, picture), capacity="8MiB", name="shared-by-jobs", policy="lru", **arguments)


def main(method: str, epochs: int, end: str = "close") -> None:
    # With a random step left to do, every batch goes through a worker.
    dataset = cached(transform=sf.mark_random(KeepAsIs()))
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method, "with_ids": True}
    loader = sf.DataLoader(dataset, 4, shuffle=True, **options)
    for epoch in range(epochs):
        for number, batch in enumerate(loader):
            images, labels = batch.data
            for image, label, id in zip(images, labels.tolist(), batch.ids.tolist(), strict=True):
                assert label == id
                assert checksum(image) == checksum(pixels(id))
            if number == 3 and epoch == 0:
                print("ready", flush=True)
            if number == 10 and end == "exit":
                return
    loader.close()
    dataset.close()


class KeepAsIs(Noisy):
    """Draws, as a random step does, and changes nothing."""

    def __call__(self, sample: Any) -> Any:
        super().__call__(sample)
        return sample


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
