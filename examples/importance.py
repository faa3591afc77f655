"""Spend fewer storage operations: draw each epoch by the losses and by what the cache holds, and weigh what was drawn.

The picture of a sample shows its class, some more clearly than others. The cache holds two fifths of the data set. Both
trainings see about as many samples; the second one draws more, shorter epochs, and fetches little in each.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import stallfree as sf

SAMPLES, CLASSES, SIDE, BATCH = 1000, 5, 8, 50


@sf.mark_deterministic
class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Noise, on which a pattern shows the class."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.patterns = torch.randn(CLASSES, SIDE * SIDE, generator=generator)
        self.labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        self.clear = torch.rand(SAMPLES, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(SIDE * SIDE, generator=torch.Generator().manual_seed(id))
        label = int(self.labels[id])
        return self.clear[id] * self.patterns[label] + noise, label


def train(plan: str, policy: str, epochs: int) -> None:
    """Train a small network, and say what it took."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with sf.CachedDataset(Pictures(), capacity="200KiB", policy=policy) as dataset:
        sampler = sf.ImportanceSampler(len(dataset), plan=plan, cache=dataset.cache, seed=0)
        served, expected = 0, sampler.expected_samples(epochs)
        schedule = LambdaLR(optimizer, lambda _: 2 * max(0.0, 1 - served / expected))
        with sf.DataLoader(dataset, batch_size=BATCH, sampler=sampler) as loader:
            for epoch in range(epochs):
                if epoch:  # the cache is full: now it can be told how many samples are to come
                    expected = served + sampler.expected_samples(epochs, start=epoch)
                for batch in loader:
                    pictures, labels = batch.data
                    losses = functional.cross_entropy(model(pictures), labels, reduction="none")
                    optimizer.zero_grad()
                    (losses * batch.weights).mean().backward()
                    optimizer.step()
                    loader.update(batch.ids, losses)
                    served += len(batch.ids)
                    schedule.step()
        stats = dataset.stats()
        print(
            f"{plan}: {epochs} epochs, {served / SAMPLES:.1f} N samples trained on, "
            f"{stats.storage_reads / SAMPLES:.1f} N storage operations, "
            f"{stats.resident_items / SAMPLES:.0%} of the data set in the cache, "
            f"loss at the end {losses.mean().item():.2f}"
        )


if __name__ == "__main__":
    train("full", "minio", epochs=5)
    train("unbiased", "importance", epochs=8)
