"""`DataLoader`: epochs over a data set, and the batches that it yields."""

from stallfree.loader.benefit import measure_benefit
from stallfree.loader.dataloader import DataLoader
from stallfree.loader.output import Batch

__all__ = ["Batch", "DataLoader", "measure_benefit"]
