# SPDX-License-Identifier: Apache-2.0
"""A few tokens with the adapter's cache and without it, before the first request.

`attach` runs this for versions of transformers that are newer than the tested ones (`touched.prove`). The names that the
adapter uses may all be there while transformers passes the cache in another way, so the trial goes the way that requests
go: `generate()` where it makes the cache itself, else two calls of the model (a prompt, then one token).

Both runs use the attached model. They differ in the cache only, and the bare one's lies outside of the arena.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from transformers import DynamicCache, GenerationConfig

__all__ = ["differs"]

_PROMPT, _NEW = 3, 3  # tokens
# Kernels may round in another order where strides differ; a wrong cache changes logits by their own size.
_CLOSE = 0.02


class AttachedOnTrial(Protocol):
    """The part of `transformers.Attached` that this module uses."""

    model: Any
    implicit: bool
    makes_caches: bool
    cached_tokens: int

    def cache(self) -> Any: ...


def differs(attached: AttachedOnTrial) -> str:
    """The differences between a few tokens of the attached model with its cache and with transformers' own; "" if there are none.

    Both runs draw the same random numbers (dropout of a model in training mode), and so do the caller's next ones.
    Raises what transformers raises.
    """
    run = _generated if attached.implicit else _called
    device = attached.model.device
    before, logits = attached.cached_tokens, []
    for bare in (True, False):
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            logits.append(run(attached, bare))
        if bare and attached.cached_tokens != before:
            return "a call without a cache of the adapter used one"
    expected, got = logits
    written, needed = attached.cached_tokens - before, _PROMPT + _NEW - 1
    if written < needed:
        return f"{written} of {needed} tokens went through the adapter's cache"
    if got.shape != expected.shape:
        return f"logits of shape {tuple(got.shape)} where the bare model gives {tuple(expected.shape)}"
    distance, scale = (got - expected).abs().max().item(), expected.abs().max().item()
    if not distance <= _CLOSE * scale:  # also where one of them is not a number
        return f"logits differ by {distance:.3g}, and the largest one is {scale:.3g}"
    return ""


def _generated(attached: AttachedOnTrial, bare: bool) -> torch.Tensor:
    """Logits of the new tokens, shape (new tokens, 1, vocabulary), in float32."""
    ids = _prompt(attached)
    # All that the model's own configuration could set otherwise, so that there is one cache, written in two kinds of pass.
    how = GenerationConfig(
        max_new_tokens=_NEW,
        min_new_tokens=_NEW,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        cache_implementation="dynamic",
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    attached.makes_caches = not bare
    try:
        out = attached.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
    finally:
        attached.makes_caches = True
    return torch.stack(list(out.logits)).float()


def _called(attached: AttachedOnTrial, bare: bool) -> torch.Tensor:
    """The model's first output for the last position of each call, shape (calls, 1, width), in float32."""
    model, ids = attached.model, _prompt(attached)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache(config=model.config.get_text_config(decoder=True)) if bare else attached.cache()
    calls = (ids, *ids.new_ones(_NEW - 1, 1, 1))
    return torch.stack([model(input_ids=each, use_cache=True, **{name: cache})[0][:, -1] for each in calls]).float()


def _prompt(attached: AttachedOnTrial) -> torch.Tensor:
    return torch.arange(_PROMPT, device=attached.model.device)[None]
