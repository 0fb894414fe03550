# SPDX-License-Identifier: Apache-2.0
"""A model's sizes from the `config.json` of its checkpoint: families whose layers are alike. Pure; nothing is downloaded.

    found, notes = read_config("Qwen3-8B/config.json")

Weights are counted from the shapes, as the checkpoint has them: biases, norms and learned positions included. A feature of a
family that these counts do not know is refused by name; what they simplify (dense layers ahead of a mixture's, the windows of
gpt-oss) is in the assumptions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remap.config import invalid
from remap.errors import InvalidArgument
from remap.policy.hardware import Extra, Model, model, table_of

from .model_variants import in_dtype

__all__ = ["FAMILIES", "find_model", "read_config"]

_LATENT = ("deepseek_v2", "deepseek_v3")
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", *_LATENT)
_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", *_MIXTURES)
FAMILIES = (*_GATED, "opt", "gpt2")
"""Values of `model_type` that are understood."""
_UNLIKE = {
    "gemma2": "every other layer keeps only a window of the KV cache",
    "gemma3": "most layers keep only a window of the KV cache",
    "gemma3_text": "most layers keep only a window of the KV cache",
}
_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}


class _Config:
    """The numbers of one config.json, each refused by its name."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of the names that is there."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 40:
                raise invalid(f"{self.path}: {name}", value, f"a whole number of at least {least}")
            return value
        if default is None:
            raise invalid(f"{self.path}: {names[0]}", None, "given")
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(f"{self.path}: {name}", value, "true or false")
        return default if value is None else value


def find_model(name: str, tables: Extra = None, dtype: str | None = None) -> tuple[Model, tuple[str, ...]]:
    """(the model of this name, the assumptions): one of the tables, or, for a path, of a checkpoint's config.json or its
    folder. dtype: as in `read_config`. Raises InvalidArgument as `hardware.model` and `read_config` do."""
    if name.endswith(".json") or os.sep in name or Path(name).is_dir():
        return read_config(name, dtype)
    found = model(name, tables)
    told = table_of("models", tables)[found.name].get("assumed", ())
    if not isinstance(told, (list, tuple)) or not all(isinstance(text, str) for text in told):
        raise invalid(f"{found.name}.assumed", told, "a list of sentences")
    return (found if dtype is None else in_dtype(found, dtype)), tuple(told)


def read_config(path: str | Path, dtype: str | None = None) -> tuple[Model, tuple[str, ...]]:
    """(the model, the assumptions, in sentences). path: a config.json, or the folder of one. dtype: instead of the
    checkpoint's, see `model_variants.in_dtype`. Raises InvalidArgument (field): a file that cannot be read, a family that is not
    in FAMILIES, a number that is missing or cannot be, weights that are quantised in a way that is not known."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    config = _Config(file, _read(file))
    family = config.values.get("model_type")
    if family not in FAMILIES:
        why = f": {_UNLIKE[family]}, which is not counted here" if isinstance(family, str) and family in _UNLIKE else ""
        raise InvalidArgument(
            f"{file}: models of type {family!r} are not known{why}; nothing was computed; known are {', '.join(FAMILIES)}, and a "
            "table (--tables) may describe any model of equal layers",
            field="model",
            value=family,
            known=FAMILIES,
        )
    notes: list[str] = []
    stored = config.values.get("dtype", config.values.get("torch_dtype"))
    if stored is None:
        notes.append(f"{file} names no dtype: 16 bit is assumed")
    elif not isinstance(stored, str) or stored not in _DTYPES:
        raise invalid(f"{file}: dtype", stored, f"one of {', '.join(_DTYPES)}")
    size = 2 if stored is None else _DTYPES[stored]
    found = _gated(config, family, size, notes) if family in _GATED else _plain(config, family, size)
    wanted = dtype or _quantised(config)
    return (found if wanted is None else in_dtype(found, wanted)), tuple(notes)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(
            f"model: {file} cannot be read ({error.strerror}); nothing was computed; give the path of a "
            "checkpoint's config.json or of its folder (nothing is downloaded), or a name of the table, which has no slash",
            field="model",
            value=str(file),
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"model: {file} is not JSON ({error}); nothing was computed; give the checkpoint's config.json",
            field="model",
            value=str(file),
        ) from error
    if not isinstance(values, Mapping):
        raise invalid("model", str(file), "a config.json, one object")
    return values


def _quantised(config: _Config) -> str | None:
    given = config.values.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    if method in ("fp8", "mxfp4"):
        return str(method)
    raise InvalidArgument(
        f"{config.path}: weights quantised by {method!r} are not counted here, only fp8 and mxfp4; nothing was computed; say "
        "--dtype to count them as if they were stored so",
        field="model",
        value=method,
    )


def _name(config: _Config) -> str:
    given = config.values.get("_name_or_path")
    if isinstance(given, str) and given.strip("/ "):
        return given.rstrip("/").rsplit("/", 1)[-1]
    return config.path.resolve().parent.name or str(config.path)


def _gated(config: _Config, family: str, size: int, notes: list[str]) -> Model:
    """Llama and its relatives: RMS norms, rotary positions, a gated MLP or a mixture of them."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    vocab, layers = config.count("vocab_size"), config.count("num_hidden_layers")
    if family in _LATENT:
        kv_heads, head_dim, attention, rest = _latent(config, hidden, heads)
    else:
        kv_heads = config.count("num_key_value_heads", default=heads)
        head_dim = config.count("head_dim", default=max(1, hidden // heads))
        attention = [("qkv", hidden, (heads + 2 * kv_heads) * head_dim), ("o", heads * head_dim, hidden)]
        rest = 2 * head_dim if family.startswith("qwen3") or config.flag("use_qk_norm", False) else 0
    if config.flag("attention_bias", family == "gpt_oss") or family in ("qwen2", "qwen2_moe"):
        biased = ("qkv", "q_a", "kv_a") if family in ("qwen2", "qwen2_moe", "glm4_moe") else ("qkv", "q_a", "kv_a", "o")
        rest += sum(n for name, _, n in attention if name in biased)
    experts, active, shared, dense = _experts(config, family, notes)
    own = family in _MIXTURES and family not in ("mixtral", "gpt_oss")  # experts have a width of their own
    width = config.count("moe_intermediate_size" if own else "intermediate_size")
    operators = [*attention, ("gate_up", hidden, 2 * width), ("down", width, hidden)]
    if shared:
        operators += [("shared_gate_up", hidden, 2 * shared), ("shared_down", shared, hidden)]
    common = rest + 2 * hidden + sum(k * n for _, k, n in attention)  # norms
    rest = common + 3 * hidden * (experts * width + shared) + (hidden * experts if experts > 1 else 0)  # router
    if family == "gpt_oss":
        rest += heads + experts + experts * (2 * width + hidden)  # sinks of attention, biases
        notes.append(
            f"of {_name(config)} every second layer attends to {config.count('sliding_window', default=128)} tokens only, and "
            "is counted as if it attended to all: an upper bound of KV and of attention"
        )
    if family == "qwen2_moe":
        rest += hidden  # the gate of the shared expert
    if family == "llama" and config.flag("mlp_bias", False):
        rest += 2 * width + hidden
    outside = dense * (common + 3 * hidden * config.count("intermediate_size")) if dense else 0
    tied = config.flag("tie_word_embeddings", family == "gemma")
    context = config.count("max_position_embeddings")
    window = config.values.get("sliding_window")
    if (
        window
        and (family != "qwen2" or config.flag("use_sliding_window", False))
        and family in ("mistral", "qwen2", "mixtral")
    ):
        context = min(context, config.count("sliding_window"))
        notes.append(f"{_name(config)} attends to a window of {context} tokens: requests of more are not planned for")
    return Model(
        name=_name(config),
        layers=layers - dense,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        dtype_bytes=size,
        layer_bytes=rest * size,
        resident_bytes=(vocab * hidden * (1 if tied else 2) + hidden + outside) * size,
        linear_ops=tuple(operators),
        head=(hidden, vocab),
        context=context,
        experts=experts,
        active_experts=active,
        expert_ops=("gate_up", "down") if experts > 1 else (),
        dense_layers=dense,
    )


def _latent(config: _Config, hidden: int, heads: int) -> tuple[int, int, list[tuple[str, int, int]], int]:
    """(KV heads, their size, operators, norms) of DeepSeek's attention, whose KV cache is one latent for all heads."""
    latent, rotary = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    plain, value = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    if (latent + rotary) % 2:
        raise invalid(f"{config.path}: kv_lora_rank and qk_rope_head_dim", latent + rotary, "an even number together")
    queries, rank = heads * (plain + rotary), config.count("q_lora_rank", default=0)
    operators = [("q_a", hidden, rank), ("q_b", rank, queries)] if rank else [("q", hidden, queries)]
    operators += [
        ("kv_a", hidden, latent + rotary),
        ("kv_b", latent, heads * (plain + value)),
        ("o", heads * value, hidden),
    ]
    return 1, (latent + rotary) // 2, operators, rank + latent


def _experts(config: _Config, family: str, notes: list[str]) -> tuple[int, int, int, int]:
    """(experts, of which a token uses, width of the shared ones, layers without any, the first)."""
    if family not in _MIXTURES:
        return 1, 1, 0, 0
    for name, least in (("decoder_sparse_step", 1), ("moe_layer_freq", 1), ("mlp_only_layers", [])):
        if config.values.get(name) not in (None, least):
            raise invalid(f"{config.path}: {name}", config.values[name], f"{least}: layers without experts come first")
    experts, active = (
        config.count("num_local_experts", "num_experts", "n_routed_experts"),
        config.count("num_experts_per_tok"),
    )
    shared, dense = 0, 0
    if family == "qwen2_moe":
        shared = config.count("shared_expert_intermediate_size")
    elif family in ("glm4_moe", *_LATENT):
        shared = config.count("n_shared_experts", default=0, least=0) * config.count("moe_intermediate_size")
        dense = config.count("first_k_dense_replace", default=0, least=0)
    if dense:
        notes.append(
            f"{dense} layers of {_name(config)}, the first ones, have no experts and are never remapped: their KV and weights "
            "are counted, their time is not"
        )
    return experts, active, shared, dense


def _plain(config: _Config, family: str, size: int) -> Model:
    """OPT and GPT-2: layer norms, learned positions, biases everywhere, embeddings tied."""
    if family == "opt":
        hidden, heads, layers = (
            config.count(f"{n}") for n in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        width, context = config.count("ffn_dim"), config.count("max_position_embeddings")
        positions = context + 2
        if config.count("word_embed_proj_dim", default=hidden) != hidden or not config.flag(
            "do_layer_norm_before", True
        ):
            raise invalid(
                f"{config.path}: word_embed_proj_dim, do_layer_norm_before",
                "others",
                f"{hidden} and true, as most OPTs",
            )
    else:
        hidden, heads, layers = (config.count(n) for n in ("n_embd", "n_head", "n_layer"))
        width, context = config.count("n_inner", default=4 * hidden), config.count("n_positions")
        positions = context
    vocab = config.count("vocab_size")
    matrices = 4 * hidden * hidden + 2 * hidden * width
    rest = 4 * hidden + hidden + width + 4 * hidden  # biases of qkv and o, of the MLP; two norms
    tied = config.flag("tie_word_embeddings", True)
    return Model(
        name=_name(config),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=max(1, hidden // heads),
        vocab=vocab,
        dtype_bytes=size,
        layer_bytes=(matrices + rest) * size,
        resident_bytes=(vocab * hidden * (1 if tied else 2) + positions * hidden + 2 * hidden) * size,
        linear_ops=(("qkv", hidden, 3 * hidden), ("o", hidden, hidden), ("fc1", hidden, width), ("fc2", width, hidden)),
        head=(hidden, vocab),
        context=context,
    )
