"""On a CPU, vLLM packs the weights of its linear layers into memory of oneDNN's own, which no tensor shows and no page of ours holds.

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

__all__ = ["weights_left_in_place"]


@contextmanager
def weights_left_in_place(packed: bool) -> Iterator[None]:
    """PATCH, on a CPU, while a model is loaded: vLLM's choice of a kernel for each linear layer, which would move its weights.

    Layers whose weights vLLM itself leaves in place (an lm_head, tied or not) are left to it.
    """
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

    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = original


def _packable(weight: torch.Tensor) -> bool:
    """Whether the kernels take it, and give a tensor of the same shape: then its bytes are all there is to know of it."""
    rows, columns = weight.shape
    known = weight.dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    return bool(known and rows % 32 == 0 and columns % 32 == 0)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from vllm import _custom_ops

    return _custom_ops.weight_packed_linear_cpu(x, weight, weight.shape[0], bias)
