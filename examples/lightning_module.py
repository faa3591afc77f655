"""Train with PyTorch Lightning on stallfree's loader, and see what each epoch waits for.

Wants `pip install 'stallfree[lightning]'`. On several devices Lightning deals the samples out, as those of torch's
loader.
"""

import logging
import tempfile
import time

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn

import stallfree as sf
from stallfree.integrations.lightning import StallMonitor


@sf.mark_deterministic
class SlowPoints(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points on either side of a line, on storage that takes its time."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, id: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.002)
        point = torch.randn(2, generator=torch.Generator().manual_seed(id))
        return point, (point.sum() > 0).float()


class Points(LightningDataModule):
    """The loader and its cache, made and closed with the training."""

    def setup(self, stage: str) -> None:
        self.data = sf.CachedDataset(SlowPoints(), capacity="4MiB")

    def train_dataloader(self) -> sf.DataLoader[list[torch.Tensor]]:
        self.loader = sf.DataLoader(self.data, batch_size=16, shuffle=True, num_workers=1, persistent_workers=True)
        return self.loader

    def teardown(self, stage: str) -> None:
        self.loader.close()
        self.data.close()


class Line(LightningModule):
    """Which side of the line a point is on."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        points, labels = batch
        return nn.functional.binary_cross_entropy_with_logits(self.line(points).squeeze(1), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=3,
            accelerator="cpu",
            callbacks=[StallMonitor()],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Line(), datamodule=Points())


if __name__ == "__main__":
    main()
