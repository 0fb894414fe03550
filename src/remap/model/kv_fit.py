# SPDX-License-Identifier: Apache-2.0
"""Check that a KVSpec fits its torch model: heads, head dimension and dtype.

This module looks for the model's own values in this order:

    the layers' attention modules      head_dim, and num_key_value_heads, num_kv_heads or the rows of k_proj
    a transformers model's config      num_key_value_heads, head_dim

It does not compare values that neither gives: families that keep something else than keys and values (latent
attention), layers that differ from each other, models split among ranks. It does not compare a spec of dtype "uint8" at
all: there the engine lays bytes out itself, as vLLM's does.

A named dtype may differ from the model's, since engines store float16, fp8 or int8 for models that compute in bfloat16.
Without a name KVSpec takes bfloat16, which is refused for a model of another floating dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from remap.errors import InvalidArgument
from remap.kv.spec import KVSpec

if TYPE_CHECKING:
    from torch import nn

__all__ = ["require_fit"]

_ATTENTION = ("self_attn", "attention", "attn", "self_attention")
_HEADS = ("num_key_value_heads", "num_kv_heads")


def require_fit(kv: KVSpec, model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raises InvalidArgument (fields field, value, model_value) for the first misfit. Changes nothing."""
    if kv.dtype == "uint8":
        return
    attentions = [found for layer in layers for found in _attentions(layer)]
    config = _config(model)
    for field, in_layer in (("head_dim", _head_dim), ("kv_heads", _kv_heads)):
        said = _agreed(map(in_layer, attentions))
        if said is None and not attentions:
            said = _whole(config, "head_dim" if field == "head_dim" else "num_key_value_heads")
        if said is not None and said != getattr(kv, field):
            raise _misfit(field, getattr(kv, field), said, f"give KVSpec({field}={said})")
    if not kv.dtype_named:
        said_dtype = _dtype(model, attentions)
        if said_dtype is not None and said_dtype != kv.dtype:
            raise _misfit(
                "dtype",
                kv.dtype,
                said_dtype,
                f"give KVSpec(dtype={said_dtype!r}), or name {kv.dtype!r} yourself if that is what the engine stores",
            )


def _misfit(field: str, given: object, said: object, remedy: str) -> InvalidArgument:
    return InvalidArgument(
        f"KVSpec.{field} is {given!r}, but the model's keys and values have {said!r}; nothing was attached; {remedy}",
        field=field,
        value=given,
        model_value=said,
    )


def _attentions(layer: nn.Module) -> list[Any]:
    found = (getattr(layer, name, None) for name in _ATTENTION)
    return [each for each in found if each is not None and _whole(each, "head_dim") is not None]


def _head_dim(attention: Any) -> int | None:
    return _whole(attention, "head_dim")


def _kv_heads(attention: Any) -> int | None:
    if getattr(attention, "new_decoder_architecture", False):
        return None  # Falcon's, which transformers caches once for each head of the queries
    for name in _HEADS:
        heads = _whole(attention, name)
        if heads is not None:
            return heads
    weight = _weight(attention)
    rows, dim = int(weight.shape[0]) if weight is not None and weight.dim() == 2 else 0, _head_dim(attention)
    return rows // dim if dim and rows and rows % dim == 0 else None


def _weight(attention: Any) -> Any:
    """The weight of the keys' projection, if it has one."""
    weight = getattr(getattr(attention, "k_proj", None), "weight", None)
    return None if callable(weight) else weight  # a method of torch's quantised modules, which keep it packed


def _config(model: Any) -> Any:
    """The config of a whole transformers model, else None. Engines' own models have one too, but for all ranks."""
    ours = any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)
    config = getattr(model, "config", None)
    if not ours or config is None or getattr(model, "tp_size", None) not in (None, 1):
        return None
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return (
        config if getattr(config, "kv_lora_rank", None) is None else None
    )  # its head_dim is that of a part of the keys


def _dtype(model: nn.Module, attentions: Sequence[Any]) -> str | None:
    """The dtype of the keys' projections, else of all the model's floating parameters; None if they differ, or have a
    dtype that no KV cache could have (quantised weights)."""
    projections = map(_weight, attentions)
    weights: Iterable[Any] = [each for each in projections if each is not None] or model.parameters()
    said = {str(each.dtype).removeprefix("torch.") for each in weights if each.dtype.is_floating_point}
    found = said.pop() if len(said) == 1 else None
    return found if found in ("float32", "float16", "bfloat16") else None


def _agreed(values: Iterable[int | None]) -> int | None:
    """The one value that all have; None if one has none, or they differ."""
    said = set(values)
    return said.pop() if len(said) == 1 else None


def _whole(owner: Any, name: str) -> int | None:
    value = getattr(owner, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
