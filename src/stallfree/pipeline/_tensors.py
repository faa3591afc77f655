"""The plain bytes of a tensor of any kind."""

from __future__ import annotations

import torch


def plain_bytes(tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
    """Return the values of `tensor`: a description of its quantizer ("" without one) and its flat bytes on the CPU.

    None for layouts without plain bytes, such as sparse and nested ones. A quantized tensor is never viewed as another
    dtype, which would crash the process.
    """
    quantizer = ""
    try:
        plain = tensor.detach().as_subclass(torch.Tensor).cpu()
        if plain.is_quantized:
            quantizer, plain = _quantizer(plain), plain.int_repr()
        return quantizer, plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    except (RuntimeError, NotImplementedError):
        return None


def _quantizer(tensor: torch.Tensor) -> str:
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{scheme} {tensor.q_scale()!r} {tensor.q_zero_point()}"
    scales, points = tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()
    return f"{scheme} {scales} {points} {tensor.q_per_channel_axis()}"
