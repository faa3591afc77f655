"""The plain content of a tensor, of whatever kind it is."""

from __future__ import annotations

import torch


def plain_bytes(tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
    """What the values of `tensor` are, as its quantizer in words ("" without one) and its bytes, flat, on the CPU.

    None for a layout without plain bytes, such as sparse and nested ones. A quantized tensor is never viewed as other
    types: that ends the process.
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
