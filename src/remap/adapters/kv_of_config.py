# SPDX-License-Identifier: Apache-2.0
"""The KV cache that a transformers model needs, from its configuration and its attention modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from remap.errors import InvalidArgument
from remap.kv.spec import KVSpec

if TYPE_CHECKING:
    from torch import nn

__all__ = ["KVShape", "caches_of", "kv_shape"]

_BOTH = (
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)  # a state beside keys and values
_IN_BLOCKS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    *(getattr(cache_utils, name) for name in _BOTH if hasattr(cache_utils, name)),
)


@dataclass(frozen=True)
class KVShape:
    """A model's KV cache.

    kept: what transformers itself would make for each layer, unused. heads: (KV heads, head dimension) of those of them
    that hold keys and values. alike: whether all of the model's layers do, with the same heads. shared: whether layers read
    the keys and values of another, later in the pass.
    """

    kept: tuple[Any, ...]
    heads: tuple[tuple[int, int], ...]
    dtype: str
    alike: bool
    shared: bool

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer with keys and values its sliding window in tokens, or None for all tokens."""
        return tuple(_of(each, "sliding_window") for each in self.kept if type(each) in _IN_BLOCKS)

    def spec(self, block_tokens: int) -> KVSpec:
        """One block. Unlike layers lie in it as bytes."""
        parts = [
            KVSpec(
                layers=1,
                kv_heads=heads,
                head_dim=dim,
                dtype=self.dtype,
                block_tokens=block_tokens,
                min_blocks=0,
                max_blocks=1,
            )
            for heads, dim in self.heads
        ]
        if self.alike:
            return replace(parts[0], layers=len(parts))
        half = sum(part.chunk_bytes for part in parts) // block_tokens
        return replace(parts[0], kv_heads=1, head_dim=half, dtype="uint8")


def kv_shape(model: Any, layers: Sequence[nn.Module], dtype: str | None = None) -> KVShape:
    """The KV cache of `model`, whose decoder layers are `layers`. dtype: of the cache, by default the model's.

    Raises InvalidArgument (field what, and layers or layer, found, expected where they apply) for an encoder-decoder,
    caches of other kinds than keys and values or a state, and layers that differ from the configuration. Changes nothing.
    """
    config, kept = caches_of(model)
    name = type(model).__name__
    # Before 5.24 transformers makes no cache for the last layers, which read others' keys and values.
    shared = int(_of(config, "num_kv_shared_layers") or 0)
    if len(layers) not in (len(kept), len(kept) + shared):
        raise _refused(name, f"caches {len(kept)} of {len(layers)} layers", what="layers", layers=len(kept))
    configs = _of(config, "per_layer_config") or [config] * len(kept)
    heads = []
    for index, each in enumerate(kept):
        if type(each) in _IN_BLOCKS:
            heads.append((_heads(configs[index]), _head_dim(configs[index])))
            _check_projections(name, index, layers[index], math.prod(heads[-1]))
    return KVShape(
        kept=tuple(kept),
        heads=tuple(heads),
        dtype=dtype or str(model.dtype).removeprefix("torch."),
        alike=len(heads) == len(layers) and len({*heads}) == 1,
        shared=bool(shared),
    )


def caches_of(model: Any) -> tuple[Any, Sequence[Any]]:
    """(the decoder's configuration, the caches that generate() makes for its layers).

    Raises InvalidArgument (field what) for an encoder-decoder, layers that attend to a picture, and caches of other kinds than
    keys and values or a state.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise _refused(type(model).__name__, "has no transformers configuration", what="config")
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(type(model).__name__, "is an encoder-decoder, which has two caches", what="encoder_decoder")
    config = config.get_text_config(decoder=True)
    name = type(model).__name__
    if _of(config, "cross_attention_layers"):  # Mllama
        raise _refused(name, "has layers that keep keys and values of a picture, not of tokens", what="cross_attention")
    # The cache that generate() itself would make. The cache holds no memory before its first pass.
    kept = DynamicCache(config=config).layers
    if (found := sorted({type(each).__name__ for each in kept if type(each) not in _KNOWN})) != []:
        raise _refused(
            name,
            f"has caches of the types {found}, which keep more than keys and values or a state",
            what="layer_types",
        )
    if not any(type(each) in _IN_BLOCKS for each in kept):
        raise _refused(name, "has no layer that keeps keys and values", what="layer_types")
    return config, kept


def _heads(config: Any) -> int:
    """KV heads that a layer caches. Falcon and the first Starcoder have one for all queries, latent attention has one latent;
    Falcon's later architecture groups its heads, and caches them once for each query's."""
    if _of(config, "new_decoder_architecture"):
        return int(config.num_attention_heads)
    if _of(config, "multi_query") or _of(config, "kv_lora_rank") is not None:
        return 1
    return int(_of(config, "num_key_value_heads") or config.num_attention_heads)


def _head_dim(config: Any) -> int:
    """Of latent attention half of what a token has: a latent, cached as the key, and what is rotated, as the value."""
    if (latent := _of(config, "kv_lora_rank")) is not None:
        return int(latent + config.qk_rope_head_dim) // 2
    return int(_of(config, "head_dim") or config.hidden_size // config.num_attention_heads)


# A layer without keys and values of its own, or without any, has a DummyLayer since transformers 5.24.
_KNOWN = (*_IN_BLOCKS, LinearAttentionLayer, getattr(cache_utils, "DummyLayer", LinearAttentionLayer))


def _of(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def _check_projections(name: str, index: int, layer: nn.Module, width: int) -> None:
    """Check the modules themselves: configurations name head counts in many ways, and new ones appear every month."""
    for path, module in layer.named_modules():
        width_here = getattr(module, "out_features", width)
        if path.rpartition(".")[2] in ("k_proj", "v_proj") and width_here != width:
            raise _refused(
                name,
                f"has {path} of {width_here} outputs in layer {index} where the configuration says {width}",
                what="heads",
                layer=index,
                found=width_here,
                expected=width,
            )


def _refused(name: str, why: str, **fields: object) -> InvalidArgument:
    return InvalidArgument(
        f"{name} {why}; nothing was attached; attach such a model with remap.Session and adapters.hooks, and keep its "
        "cache outside of the arena",
        model=name,
        **fields,
    )
