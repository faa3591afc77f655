"""Train with Hugging Face's `Trainer` on stallfree's loader. Wants `pip install transformers accelerate`.

One method is overridden, as for any other loader. With several processes, each gets its part of the samples.
"""

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import stallfree as sf


@sf.mark_deterministic
class Points(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Points on either side of a line."""

    def __init__(self) -> None:
        self.points = torch.randn(128, 2, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, id: int) -> dict[str, torch.Tensor]:
        point = self.points[id]
        return {"x": point, "labels": (point.sum() > 0).float()}


class Model(nn.Module):
    """Gives its loss first, as a `Trainer` wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.line(x).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels), logits


class FastTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` on stallfree's loader."""

    def get_train_dataloader(self) -> Any:
        size, workers = self.args.per_device_train_batch_size, self.args.dataloader_num_workers
        loader = sf.DataLoader(self.train_dataset, batch_size=size, shuffle=True, num_workers=workers)
        return self.accelerator.prepare(loader)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sf.CachedDataset(Points(), capacity="4MiB") as data:
        settings = TrainingArguments(
            folder,
            num_train_epochs=4,
            per_device_train_batch_size=16,
            dataloader_num_workers=2,
            learning_rate=0.1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = FastTrainer(Model(), settings, train_dataset=data)
        loss = trainer.train().training_loss
        reads = data.stats().storage_reads
        print(f"{trainer.state.global_step} steps, mean loss {loss:.2f}; {reads} samples were read")


if __name__ == "__main__":
    main()
