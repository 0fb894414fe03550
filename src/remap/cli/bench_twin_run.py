"""The real side of `remap bench twin`: the demo's runs once more, with every pass written down.

    python -m remap.cli.bench_twin_run KIND CONFIG(JSON) RESULT(path)

A process of its own, in the demo's environment, as the demo's runs are. Model, arena, engine and requests are the demo's.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remap.footprint import footprint

from .demo_run import MODEL_TENANT, DemoConfig, kv_limits, make_requests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remap.engine.scheduler import Chunk

__all__ = ["run_real"]

WARM_TOKENS = 8


def run_real(kind: str, config: DemoConfig) -> dict[str, Any]:
    """Serve the demo's requests; kind: "remap" or "baseline". What the twin needs and is compared with, ready for JSON."""
    import torch

    import remap
    from remap.engine import LLMEngine, Request, SamplingParams

    from . import smollm2

    torch.set_num_threads(config.threads)
    model, tokenizer, folder = smollm2.load(config.dtype)
    shape = model.config
    requests = make_requests(tokenizer, config.requests, frozenset([tokenizer.eos_token_id]))

    def spec(start: int, most: int) -> remap.KVSpec:
        return remap.KVSpec(
            layers=shape.num_hidden_layers,
            kv_heads=shape.num_key_value_heads,
            head_dim=shape.hidden_size // shape.num_attention_heads,
            block_tokens=config.block_tokens,
            dtype=config.dtype,
            min_blocks=start,
            max_blocks=most,
        )

    weight_pages = footprint(model, None).pages(config.page_bytes)
    capacity, start, most = kv_limits(kind, config, weight_pages, spec(0, 1).block_bytes, 0)
    with remap.Session(capacity=capacity, device="cpu", page_bytes=config.page_bytes) as session:
        tenant = session.attach(
            model,
            layers=model.model.layers,
            name=MODEL_TENANT,
            kv=spec(start, most),
            weights=folder if config.weights_from_file else None,
        )
        engine = LLMEngine(
            model,
            tenant,
            session=session if kind == "remap" else None,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            decode_cost=config.decode_cost,
        )
        passes = _Passes(engine)
        warm = tuple(range(1000, 1000 + config.max_batch_tokens))
        engine.run([Request(f"warm-{i}", warm[i:], SamplingParams(max_tokens=WARM_TOKENS)) for i in range(2)])
        passes.rows.clear()
        before = tenant._prefetcher.stats()
        result = engine.run(requests)
        after = tenant._prefetcher.stats()
        layer_bytes = list(tenant._attachment.layer_bytes)
        scheduler = engine.scheduler
    metrics = result.metrics
    return {
        "capacity_bytes": capacity,
        "kv_blocks": start,
        "layer_bytes": layer_bytes,
        "shape": {
            "hidden": shape.hidden_size,
            "heads": shape.num_attention_heads,
            "kv_heads": shape.num_key_value_heads,
            "vocab": shape.vocab_size,
            "intermediate": shape.intermediate_size,
            "context": shape.max_position_embeddings,
        },
        "scheduling": {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_batch_tokens": scheduler.max_batch_tokens,
            "chunk_align": scheduler.chunk_align,
            "decode_cost": scheduler.decode_cost,
        },
        "warm": [[len(warm) - i, WARM_TOKENS] for i in range(2)],
        "requests": [[len(one.prompt), len(result.outputs[one.id].tokens)] for one in requests],
        "passes": passes.rows,
        "copy_s": after.copy_s - before.copy_s,
        "copy_bytes": after.timed_bytes - before.timed_bytes,
        "copies": after.copies - before.copies,
        "duration_s": metrics.duration_s,
        "generated_tokens": metrics.generated_tokens,
        "preemptions": metrics.preemptions,
        "recomputed_tokens": metrics.recomputed_tokens,
        "ttft_s": metrics.ttft_s,
        "tbt_s": metrics.tbt_s,
        "timeline": [asdict(sample) for sample in metrics.timeline],
    }


class _Passes:
    """What each pass computed, and how long it took: a row for every one that came to its end."""

    def __init__(self, engine: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self._clock = engine._clock
        self._stats = engine.tenant._prefetcher.stats
        self._run = engine.runner.run
        engine.runner.run = self

    def __call__(self, chunks: Sequence[Chunk]) -> Any:
        from remap.engine.attention import is_decode

        before = self._stats()
        begun = self._clock()
        samplers, tokens = self._run(chunks)
        seconds = self._clock() - begun
        after = self._stats()
        prompts = [chunk for chunk in chunks if not is_decode(chunk)]
        rows = [chunk for chunk in chunks if is_decode(chunk)]
        self.rows.append(
            {
                "prefill_tokens": sum(chunk.count for chunk in prompts),
                "prefill_pairs": sum(one.count * one.start + one.count * (one.count + 1) // 2 for one in prompts),
                "decode_rows": len(rows),
                "decode_context": sum(chunk.end for chunk in rows),
                "sampled_rows": len(samplers),
                "seconds": seconds,
                "stall_s": after.stall_s - before.stall_s,
                "copied_bytes": after.timed_bytes - before.timed_bytes,
            }
        )
        return samplers, tokens


def main(arguments: list[str]) -> None:
    """KIND CONFIG(JSON) RESULT(path)."""
    kind, config, result = arguments
    Path(result).write_text(json.dumps(run_real(kind, DemoConfig(**json.loads(config)))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
