"""On a CPU, vLLM packs the weights of its linear layers into memory of oneDNN's own, which no tensor shows and no page
of ours holds.

Two ways to keep them where they are, by the setting REMAP_CPU_LINEAR:

    exact    torch multiplies with the weights as they were loaded: bit for bit what vLLM's own path gives, and slower, since
             oneDNN packs them again for every call
    packed   the weights are packed once, in place, for vLLM's other kernels (bfloat16, AVX-512): as fast as vLLM's own path;
             sums are rounded in another order, so a greedy answer may take another turn where two tokens are almost equal
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from remap.errors import InvalidState

__all__ = ["weights_left_in_place"]


@contextmanager
def weights_left_in_place(packed: bool) -> Iterator[None]:
    """PATCH, on a CPU, while a model is loaded: vLLM's choice of a kernel for each linear layer, which would move its
    weights.

    Layers whose weights vLLM itself leaves in place (an lm_head, tied or not) are left to it. Raises InvalidState for a
    layer of 8-bit weights that oneDNN is to compute: it keeps the addresses of their scales, and other bytes would be
    there.
    """
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as utils

    original = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(original)
    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if not remove_weight or weight.ndim != 2 or weight.is_meta:
            original(layer, remove_weight)
            return
        layer.cpu_linear = torch.nn.functional.linear
        if packed and _packable(weight):
            weight.data = torch.ops._C.convert_weight_packed(weight)
            if getattr(layer, "bias", None) is not None:
                layer.bias.data = layer.bias.to(torch.float32)
            layer.cpu_linear = _multiply

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InvalidState(
            "on this CPU vLLM computes 8-bit linear layers by oneDNN, which keeps their weights to itself: they "
            "cannot be remapped; the engine was not started; serve weights of 4, 16 or 32 bits, or without remap"
        )

    scaled, ops.create_onednn_scaled_mm = ops.create_onednn_scaled_mm, refuse
    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm, ops.create_onednn_scaled_mm = original, scaled


def _packable(weight: torch.Tensor) -> bool:
    """Whether the kernels take it, and give a tensor of the same shape: then its bytes are all there is to know of it."""
    rows, columns = weight.shape
    known = weight.dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    return bool(known and rows % 32 == 0 and columns % 32 == 0)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from vllm import _custom_ops

    return _custom_ops.weight_packed_linear_cpu(x, weight, weight.shape[0], bias)
