"""Train on a window of 50 prepared volumes, of which 5 are replaced after each epoch."""

from typing import Any

import numpy as np
import torch

import stallfree as sf

Sample = dict[str, Any]


class Volumes:
    """Stands for files that take long to read."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, id: int) -> Sample:
        return {"image": np.full((24, 24, 24), id, np.float32), "id": id}


@sf.mark_deterministic
def smooth(sample: Sample) -> Sample:
    """Expensive and always the same: done once per stay in the window, by a process in the background."""
    image = torch.from_numpy(sample["image"])[None, None]
    return {**sample, "image": torch.nn.functional.avg_pool3d(image, 5, 1, 2)[0]}


@sf.mark_random
def crop(sample: Sample) -> Sample:
    """Random: another part in each epoch."""
    x, y, z = torch.randint(0, 8, (3,)).tolist()
    return {**sample, "image": sample["image"][:, x : x + 16, y : y + 16, z : z + 16]}


with sf.SmartCacheDataset(
    Volumes(), sf.Compose([smooth, crop]), cache_num=50, replace_rate=0.1, on_late="wait"
) as data:
    loader = sf.DataLoader(data, batch_size=5, shuffle=True)
    seen: set[int] = set()
    for epoch in range(11):
        for batch in loader:
            seen.update(batch["id"].tolist())
        print(f"epoch {epoch}: {len(batch['image'])} x {tuple(batch['image'].shape[1:])}, {len(seen)} volumes seen")
    stats = data.stats()
    print(f"{stats.storage_reads} volumes read for {loader.stats().samples} samples; {stats.advice or 'never late'}")
    loader.close()
