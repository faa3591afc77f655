"""Train with `DistributedDataParallel`, each sample on one rank. On one host without a GPU:

    torchrun --nproc-per-node=2 ddp.py [FOLDER]

The ranks share one cache: each sample is read once for all of them. With FOLDER, each rank notes there which samples it
has trained on. Started without torchrun, the job has one rank.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import stallfree as sf

SAMPLES, EPOCHS = 96, 3


@sf.mark_deterministic
class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points on either side of a line."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, id: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.randn(2, generator=torch.Generator().manual_seed(id))
        return point, (point.sum() > 0).float()


def train(rank: int, ranks: int, ledger: Path | None) -> None:
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with sf.CachedDataset(Points(), capacity="4MiB", name="points") as data:
        sampler: DistributedSampler[int] = DistributedSampler(data, ranks, rank)
        with sf.DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, with_ids=True) as loader:
            for epoch in range(EPOCHS):
                sampler.set_epoch(epoch)
                seen: list[int] = []
                for (points, labels), ids, _ in loader:
                    loss = nn.functional.binary_cross_entropy_with_logits(model(points).squeeze(1), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    seen += ids.tolist()
                if ledger is not None:
                    (ledger / f"epoch-{epoch}-rank-{rank}").write_text(" ".join(map(str, seen)))
                dist.barrier()
                if rank == 0:
                    reads = data.stats().storage_reads
                    print(f"epoch {epoch}: {len(seen)} of {SAMPLES} samples on this rank, {reads} read for all so far")


def main() -> None:
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    try:
        train(dist.get_rank(), dist.get_world_size(), Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
