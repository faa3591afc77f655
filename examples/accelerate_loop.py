"""Train with Hugging Face's `accelerate` on stallfree's loader. Wants `pip install accelerate`.

    accelerate launch --num_processes 2 accelerate_loop.py

`Accelerator.prepare` does for stallfree's loader what it does for torch's: each process gets the same samples.
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import stallfree as sf


@sf.mark_deterministic
class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points on either side of a line."""

    def __init__(self) -> None:
        self.points = torch.randn(128, 2, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, id: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = self.points[id]
        return point, (point.sum() > 0).float()


def main() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
    with sf.CachedDataset(Points(), capacity="4MiB") as data:
        loader = accelerator.prepare(sf.DataLoader(data, batch_size=16, shuffle=True, num_workers=1))
        for epoch in range(3):
            seen, total = 0, 0.0
            for points, labels in loader:
                loss = nn.functional.binary_cross_entropy_with_logits(model(points).squeeze(1), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen, total = seen + len(points), total + loss.item()
            everywhere: Any = accelerator.reduce(torch.tensor(seen, device=accelerator.device))
            accelerator.print(f"epoch {epoch}: {int(everywhere)} samples, loss {total / len(loader):.2f}")
        loader.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
