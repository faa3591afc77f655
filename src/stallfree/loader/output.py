"""The final conversion of batches before delivery: ids and weights, pinned memory, NumPy arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple

import torch

from stallfree.errors import InputError, argument_conflict, collate_output
from stallfree.sampling.epoch_source import Ids
from stallfree.typevars import BatchT_co


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


def delivery(
    *,
    with_ids: bool,
    weigh: Callable[[Ids], torch.Tensor] | None,
    pin: bool,
    arrays: bool,
) -> Callable[[Any, Ids], Any] | None:
    """The function that converts a batch and its ids to the delivered object; None if that is the batch itself.

    Args:
        with_ids: return a `Batch`.
        weigh: returns the weights of ids, and implies a `Batch`; or None.
        pin: copy tensors to pinned memory, if there is an accelerator.
        arrays: convert tensors to arrays.
    """
    change = as_arrays if arrays else pinned if pin and torch.cuda.is_available() else None
    if not (with_ids or weigh or change):
        return None

    def deliver(data: Any, ids: Ids) -> Any:
        if with_ids or weigh is not None:
            data = Batch(data, torch.from_numpy(ids.copy()), None if weigh is None else weigh(ids))
        return data if change is None else change(data)

    return deliver


def pinned(data: Any) -> Any:
    """`data`, with its tensors in pinned memory."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(data)


def check_output(output: Any, pin_memory: bool, device: Any) -> None:
    """Raise `InputError` for an output that is unknown, or that contradicts the other arguments."""
    if output not in ("torch", "numpy"):
        raise InputError(f"output={output!r}: use 'torch' or 'numpy'")
    if output == "numpy" and (device is not None or pin_memory):
        raise argument_conflict(
            "output='numpy' gives arrays of the host: leave out device and pin_memory, and let your framework copy them"
        )


def as_arrays(batch: Any) -> Any:
    """`batch` with an array in place of each tensor, also in nested lists, tuples and mappings.

    An array is a view of the tensor's memory and keeps it alive: the arrays hold the lease of the batch's slot as the
    tensors did. Other values are unchanged.

    Raises `InputError` for a tensor of a dtype that NumPy lacks, such as bfloat16.
    """
    if isinstance(batch, torch.Tensor):
        try:
            return batch.numpy(force=True)
        except (TypeError, RuntimeError) as error:
            raise collate_output(
                f"output='numpy': NumPy has no form for a tensor of {batch.dtype} and {batch.layout} ({error}). "
                "Convert it in the data set or in collate_fn, or leave out output"
            ) from error
    if isinstance(batch, Mapping):
        changed = {key: as_arrays(value) for key, value in batch.items()}
        if type(batch) is dict:
            return changed
        same = copy.copy(batch)  # keeps the type of other mappings
        same.update(changed)  # type: ignore[attr-defined]
        return same
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(map(as_arrays, batch))
    return type(batch)(map(as_arrays, batch)) if type(batch) in (list, tuple) else batch
