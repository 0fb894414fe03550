# SPDX-License-Identifier: Apache-2.0
"""What a server with vLLM instances knows of their model before it starts them, without vLLM: by the model's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from remap.errors import InvalidArgument

from .prompts import Served
from .served_model import KV_TOKENS, ends_of, tokenizer_of

__all__ = ["engine_args_of", "vllm_model"]

SPARE_TOKENS = 512
"""Beside KV_TOKENS: of a block that vLLM keeps for itself, and of one that is not full."""


def engine_args_of(text: str | None) -> dict[str, Any]:
    """Arguments of vLLM's, from JSON. Raises InvalidArgument (fields field, value) for a text that is no JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        found = error
    if not isinstance(found, dict):
        raise InvalidArgument(
            f'engine-args: must be a JSON object, such as {{"max_model_len": 4096}}, got {text!r}; nothing was started',
            field="engine-args",
            value=text,
        )
    return found


def vllm_model(name: str, folder: str, engine_args: Mapping[str, Any]) -> tuple[Served, dict[str, Any]]:
    """The model as the server shows it, and what `vllm_engine.make` takes of it.

    A prompt and its answer have at most max_model_len tokens, of engine_args; else as many as the model takes, but no more than
    KV_TOKENS. Raises InvalidArgument (fields field, value) if it has no configuration, or engine_args another length.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder).get_text_config()
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        most = config.max_position_embeddings
    except Exception as error:  # as in `served_model.shapes`
        raise InvalidArgument(
            f"model: {name} cannot be loaded: {' '.join(str(error).split())}; nothing was started; give a folder or a hub "
            "name of a transformers model",
            field="model",
            value=name,
        ) from error
    positions = engine_args.get("max_model_len", min(most, KV_TOKENS))
    if not isinstance(positions, int) or not 1 < positions <= most:
        raise InvalidArgument(
            f"engine-args: max_model_len must be 2 to {most}, got {positions!r}; nothing was started",
            field="engine-args",
            value=positions,
        )
    dtype = getattr(torch, str(engine_args.get("dtype", "auto")), config.dtype or torch.float32)
    tokenizer = tokenizer_of(folder)
    kv_bytes = 2 * layers * kv_heads * width * dtype.itemsize * (max(positions, KV_TOKENS) + SPARE_TOKENS)
    arguments = {"kv_bytes": kv_bytes, "positions": positions, "engine_args": dict(engine_args)}
    if tokenizer is None:
        arguments["engine_args"].setdefault("skip_tokenizer_init", True)
    shown = name.rstrip("/").rpartition("/")[2]
    return Served(shown, tokenizer, positions, ends_of(folder, tokenizer), grammars=tokenizer is not None), arguments
