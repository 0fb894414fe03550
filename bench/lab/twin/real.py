"""The real side of `bench.lab twin`: the demo's runs once more, with every pass written down.

    python -m bench.lab.twin.real KIND CONFIG(JSON) RESULT(path)

A process of its own, in the demo's environment, as the demo's runs are. Model, arena, engine and requests are the demo's.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remap.internals import internals
from remap_serve.cli.demo_config import DemoConfig
from remap_serve.cli.demo_run import serving
from remap_serve.sim.sequences import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remap_serve.engine.chunk import Chunk

__all__ = ["run_real"]


def run_real(kind: str, config: DemoConfig) -> dict[str, Any]:
    """Serve the demo's requests; kind: "remap" or "baseline". What the twin needs and is compared with, ready for JSON."""
    with serving(kind, config) as ready:
        tenant, scheduler = ready.tenant, ready.engine.scheduler
        passes = _Passes(ready.engine)
        before = internals(tenant).stats()
        result = ready.engine.run(ready.requests)
        after = internals(tenant).stats()
        layer_bytes = list(internals(tenant).layer_bytes)
    shape = ready.shape
    metrics = result.metrics
    return {
        "capacity_bytes": ready.capacity_bytes,
        "kv_blocks": ready.kv_blocks,
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
        "warm": [[len(one.prompt), one.sampling.max_tokens] for one in ready.warm],
        "requests": [[len(one.prompt), len(result.outputs[one.id].tokens)] for one in ready.requests],
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
        self._stats = internals(engine.tenant).stats
        self._run = engine.runner.run
        engine.runner.run = self

    def __call__(self, chunks: Sequence[Chunk]) -> Any:
        before = self._stats()
        begun = self._clock()
        samplers, tokens = self._run(chunks)
        seconds = self._clock() - begun
        after = self._stats()
        work = Work.of(chunks)
        self.rows.append(
            {
                "prefill_tokens": work.prefill_tokens,
                "prefill_pairs": work.prefill_pairs,
                "decode_rows": work.decode_rows,
                "decode_context": work.decode_context,
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
