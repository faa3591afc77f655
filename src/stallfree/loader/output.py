"""What a loader delivers: a batch, or a `Batch` with ids and weights, in pinned memory if asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import torch

from stallfree.loader.messages import Ids
from stallfree.typevars import BatchT_co

Deliver = Callable[[Any, Ids], Any]


class Batch(NamedTuple, Generic[BatchT_co]):
    """The batch type of a loader with `with_ids=True`.

    Attributes:
        data: the batch as it would be without ids.
        ids: int64 tensor of the samples actually in it, in order.
        weights: float32 tensor of the same length; None without an `ImportanceSampler` that has weights.

    Example:
        ```python
        loader = sf.DataLoader(dataset, batch_size=4, with_ids=True)
        batch = next(iter(loader))
        assert batch.ids.tolist() == [0, 1, 2, 3]
        images, labels = batch.data
        ```
    """

    data: BatchT_co
    ids: torch.Tensor
    weights: torch.Tensor | Any  # Any: users of an ImportanceSampler need not check for None


def delivery(*, with_ids: bool, weigh: Callable[[Ids], torch.Tensor] | None, pin: bool) -> Deliver | None:
    """Return the function that converts a batch and its ids to the delivered object; None if that is the batch itself.

    Args:
        with_ids: return a `Batch`.
        weigh: returns the weights of ids, and implies a `Batch`; or None.
        pin: copy tensors to pinned memory, if there is an accelerator.
    """
    pin = pin and torch.cuda.is_available()
    if not (with_ids or weigh or pin):
        return None

    def deliver(data: Any, ids: Ids) -> Any:
        if with_ids or weigh is not None:
            data = Batch(data, torch.from_numpy(ids.copy()), None if weigh is None else weigh(ids))
        return pinned(data) if pin else data

    return deliver


def pinned(data: Any) -> Any:
    """Return `data` with its tensors in pinned memory."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(data)
