# SPDX-License-Identifier: Apache-2.0
"""Llama-like layers with the small operations fused: one Triton kernel each for the norm, the rotation of q and k, and
the gated activation, and the residual added by the matrix product. About a dozen launches a layer.

A decode pass reads every weight once; every policy loses the time of the launches in between. Without this the baseline
would be slow, and a slow computation hides more copies than a good one: remap would look better than it is.

The weights are those of the model's own modules, at their fixed addresses. Roundings differ from transformers' in the
rotation and the activation (fp32 inside, one rounding at the end). Importing this module imports triton. Not yet run on a
GPU; the tests run it in Triton's interpreter and compile it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import nn

from remap_serve.engine.models import LlamaLike
from remap_serve.engine.paged_triton import power_of_two

if TYPE_CHECKING:
    from remap_serve.engine.models import Attend

__all__ = ["FusedLlama", "rms_norm", "rotate_", "silu_mul"]


@triton.jit
def _rms_norm(x, weight, out, x_row, eps, DIM: tl.constexpr, DIM_PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program a row. As transformers: normalised in fp32, rounded, then times the weight."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, DIM_PAD)
    real = dim < DIM
    value = tl.load(x + row * x_row + dim, mask=real, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / DIM + eps)
    normal = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + dim, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * DIM + dim, (normal * gain).to(out.dtype.element_ty), mask=real)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    x_token,
    x_head,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """One program a token, in place: (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of a head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    real = (head < HEADS) & (dim < HALF)
    low = x + token * x_token + head * x_head + dim
    # A head's two halves turn by the same angles.
    at = token * 2 * HALF + dim
    c = tl.load(cos + at, mask=dim < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=dim < HALF, other=0.0).to(tl.float32)
    a = tl.load(low, mask=real, other=0.0).to(tl.float32)
    b = tl.load(low + HALF, mask=real, other=0.0).to(tl.float32)
    tl.store(low, (a * c - b * s).to(x.dtype.element_ty), mask=real)
    tl.store(low + HALF, (b * c + a * s).to(x.dtype.element_ty), mask=real)


@triton.jit
def _silu_mul(gate, up, out, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    real = at < count
    g = tl.load(gate + at, mask=real, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=real)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (rows, dim) with contiguous rows -> x / sqrt(mean(x^2) + eps) * weight, contiguous, of x's dtype."""
    rows, dim = x.shape
    out = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
    kernel: Any = _rms_norm
    kernel[(rows,)](
        x, weight, out, x.stride(0), eps, DIM=dim, DIM_PAD=power_of_two(dim), num_warps=8 if dim > 2048 else 4
    )
    return out


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate x (tokens, heads, head_dim) in place. cos, sin: (tokens, head_dim), contiguous, the halves equal."""
    tokens, heads, dim = x.shape
    kernel: Any = _rotate
    kernel[(tokens,)](
        x, cos, sin, x.stride(0), x.stride(1), HEADS=heads, HEADS_PAD=power_of_two(heads), HALF=dim // 2,
        HALF_PAD=power_of_two(dim // 2), num_warps=4,
    )  # fmt: skip


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, all contiguous and of one shape."""
    out = torch.empty_like(gate)
    kernel: Any = _silu_mul
    kernel[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), TILE=1024, num_warps=4)
    return out


class FusedLlama(LlamaLike):
    """`LlamaLike` with fused kernels; `layer` works in place on `hidden`, which it returns."""

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether the model's layers are those that the kernels compute: SiLU, and every dimension of a head rotated."""
        layer = model.model.layers[0]
        partial = getattr(model.config, "rope_parameters", None) or {}
        return (
            type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
            and layer.self_attn.head_dim % 2 == 0
            and partial.get("partial_rotary_factor", 1.0) == 1.0
        )

    def rotary(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.model.rotary_emb(hidden, positions[None])
        return cos[0].contiguous(), sin[0].contiguous()

    def layer(
        self, index: int, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        layer: Any = self.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        x = self._normed(layer.input_layernorm, hidden)
        q = self._rotated(attention.q_proj, getattr(attention, "q_norm", None), x, rotary)
        k, v = self._keys_values(attention, x, rotary)
        _add_linear(hidden, attention.o_proj, attend(q, k, v, attention.scaling))
        x = self._normed(layer.post_attention_layernorm, hidden)
        _add_linear(hidden, mlp.down_proj, silu_mul(mlp.gate_proj(x), mlp.up_proj(x)))
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self._normed(self.model.norm, hidden))

    def _normed(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.variance_epsilon)

    def _rotated(
        self, projection: Any, norm: Any, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        heads = projection(x)
        if norm is not None:
            heads = self._normed(norm, heads.view(-1, self.head_dim))
        heads = heads.view(x.shape[0], -1, self.head_dim)
        rotate_(heads, *rotary)
        return heads


def _add_linear(hidden: torch.Tensor, linear: Any, x: torch.Tensor) -> None:
    """hidden += linear(x): the residual is the matrix product's own addend."""
    if linear.bias is None and type(linear) is nn.Linear:
        hidden.addmm_(x, linear.weight.t())
    else:
        hidden += linear(x)
