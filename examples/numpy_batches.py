"""Batches as NumPy arrays, for JAX or whatever else takes them. JAX is used if it is installed."""

from typing import Any

import numpy as np

import stallfree as sf

try:
    from jax import numpy as xp
except ImportError:
    xp = np


class Waves:
    """A map-style data set of arrays; there is no tensor in it."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, id: int) -> dict[str, Any]:
        return {"wave": np.sin(np.linspace(0, id, 512, dtype=np.float32)), "frequency": np.float32(id)}


def main() -> None:
    with (
        sf.CachedDataset(Waves(), capacity="8MiB") as data,
        sf.DataLoader(data, batch_size=64, shuffle=True, num_workers=1, output="numpy") as loader,
    ):
        for epoch in range(2):
            energy = 0.0
            for batch in loader:
                assert type(batch["wave"]) is np.ndarray  # a view on shared memory, which is on lease to it
                energy += float(xp.sum(xp.asarray(batch["wave"]) ** 2))
            print(f"epoch {epoch}: {len(loader)} batches of {batch['wave'].shape}, energy {energy:.0f}")


if __name__ == "__main__":
    main()
