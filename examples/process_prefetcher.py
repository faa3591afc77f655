"""Let a process of its own load the batches and put them on the device; this one only trains."""

import os
from functools import partial

import torch

import stallfree as sf


class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Random pictures with labels."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(id)
        return torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=generator), id % 10


def make_loader(count: int) -> torch.utils.data.DataLoader[tuple[torch.Tensor, int]]:
    """Is called in the other process, which imports this file: any loader will do."""
    return torch.utils.data.DataLoader(Pictures(count), batch_size=16, shuffle=True)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with sf.ProcessPrefetcher(partial(make_loader, 100), device, depth=2) as batches:
        print(f"{len(batches)} batches per epoch")
        for epoch in range(2):
            seen, total = 0, 0.0
            for pictures, labels in batches:  # valid until the next ones are asked for
                total += float(pictures.float().mean())
                seen += len(labels)
            print(f"epoch {epoch}: {seen} pictures, mean brightness {total / len(batches):.0f}")
        print(f"loaded by another process: {batches.pid != os.getpid()}")


if __name__ == "__main__":
    main()
