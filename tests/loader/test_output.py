"""NumPy views of batches."""

from __future__ import annotations

from typing import Any

import torch

import stallfree as sf


class Samples:
    """Sample `id` is a tensor full of `id`."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, id: int) -> torch.Tensor:
        return torch.full((3, 4), id, dtype=torch.int16)


def test_kept_views_are_never_overwritten() -> None:
    """Views of arrays hold the slot of their batch. As with tensors, three batches are held so."""
    kept: list[tuple[int, Any]] = []
    with sf.DataLoader(Samples(), batch_size=4, num_workers=2) as loader:
        for batch in loader:
            number = int(batch[0, 0, 0]) // 4
            if number % 2:
                kept.append((number, batch.numpy()[1:, 0]))
            del batch
        for number, view in kept:
            assert view[:, 0].tolist() == [4 * number + 1, 4 * number + 2, 4 * number + 3]
        # Batches 1, 3 and 5 hold their slots, so those from number 6 on are copies.
        assert loader.stats().private_copies == 18
    assert len(kept) == 12
