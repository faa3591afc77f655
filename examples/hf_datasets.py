"""Cache a Hugging Face `datasets.Dataset`, also one with a random transform. Wants `pip install datasets`.

`with_transform` (or `set_transform`) is taken apart: rows are cached as they are, and it runs anew in each epoch. Steps
that are always the same are worth caching: give those with `CachedDataset(..., transform=...)`.
"""

from typing import Any

import numpy as np

import stallfree as sf
from datasets import Dataset


def augment(batch: dict[str, Any]) -> dict[str, Any]:
    """Random noise, for a batch of rows as `datasets` wants it."""
    return {**batch, "wave": [np.float32(wave) + np.float32(np.random.normal(0, 0.1)) for wave in batch["wave"]]}


def main() -> None:
    rows = {"wave": np.sin(np.outer(np.arange(64), np.linspace(0, 1, 100))), "label": np.arange(64) % 4}
    data = Dataset.from_dict(rows).with_transform(augment)
    with (
        sf.CachedDataset(data, capacity="8MiB") as cached,
        sf.DataLoader(cached, batch_size=16, shuffle=True, num_workers=2) as loader,
    ):
        for epoch in range(3):
            total = sum(float(batch["wave"].sum()) for batch in loader)
            print(f"epoch {epoch}: sum {total:.2f}, {cached.stats().storage_reads} rows read so far")


if __name__ == "__main__":
    main()
