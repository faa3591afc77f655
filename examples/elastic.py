"""Stop a distributed training in mid-epoch, and continue it with another number of processes:

    torchrun --standalone --nproc-per-node=2 elastic.py FOLDER 3    (stops after 3 steps)
    torchrun --standalone --nproc-per-node=3 elastic.py FOLDER      (continues with what is left of the epoch)

With `ranks="auto"` all ranks share one order. The state of a loader has the position in it, whatever the number of
ranks. FOLDER receives the checkpoint, and for each rank the samples that it has trained on. Started without torchrun,
the job has one rank, stops after 3 steps, and continues.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stallfree as sf

SAMPLES = 90


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points on either side of a line."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, id: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.randn(2, generator=torch.Generator().manual_seed(id))
        return point, (point.sum() > 0).float()


def train(folder: Path, stop_after: int | None) -> None:
    """Train one epoch, or what is left of it according to the checkpoint."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    checkpoint = folder / "checkpoint.pt"
    seen: list[int] = []
    with sf.DataLoader(Points(), batch_size=5, shuffle=True, ranks="auto", seed=1, with_ids=True) as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            loader.load_state_dict(saved["loader"])
        for step, ((points, labels), ids, _) in enumerate(loader, 1):
            loss = nn.functional.binary_cross_entropy_with_logits(model(points).squeeze(1), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += ids.tolist()
            if step == stop_after:
                if rank == 0:
                    torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, checkpoint)
                break
    (folder / f"samples-{ranks}-ranks-rank-{rank}").write_text(" ".join(map(str, seen)))
    dist.barrier()
    if rank == 0:
        files = list(folder.glob("samples-*"))
        used = [int(id) for file in files for id in file.read_text().split()]
        print(f"{ranks} ranks: {len(set(used))} of {SAMPLES} samples used so far, {len(used) - len(set(used))} twice")
    dist.barrier()


def main(folder: Path, stops: list[int | None]) -> None:
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    try:
        for stop in stops:
            train(folder, stop)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), [int(sys.argv[2]) if len(sys.argv) > 2 else None])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary), [3])
