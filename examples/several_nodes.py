"""One cache out of the memory of all nodes of a job. On each of two nodes:

    torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 several_nodes.py

The server of each node holds half of the samples, so that after the first epoch nothing is read from storage. Started
without torchrun, the job has one node. Wants `pip install 'stallfree[redis]'` and a valkey-server or redis-server.
"""

import os

import torch
from torch.utils.data import DistributedSampler

import stallfree as sf

SAMPLES, BATCH = 400, 50


class Slow(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Stands for storage that many nodes share."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 32, 32), id % 256, dtype=torch.uint8), id


def main() -> None:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        store = sf.RedisStore(capacity_per_node="64MiB")
    except sf.MissingServerError as error:
        print(f"this example needs a server: {error}")
        return
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    with store, sf.CachedDataset(Slow(), capacity="256KiB", store=store, name="slow") as dataset:
        # sf.LocalSampler(dataset) in its place keeps nearly everything on its own node.
        sampler: DistributedSampler[int] = DistributedSampler(dataset, ranks, rank)
        with sf.DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=2) as loader:
            for epoch in range(3):
                before = dataset.stats()
                for pictures, ids in loader:
                    assert (pictures[:, 0, 0, 0] == ids % 256).all()
                now = dataset.stats()
                reads, hits = now.storage_reads - before.storage_reads, now.hits - before.hits
                servers = now.tier_hits - before.tier_hits
                print(f"epoch {epoch}: {reads} samples from storage, {hits} hits, {servers} of them in servers")
        if ranks > 1:  # a node that ends earlier takes its server along
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
