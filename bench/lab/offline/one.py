"""One run of `bench.lab offline`: one case, its cache kept in one way.

    python -m bench.lab.offline.one SUITE CASE POLICY RESULT(path)
    python -m bench.lab.offline.one GROUPED RESULT(path)        what the engine says to grouped queries

A process of its own in the demo's environment, so that memory, threads and caches of one run cannot affect the next.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lab.slow_link import SlowLink

import remap
from remap.errors import InvalidArgument
from remap.internals import internals
from remap.model.footprint import footprint
from remap_serve.cli.machine import machine_now
from remap_serve.cli.shared_world import build
from remap_serve.engine.pairs import PAIR
from remap_serve.engine.scheduler import TILE
from remap_serve.engine.throughput import ChosenRatio, ThroughputEngine
from remap_serve.engine.throughput_layout import lay_out

from .cases import AMPLE, GROUPED, POLICIES, Case, find

if TYPE_CHECKING:
    from collections.abc import Iterator

    from remap_serve.engine.chunk import Chunk
    from remap_serve.engine.engine import Engine

__all__ = ["refusal", "serve"]


class _Named(ThroughputEngine):
    """Measures and chooses as the library's engine does, but takes the option of this name. choosing_s: what that took."""

    name = "best"
    choosing_s = 0.0

    def _choose(self) -> ChosenRatio:
        begun = time.perf_counter()
        chosen = super()._choose()
        self.choosing_s = time.perf_counter() - begun
        return replace(chosen, ratio=chosen.options[self.name].ratio)


class _Watch:
    """What passes copy in of each kind, and out, in host blocks. It stands before the runner's own `forward`."""

    def __init__(self, engine: ThroughputEngine) -> None:
        self.kv_in = self.activations_in = self.kv_out = self.activations_out = 0
        self._held, self._forward = engine.scheduler.held, engine.runner.forward
        self._out: dict[Any, int] = {}
        engine.runner.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, chunks: list[Chunk]) -> Any:
        for chunk in chunks:
            kept = self._held[chunk.sequence]
            before = self._out.get(chunk.sequence, 0)
            for number, pair in enumerate(kept.pairs[: kept.out]):
                if pair.activations:
                    self.activations_in += 1
                    self.activations_out += number >= before
                else:
                    self.kv_in += PAIR
                    self.kv_out += PAIR * (number >= before)
            self._out[chunk.sequence] = kept.out
        return self._forward(chunks)


def _spec(case: Case, **more: Any) -> remap.KVSpec:
    model = case.model
    heads = model.heads if model.family == "opt" else model.kv_heads
    return remap.KVSpec(
        layers=model.layers,
        kv_heads=heads,
        head_dim=model.hidden // model.heads,
        block_tokens=case.block_tokens,
        dtype=case.dtype,
        **more,
    )


@contextmanager
def _serving(case: Case, policy: str, model: Any) -> Iterator[Engine]:
    requests = case.requests()
    longest = max(request.max_kv_tokens for request in requests)
    size = footprint(model, None)
    page = size.page_size(ranges=2 * case.model.layers)
    blocks = sum(PAIR * (request.max_kv_tokens // (PAIR * case.block_tokens) + 1) for request in requests)
    if policy == AMPLE:
        from remap_serve.engine import LLMEngine

        spec = _spec(case, min_blocks=blocks, max_blocks=blocks)
        capacity = size.pages(page) * page + (blocks + 1) * spec.block_bytes + page
        with remap.Session(capacity, device="cpu", page_bytes=page) as session:
            tenant = session.attach(model, kv=spec, hooks=False)
            yield LLMEngine(model, tenant, max_num_seqs=case.count, max_batch_tokens=case.batch_tokens)
            return
    budget = int(case.memory * size.pages(page)) * page
    layout = lay_out(
        budget,
        page,
        size,
        partial(_spec, case),
        host_bytes=int(case.host * blocks * _spec(case, min_blocks=0, max_blocks=1).block_bytes),
        longest_tokens=longest,
        num_seqs=case.count,
        batch_tokens=case.batch_tokens,
        chunk_align=TILE,
        ratio=None,
    )
    with remap.Session(budget, device="cpu", page_bytes=page, config=remap.advanced.Knobs(slowdown=1e6)) as session:
        tenant = session.attach(model, kv=layout.spec, hooks=False, resident_layers=layout.resident_layers)
        made = type("_Named", (_Named,), {"name": policy})
        yield made(model, tenant, max_num_seqs=layout.num_seqs, max_batch_tokens=case.batch_tokens)


def serve(suite: str, case_name: str, policy: str) -> dict[str, Any]:
    """Serve the case's requests once: {"figures": numbers, "tokens": id -> ids in one string}, ready for JSON. Seconds count from
    the first step on, in which the ratio is chosen, to the last.

    Raises InvalidArgument for an unknown case, and the errors of loading, attaching and serving.
    """
    import torch

    _, case = find(suite, case_name)
    assert policy in POLICIES
    load = machine_now()["load_1min"]
    model, _ = build(case.model, case.dtype, case.seed)
    torch.manual_seed(case.seed)
    outputs: dict[str, str] = {}
    decodes: list[tuple[int, float]] = []  # of passes without prompts: requests, seconds
    passes = running = generated = 0
    with _serving(case, policy, model) as engine:
        throughput = engine if isinstance(engine, _Named) else None
        watch = _Watch(throughput) if throughput is not None else None
        slow = SlowLink(engine.tenant, case.link) if throughput is not None and case.link else None
        if throughput is not None and slow is not None:
            throughput.runner.tenant = slow
        for request in case.requests():
            engine.add_request(request)
        cpu_s, begun = time.process_time(), time.perf_counter()
        while engine.unfinished:
            before = time.perf_counter()
            step = engine.step()
            passes += 1
            generated += len(step.sampled)
            running = max(running, len(step.sampled))
            if step.computed == len(step.sampled):
                decodes.append((step.computed, time.perf_counter() - before))
            outputs |= {output.id: " ".join(map(str, output.tokens)) for output in step.finished}
        seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_s
        stats, kv = internals(engine.tenant).stats(), internals(engine.tenant).kv
        waiting_s = stats.stall_s + (slow.waited_s if slow is not None else 0.0)
        block = kv.spec.block_bytes
        full = [taken for count, taken in decodes if count == running]
        decode_s = sum(taken for _, taken in decodes)
        figures = {
            "requests": float(len(outputs)),
            "generated_tokens": float(generated),
            "seconds": seconds,
            "tokens_per_s": generated / seconds,
            "decode_tokens_per_s": sum(count for count, _ in decodes) / decode_s if decode_s else 0.0,
            **({"full_pass_s": statistics.median(full)} if full else {}),
            "waiting_s": waiting_s,
            "computing_s": seconds - waiting_s,
            "cpu_s": cpu_s,
            "passes": float(passes),
            "running_peak": float(running),
            "weights_in_bytes": float(stats.copied_bytes),
            "cache_in_bytes": float(stats.block_bytes),
            "cache_out_bytes": float(kv.copied_out_bytes),
            "load_1min_before": load,
        }
        chosen = throughput.chosen if throughput is not None else None
        if throughput is not None and watch is not None and chosen is not None:
            figures |= {
                "choosing_s": throughput.choosing_s,
                "activation_share": chosen.ratio[0] / sum(chosen.ratio),
                "expected_tokens_per_s": chosen.options[policy].tokens_per_s,
                "expected_pass_s": chosen.options[policy].pass_s,
                "kv_in_bytes": float(watch.kv_in * block),
                "activations_in_bytes": float(watch.activations_in * block),
                "kv_out_bytes": float(watch.kv_out * block),
                "activations_out_bytes": float(watch.activations_out * block),
            }
    return {"figures": figures, "tokens": outputs}


def refusal() -> dict[str, Any]:
    """What an engine says to a model with grouped queries: asked for activations, and asked to choose."""
    case = Case("grouped", GROUPED, (8, 8), 4, 1, 1.0, dtype="float32", block_tokens=4)
    model, _ = build(case.model, case.dtype, case.seed)
    spec = _spec(
        case, min_blocks=40, max_blocks=40, layout="layer_major", host_blocks=40, streamed_blocks=40, scratch_blocks=8
    )
    with remap.Session("64MiB", device="cpu", page_bytes=4096) as session:
        tenant = session.attach(model, kv=spec, hooks=False)
        chosen = ThroughputEngine(model, tenant).chosen
        assert chosen is not None
        try:
            ThroughputEngine(model, tenant, ratio=(1, 1))
        except InvalidArgument as error:
            return {"asked": str(error), "chosen": list(chosen.ratio), "fields": dict(error.fields)}
    return {"asked": "", "chosen": list(chosen.ratio), "fields": {}}


def main(arguments: list[str]) -> None:
    """See the module."""
    *names, result = arguments
    found = refusal() if names == [GROUPED.name] else serve(*names)
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
