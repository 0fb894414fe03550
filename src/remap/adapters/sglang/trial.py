# SPDX-License-Identifier: Apache-2.0
"""A prompt and a few tokens with all layers at home and with layers away, before SGLang says that it is ready.

The adapter runs this for versions of SGLang that are newer than the tested one (`touched.prove`). The passes are those of
SGLang's own benchmark of one batch: they go through its request pool, its allocator and `ModelRunner.forward`, as requests do,
and each version of SGLang brings the benchmark that fits it.
"""

from __future__ import annotations

from typing import Any

import torch

import remap
from remap.errors import InvalidArgument
from remap.internals import internals

__all__ = ["differs"]

_PROMPT, _NEW = (1, 2, 3, 4), 2  # tokens
# Kernels for prompts and for single tokens round in other orders; a wrong byte changes logits by their own size.
_CLOSE = 0.05


def differs(runner: Any, session: remap.Session, tenant: remap.Tenant) -> str:
    """The difference between the same tokens with all layers at home and with layers away; "" if nothing. Also whether tokens
    read the keys and values that earlier passes wrote, and whether a pass wrote into layers. There must be no request.

    runner: a ModelRunner that can compute. The caller brings the layers home that this sends away. Raises what SGLang and
    the session raise.
    """
    passes = internals(tenant).stats().passes
    home, tokens = _generated(runner, list(_PROMPT), _NEW)
    passed = internals(tenant).stats().passes - passes
    if passed != len(home):
        return f"{passed} of {len(home)} passes went through the adapter"
    (whole,), _ = _generated(runner, [*_PROMPT, *tokens[:_NEW]], 0)
    found = _distance(whole, home[-1])
    if found:
        return f"of the same tokens, computed one by one and as one prompt, {found}"
    written = sorted(remap.advanced.differing(session, tenant.name))
    if written:
        return f"SGLang wrote into layers {written}"
    try:
        remap.advanced.remap(session, tenant.name, 1, 1, "nested")
    except InvalidArgument:  # so small a KV cache that no layer ever leaves
        return ""
    copies = internals(tenant).stats().copies
    away, _ = _generated(runner, list(_PROMPT), _NEW)
    found = next(filter(None, map(_distance, home, away)), "")
    if found:
        return f"with layers {tenant.streamed} away, {found}"
    return (
        ""
        if internals(tenant).stats().copies > copies
        else f"layers {tenant.streamed} were away, and none was copied in"
    )


def _generated(runner: Any, prompt: list[int], new: int) -> tuple[list[torch.Tensor], list[int]]:
    """The logits behind the prompt and behind each of `new` greedy tokens, each of shape (vocabulary,), float32, on the
    CPU; and the tokens that they choose. Frees what it allocated, and everything else in these pools.
    """
    from sglang.benchmark import one_batch  # the engine's own, there when this runs

    (request,) = one_batch.prepare_synthetic_inputs_for_latency_test(1, len(prompt), custom_inputs=[prompt])
    try:
        chosen, logits, batch = one_batch.extend([request], runner)
        found = [(logits, chosen)]
        for _ in range(new):
            chosen, logits = one_batch.decode(chosen, batch, runner)
            found.append((logits, chosen))
        return [each[0].float().cpu() for each, _ in found], [int(token[0]) for _, token in found]
    finally:
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()


def _distance(expected: torch.Tensor, got: torch.Tensor) -> str:
    """A description of logits that are not close, else ""."""
    if got.shape != expected.shape:
        return f"there are {tuple(got.shape)} logits instead of {tuple(expected.shape)}"
    distance, scale = float((got - expected).abs().max()), float(expected.abs().max())
    if distance <= _CLOSE * scale:
        return ""
    return f"logits differ by {distance:.3g}, and the largest one is {scale:.3g}"  # also where one is not a number
