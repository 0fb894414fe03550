# SPDX-License-Identifier: Apache-2.0
"""Keep the weights of vLLM's linear layers in their tensors on a CPU.

There vLLM packs these weights into oneDNN's own memory, which no tensor shows and none of our pages holds. The setting
REMAP_CPU_LINEAR chooses one of two ways to keep them in place:

    exact    torch multiplies with the weights as they were loaded. Results equal vLLM's own bit for bit; it is slower,
             because oneDNN packs the weights again for every call
    packed   packs the weights once, in place, for vLLM's other kernels (bfloat16, AVX-512): as fast as vLLM's own path.
             Sums are rounded in another order, so greedy answers may differ where two tokens are almost equally likely
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
    """PATCH, on a CPU, while vLLM loads a model: replaces its choice of a kernel for each linear layer.

    vLLM's choice would move the weights. Layers whose weights vLLM itself leaves in place (an lm_head, tied or not)
    keep vLLM's kernel. Raises InvalidState for a layer of 8-bit weights that oneDNN would compute: oneDNN keeps the
    addresses of their scales, which would show other bytes once the layer streams.
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
            "on this CPU vLLM computes 8-bit linear layers with oneDNN, which keeps their weights in its own memory: "
            "remap cannot remap them; the engine was not started; serve weights of 4, 16 or 32 bits, or without remap"
        )

    scaled, ops.create_onednn_scaled_mm = ops.create_onednn_scaled_mm, refuse
    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm, ops.create_onednn_scaled_mm = original, scaled


def _packable(weight: torch.Tensor) -> bool:
    """Whether the packed kernels take this weight and keep its shape, so that its bytes describe it completely."""
    rows, columns = weight.shape
    known = weight.dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    return bool(known and rows % 32 == 0 and columns % 32 == 0)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from vllm import _custom_ops

    return _custom_ops.weight_packed_linear_cpu(x, weight, weight.shape[0], bias)
