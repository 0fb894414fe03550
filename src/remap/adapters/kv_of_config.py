# SPDX-License-Identifier: Apache-2.0
"""The KV cache that a transformers model needs, from its configuration and its attention modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from remap.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import nn

__all__ = ["KVShape", "caches_of", "kv_shape"]


@dataclass(frozen=True)
class KVShape:
    """A model's KV cache. windows: for each decoder layer its sliding window in tokens, or None for all tokens."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    windows: tuple[int | None, ...]


def kv_shape(model: Any, layers: Sequence[nn.Module], dtype: str | None = None) -> KVShape:
    """The KV cache of `model`, whose decoder layers are `layers`. dtype: of the cache, by default the model's.

    Raises InvalidArgument (field what, and layers or layer, found, expected where they apply) if one KVSpec cannot
    describe the cache: for an encoder-decoder, layers that keep a state instead of keys and values, layers that share
    keys and values, and layers that differ in number of heads or head dimension. Changes nothing.
    """
    config, kept = caches_of(model)
    name = type(model).__name__
    if len(kept) != len(layers):
        raise _refused(
            name,
            f"caches {len(kept)} of {len(layers)} layers: some share keys and values",
            what="shared",
            layers=len(kept),
        )
    configs = _of(config, "per_layer_config") or [config]  # transformers before 5.19 has one for all layers
    heads = [_heads(each) for each in configs]
    dims = [_head_dim(each) for each in configs]
    if len({*zip(heads, dims)}) != 1:
        raise _refused(
            name, f"has layers with different (KV heads, head dimension): {sorted({*zip(heads, dims)})}", what="heads"
        )
    for index, layer in enumerate(layers):
        _check_projections(name, index, layer, heads[0] * dims[0])
    windows = tuple(_of(each, "sliding_window") for each in kept)
    return KVShape(len(layers), heads[0], dims[0], dtype or str(model.dtype).removeprefix("torch."), windows)


def caches_of(model: Any) -> tuple[Any, Sequence[Any]]:
    """(the decoder's configuration, the caches that generate() makes for its layers).

    Raises InvalidArgument (field what) for an encoder-decoder, and layers that keep more than keys and values.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise _refused(type(model).__name__, "has no transformers configuration", what="config")
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(type(model).__name__, "is an encoder-decoder, which has two caches", what="encoder_decoder")
    config = config.get_text_config(decoder=True)
    name = type(model).__name__
    # The cache that generate() itself would make. The cache holds no memory before its first pass.
    kept = DynamicCache(config=config).layers
    if (found := sorted({type(each).__name__ for each in kept if type(each) not in _KNOWN})) != []:
        raise _refused(
            name, f"has caches of the types {found}, which keep more than keys and values", what="layer_types"
        )
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


_KNOWN = (DynamicLayer, DynamicSlidingWindowLayer)


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
