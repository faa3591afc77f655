"""The last loss of each sample, received from the training loop without blocking it, and states of samplers."""

import base64
import warnings
import zlib
from collections import deque
from typing import Any

import numpy as np
import torch

from stallfree.errors import StallfreeWarning, loss_update, state_format, state_mismatch
from stallfree.raising import users_level

Array = np.ndarray[Any, np.dtype[Any]]


def pack(array: Array) -> str:
    """Encode an array as a JSON string."""
    return base64.b64encode(zlib.compress(array.tobytes(), 1)).decode()


def unpack(text: str, dtype: Any) -> Array:
    """Decode the array in `text`. Raises `InputError` for text that `pack` did not produce."""
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).copy()
    except (ValueError, TypeError, zlib.error) as error:
        raise state_format(f"the state is damaged ({error}): give what state_dict() returned") from error


def pack_mask(mask: Array) -> str:
    """Encode an array of bool as a JSON string."""
    return pack(np.packbits(mask))


def unpack_mask(text: str, count: int) -> Array:
    """Decode the `count` bools in `text`. Raises `InputError` for text that `pack_mask` did not produce."""
    return np.unpackbits(unpack(text, np.uint8), count=count).astype(bool)


class Losses:
    """The last loss of each of `count` samples.

    Args:
        count: number of samples.

    Attributes:
        last: float32 per id; infinite where no loss is known.
        fresh: bool per id: samples with a loss that other ranks have not received.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.last = np.full(count, np.inf, np.float32)
        self.fresh = np.zeros(count, bool)
        self._warned = False
        self._under_way: deque[tuple[torch.Tensor, torch.Tensor, Any]] = deque()

    def add(self, ids: Any, losses: Any) -> None:
        """Record the losses of `ids`. Does not wait for a device: data there is copied in the background.

        Raises `InputError` if there is not one number for each id; for ids on a device, at a later call.
        """
        ids, losses = _tensor("ids", ids), _tensor("losses", losses)
        if ids.numel() == 0 and losses.numel() == 0:
            return
        if ids.dim() != 1 or losses.shape != ids.shape or not _is_int(ids) or losses.is_complex():
            raise loss_update(
                f"update was given ids of shape {tuple(ids.shape)} ({ids.dtype}) and losses of shape "
                f"{tuple(losses.shape)} ({losses.dtype}): give Batch.ids and one loss for each of them, as "
                "reduction='none' makes them"
            )
        if ids.device.type == "cpu":
            self._check(ids.numpy())
            if losses.device.type == "cpu" and not self._under_way:
                self._apply(ids.numpy(), losses.float().numpy())
                return
        self._send_for(ids, losses.float())
        self.collect(wait=False)

    def _send_for(self, ids: torch.Tensor, losses: torch.Tensor) -> None:
        """Copy to the host without waiting. An event marks the completion."""
        here = [_to_host(tensor) for tensor in (ids, losses)]
        device = losses.device if losses.device.type != "cpu" else ids.device
        event = None
        if device.type not in ("cpu", "mps"):  # on these `_to_host` waits
            module = torch.get_device_module(device)
            event = module.Event()
            event.record(module.current_stream(device))
        self._under_way.append((here[0], here[1], event))

    def collect(self, *, wait: bool = True) -> None:
        """Record the losses that have arrived from devices, in the order of the steps; with `wait`, all of them."""
        while self._under_way:
            ids, losses, event = self._under_way[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            self._under_way.popleft()
            self._check(ids.numpy())
            self._apply(ids.numpy(), losses.numpy())

    def _check(self, ids: Array) -> None:
        if len(bad := ids[(ids < 0) | (ids >= self.count)]):
            raise loss_update(f"update was given the id {bad[0]}: ids are 0 to {self.count - 1}. Give Batch.ids")

    def _apply(self, ids: Array, losses: Array) -> None:
        known = np.isfinite(losses)
        if not known.all():
            self._warn(ids[~known])
            ids, losses = ids[known], losses[known]
        self.last[ids] = losses
        self.fresh[ids] = True

    def _warn(self, ids: Array) -> None:
        """Warn once: a half-precision step may overflow occasionally; a diverged model shows in the user's own log."""
        if not self._warned:
            self._warned = True
            few = ", ".join(map(str, ids[:5].tolist())) + (", ..." if len(ids) > 5 else "")
            warnings.warn(
                f"update was given NaN or infinite losses, first those of the samples {few}: these samples keep the "
                "losses that they had before. There is no further warning for this sampler",
                StallfreeWarning,
                stacklevel=users_level(),
            )

    def __getstate__(self) -> dict[str, Any]:
        self.collect()
        return self.__dict__

    def state(self) -> dict[str, Any]:
        """The state, serializable as JSON."""
        self.collect()
        return {"last": pack(self.last), "fresh": pack_mask(self.fresh)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`. Raises `InputError` for a state of other samples."""
        last = unpack(state["last"], np.float32)
        if len(last) != self.count:
            raise state_mismatch(
                f"the state is of {len(last)} samples; this sampler has {self.count}: give the same data set"
            )
        self._under_way.clear()
        self.last[:] = last
        self.fresh[:] = unpack_mask(state["fresh"], self.count)


def _tensor(name: str, given: Any) -> torch.Tensor:
    """`given` as a tensor without a gradient. Raises `InputError` if it cannot be converted."""
    if isinstance(given, torch.Tensor):
        return given.detach()
    try:
        if isinstance(given, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in given):
            return torch.stack([item.detach() for item in given])
        return torch.from_numpy(np.array(given))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise loss_update(f"update was given {name} that are no numbers ({error}): give tensors or arrays") from error


def _is_int(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type in ("cpu", "mps"):
        return tensor.to("cpu", copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
