"""`DataLoader`: iterates over the epochs of a data set, and yields batches."""

from stallfree.loader.benefit import measure_benefit
from stallfree.loader.dataloader import DataLoader
from stallfree.loader.output import Batch

__all__ = ["Batch", "DataLoader", "measure_benefit"]
