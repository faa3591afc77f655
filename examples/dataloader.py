"""Train for a few epochs through `stallfree.DataLoader`, stop in the midst of one, and go on from there."""

import json

import torch

import stallfree as sf

Sample = tuple[torch.Tensor, int]


class Pictures(torch.utils.data.Dataset[Sample]):
    """Sixty pictures with labels."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, id: int) -> Sample:
        values = torch.arange(32 * 32 * 3) * (id + 7) // 11
        return values.to(torch.uint8).reshape(32, 32, 3), id % 10


@sf.mark_random
def flip(sample: Sample) -> Sample:
    """Mirror every other picture; which ones is another matter in each epoch."""
    picture, label = sample
    return (picture.flip(1) if torch.rand(()) < 0.5 else picture), label


def make_loader(dataset: sf.CachedDataset[Sample]) -> sf.DataLoader[sf.Batch[list[torch.Tensor]]]:
    """Takes what `torch.utils.data.DataLoader` takes."""
    return sf.DataLoader(dataset, batch_size=16, shuffle=True, num_workers=2, persistent_workers=True, with_ids=True)


def main() -> None:
    with sf.CachedDataset(Pictures(), capacity="8MiB", transform=flip) as dataset:
        with make_loader(dataset) as loader:
            for epoch in range(2):
                brightness = sum(float(batch.data[0].float().mean()) for batch in loader) / len(loader)
                print(f"epoch {epoch}: {len(loader)} batches, mean brightness {brightness:.1f}")

            iterator = iter(loader)
            seen = next(iterator).ids.tolist()
            saved = json.dumps(loader.state_dict())  # two integers and what they belong to

        with make_loader(dataset) as loader:  # in another process, on another day
            loader.load_state_dict(json.loads(saved))
            rest = [id for batch in loader for id in batch.ids.tolist()]
            print(f"resumed: {len(seen)} + {len(rest)} samples, each once: {sorted(seen + rest) == list(range(60))}")

            stats = loader.stats()
            print(f"{stats.hits} of {stats.samples} samples came from the cache; {stats.workers_replaced} workers died")


if __name__ == "__main__":
    main()
