"""One instance, made in its actor: the case's model in a session of its own. And what its answers are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import remap
from remap.model.footprint import footprint
from remap_serve.cli.shared_world import build
from remap_serve.cluster.instance import ClusterInstance
from remap_serve.cluster.transport import ASSUMED
from remap_serve.engine import LLMEngine
from remap_serve.engine.request import Request

from .cases import POLICIES, Case, Policy, find

__all__ = ["as_good", "attach", "engine_answers", "make"]


MARGIN = 1e-3
"""Of two logits: tokens that are as good."""


@cache
def _blocks(case: Case, page_bytes: int, block_bytes: int, ample: bool) -> int:
    if ample:
        return sum(-(-one.max_kv_tokens // case.block_tokens) for one in case.requests()) + 1
    return max(8, int(case.kv_share * page_bytes) // block_bytes)


def attach(name: str, its: Case, way: Policy) -> tuple[Any, remap.Session, remap.Tenant]:
    """(model, session, tenant) of one instance."""
    model, file = build(its.model, its.dtype, its.seed)
    config: Any = model.config
    heads = config.num_attention_heads
    common: dict[str, Any] = {
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", heads),
        "head_dim": config.hidden_size // heads,
        "block_tokens": its.block_tokens,
        "dtype": its.dtype,
    }
    block_bytes = remap.KVSpec(**common, min_blocks=0, max_blocks=1).block_bytes
    weights = footprint(model, None).pages(its.page_bytes) * its.page_bytes
    blocks = _blocks(its, weights, block_bytes, way.ample)
    capacity = weights + -(-blocks * block_bytes // its.page_bytes) * its.page_bytes
    knobs = remap.Config() if way.streams else remap.Config(max_layers=0)
    session = remap.Session(capacity, device="cpu", page_bytes=its.page_bytes, config=knobs)
    # Addresses for the whole arena, so that every page has its place in the KV region.
    host = _blocks(its, weights, block_bytes, True) if way.swaps else 0
    spec = remap.KVSpec(**common, min_blocks=blocks, max_blocks=capacity // block_bytes + 1, host_blocks=host)
    return model, session, session.attach(model, name=name, kv=spec, weights=file, hooks=False)


def engine_answers(its: Case, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    """The tokens of one engine with room for all."""
    model, session, tenant = attach("engine", its, POLICIES["ideal"])
    with session:
        engine = LLMEngine(model, tenant, max_num_seqs=its.max_num_seqs, max_batch_tokens=its.max_batch_tokens)
        return {id: output.tokens for id, output in engine.run(requests).outputs.items()}


def as_good(model: Any, request: Request, wanted: Sequence[int], found: Sequence[int]) -> bool:
    """Whether this greedy answer is as right as the wanted one: as long, and where they part for the first time both tokens are
    as good by the model alone. Behind that they are different texts, which are not compared."""
    if len(found) != len(wanted):
        return False
    place = next((place for place, (one, other) in enumerate(zip(wanted, found)) if one != other), None)
    if place is None:
        return True
    import torch

    known = torch.tensor([[*request.prompt, *wanted[:place]]])
    with torch.no_grad():
        logits = model(known, use_cache=False).logits[0, -1].float()
    return abs(float(logits[wanted[place]] - logits[found[place]])) <= MARGIN


def make(name: str, suite: str, case: str, policy: str) -> ClusterInstance:
    """The instance; its session lives as long as it does."""
    import torch

    found, its = find(suite, case)
    torch.set_num_threads(found.threads)
    model, session, tenant = attach(name, its, POLICIES[policy])
    return ClusterInstance(
        name,
        model,
        session,
        tenant,
        ASSUMED,
        max_num_seqs=its.max_num_seqs,
        max_batch_tokens=its.max_batch_tokens,
        decode_cost=5,
    )
