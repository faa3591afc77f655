"""Train with Hugging Face's `accelerate` on stallfree's loader. Wants `pip install accelerate`.

    accelerate launch --num_processes 2 accelerate_loop.py

`Accelerator.prepare` deals out the samples of torch's loader among the processes and leaves stallfree's as it is, so
the loader is given the sampler and the device itself. Nothing else changes.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DistributedSampler

import stallfree as sf


class Points(torch.utils.data.Dataset):
    """Points on either side of a line."""

    def __len__(self):
        return 128

    def __getitem__(self, id):
        point = torch.randn(2, generator=torch.Generator().manual_seed(id))
        return point, (point.sum() > 0).float()


def main() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
    with sf.CachedDataset(Points(), capacity="4MiB") as data:
        sampler = DistributedSampler(data, accelerator.num_processes, accelerator.process_index)
        device = accelerator.device
        with sf.DataLoader(data, batch_size=16, sampler=sampler, num_workers=1, device=device) as loader:
            for epoch in range(3):
                sampler.set_epoch(epoch)
                seen, total = 0, 0.0
                for points, labels in loader:
                    loss = nn.functional.binary_cross_entropy_with_logits(model(points).squeeze(1), labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    seen, total = seen + len(points), total + loss.item()
                everywhere = int(accelerator.reduce(torch.tensor(seen, device=device)))
                accelerator.print(f"epoch {epoch}: {everywhere} samples, loss {total / len(loader):.2f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
