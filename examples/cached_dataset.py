"""Read each record from slow storage once, prepare it once, augment it in each epoch."""

import random

import numpy as np
import numpy.typing as npt

import stallfree as sf
from stallfree.testing import ThrottledSource

Sample = tuple[npt.NDArray[np.float32], int]


class Waves:
    """A plain data set, as any other; reading a sample takes time where the data lie on slow storage."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, id: int) -> Sample:
        return np.sin(np.linspace(0, id, 4096, dtype=np.float32)), id


@sf.mark_deterministic
def spectrum(sample: Sample) -> Sample:
    """Expensive and always the same: worth caching. The mark spares a trial on one sample."""
    wave, id = sample
    return np.abs(np.fft.rfft(wave)).astype(np.float32), id


@sf.mark_random
def louder(sample: Sample) -> Sample:
    """Random: runs for each sample in each epoch."""
    wave, id = sample
    return wave * random.uniform(1, 2), id


storage = ThrottledSource(Waves(), bandwidth="40MB/s")
with sf.CachedDataset(storage, capacity="16MiB", transform=sf.Compose([spectrum, louder])) as data:
    print(data.decision)
    for epoch, batches in enumerate([sf.DataLoader(data, batch_size=50, shuffle=True)] * 3):
        before = storage.bytes
        loudest = max(float(waves.max()) for waves, _ in batches)
        print(f"epoch {epoch}: {(storage.bytes - before) / 1e6:.1f} MB from storage, loudest {loudest:.1f}")
    stats = data.stats()
    print(f"{stats.hits} hits, {stats.misses} misses, {stats.storage_reads} reads, {stats.resident_items} samples held")
storage.close()
