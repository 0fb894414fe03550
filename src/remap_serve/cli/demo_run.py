# SPDX-License-Identifier: Apache-2.0
"""One run of the demo in a process of its own: `python -m remap_serve.cli.demo_run KIND CONFIG RESULT PROGRESS_FD`.

Each run has its own process, so that memory, threads and warm caches of one run cannot affect the next. The three kinds
differ in two places only: the bytes of the arena, and whether the engine gets the session (remap) or not
(unconstrained, baseline) and then never calls `session.step`. A fourth kind, `prepare`, converts the model into the
cache and ends.

The run writes its progress to the file descriptor, one JSON object per line, so that no library's output can disturb
it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remap.errors import Error, InvalidArgument
from remap.model.footprint import footprint
from remap.sizes import show_size

from .demo_config import FITTING_MODELS, DemoConfig, Progress
from .demo_report import RunResult
from .demo_requests import make_requests

if TYPE_CHECKING:
    from remap import Session, Tenant
    from remap_serve.engine import LLMEngine, Request
    from remap_serve.engine.engine import StepOutput

__all__ = ["kv_limits", "run_one", "serving"]

MODEL_TENANT = "SmolLM2"
WARM_TOKENS = 8
PROGRESS_EVERY_S = 0.1


def kv_limits(kind: str, config: DemoConfig, weight_pages: int, block_bytes: int, wanted: int) -> tuple[int, int, int]:
    """(arena bytes, blocks at the start, most blocks ever). wanted: blocks with which no request would ever wait.

    All pages of the budget that the weights leave are KV from the start, in the baseline as in remap, so none lies
    idle. The KV region has addresses for the whole budget, so that every page has its place there; addresses cost
    nothing.
    """
    if kind == "unconstrained":
        pages = -(-wanted * block_bytes // config.page_bytes)
        return (weight_pages + pages) * config.page_bytes, wanted, wanted
    budget_pages = config.budget_bytes // config.page_bytes
    start = max(0, budget_pages - weight_pages) * config.page_bytes // block_bytes
    most = -(-budget_pages * config.page_bytes // block_bytes)
    return budget_pages * config.page_bytes, start, max(most, 1)


@dataclass(frozen=True)
class DemoServing:
    """The demo's model on an arena, and an engine that has made its first passes.

    shape: the model's transformers config.
    """

    session: Session
    tenant: Tenant
    engine: LLMEngine
    shape: Any
    requests: list[Request]
    warm: list[Request]
    capacity_bytes: int
    kv_blocks: int


@contextmanager
def serving(kind: str, config: DemoConfig) -> Iterator[DemoServing]:
    """Prepare everything before the demo's requests are served; the session is closed at the end.

    Raises the errors of loading, attaching and serving.
    """
    import torch

    import remap
    from remap.cli import smollm2
    from remap_serve.engine import LLMEngine, Request, SamplingParams

    torch.set_num_threads(config.threads)
    model, tokenizer, folder = smollm2.load(config.dtype)
    shape = model.config
    requests = make_requests(tokenizer, config.requests, frozenset([tokenizer.eos_token_id]))
    wanted = sum(-(-request.max_kv_tokens // config.block_tokens) for request in requests)

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
    _room(config, weight_pages, spec(0, 1).block_bytes, requests)
    capacity, start, most = kv_limits(kind, config, weight_pages, spec(0, 1).block_bytes, wanted)
    with remap.Session(capacity=capacity, device="cpu", page_bytes=config.page_bytes) as session:
        tenant = session.attach(
            model,
            layers=model.model.layers,
            name=MODEL_TENANT,
            kv=spec(start, most),
            weights=folder if config.weights_from_file else None,
            hooks=False,  # the engine waits for layers itself
        )
        engine = LLMEngine(
            model,
            tenant,
            session=session if kind == "remap" else None,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            decode_cost=config.decode_cost,
        )
        # First passes pay for what every later one finds ready: thread pools, scratch memory, the caches of the
        # kernels. A prefill as large as passes get, or as the cache has room for, and some decode steps, with tokens that
        # no real request begins with.
        length = min(config.max_batch_tokens, start * config.block_tokens - WARM_TOKENS)
        tokens = tuple(range(1000, 1000 + length))
        warm = [Request(f"warm-{i}", tokens[i:], SamplingParams(max_tokens=WARM_TOKENS)) for i in range(2)]
        engine.run(warm)
        yield DemoServing(session, tenant, engine, shape, requests, warm, capacity, start)


def _room(config: DemoConfig, weight_pages: int, block_bytes: int, requests: Sequence[Request]) -> None:
    """Raises InvalidArgument if the budget does not hold the weights and the longest request, which the baseline must
    serve.
    """
    longest = max(-(-request.max_kv_tokens // config.block_tokens) for request in requests)
    least = (weight_pages + -(-longest * block_bytes // config.page_bytes)) * config.page_bytes
    if config.budget_bytes < least:
        raise InvalidArgument(
            f"budget must hold the weights ({show_size(weight_pages * config.page_bytes)}) and the KV cache of the "
            f"longest request ({longest} blocks), together {show_size(least)}, got {show_size(config.budget_bytes)}; "
            f"nothing was served; give at least {show_size(least)}",
            name="budget",
            value=config.budget_bytes,
            needed=least,
        )


def run_one(kind: str, config: DemoConfig, report: Callable[[Progress], None]) -> RunResult:
    """Serve all requests once. Calls `report` about ten times a second, between steps.

    Raises the errors of loading, attaching and serving; the session is closed in any case.
    """
    if config.tenants > FITTING_MODELS:
        from .demo_cold import run_cold

        return run_cold(kind, config, report)
    if config.tenants > 1:
        from .demo_tenants import run_tenants

        return run_tenants(kind, config, report)
    with serving(kind, config) as ready:
        before = ready.session.snapshot().tenants[MODEL_TENANT].stall_s
        result = ready.engine.run(ready.requests, on_step=_reporter(ready.requests, report))
        stalled = ready.session.snapshot().tenants[MODEL_TENANT].stall_s - before

    metrics = result.metrics
    summary = metrics.summary()
    return RunResult(
        kind=kind,
        wall_s=metrics.duration_s,
        preemptions=metrics.preemptions,
        recomputed_tokens=metrics.recomputed_tokens,
        ttft_s=tuple(metrics.ttft_s),
        tbt_s=tuple(metrics.tbt_s),
        tpot_s=tuple(metrics.tpot_s),
        longest_gap_s=tuple(metrics.longest_gap_s),
        capacity_bytes=ready.capacity_bytes,
        kv_blocks_start=metrics.kv_blocks_start,
        kv_blocks_peak=int(summary["kv_blocks_peak"]),
        layers=ready.shape.num_hidden_layers,
        layers_remapped_peak=summary["layers_remapped_peak"],
        stall_fraction=stalled / metrics.duration_s if metrics.duration_s > 0 else 0.0,
        tokens=tuple(result.outputs[request.id].tokens for request in ready.requests),
        timeline=tuple(metrics.timeline),
        pauses=metrics.pauses,
    )


def _reporter(requests: list[Request], report: Callable[[Progress], None]) -> Callable[[LLMEngine, StepOutput], None]:
    """The engine's on_step: it counts tokens, and reports at most once every PROGRESS_EVERY_S."""
    limits = {request.id: request.sampling.max_tokens for request in requests}
    done = {"generated": 0, "finished": 0, "total": sum(limits.values())}
    last = time.perf_counter()

    def on_step(engine: LLMEngine, step: StepOutput) -> None:
        nonlocal last
        done["generated"] += len(step.tokens)
        done["finished"] += len(step.finished)
        done["total"] -= sum(limits[output.id] - len(output.tokens) for output in step.finished)
        now = time.perf_counter()
        if now - last < PROGRESS_EVERY_S and done["finished"] < len(limits):
            return
        last = now
        sample = engine.metrics.timeline[-1]
        report(
            Progress(
                generated=done["generated"],
                total=done["total"],
                finished=done["finished"],
                running=sample.running,
                waiting=sample.waiting,
                kv_blocks=sample.kv_usable_blocks,
                layers_remapped=sample.layers_remapped,
                preemptions=sample.preemptions,
            )
        )

    return on_step


def main(arguments: list[str]) -> None:
    """Run the command line KIND CONFIG(JSON) RESULT(path) PROGRESS_FD."""
    kind, config_text, result_path, progress_fd = arguments
    config = DemoConfig(**json.loads(config_text))
    if kind == "prepare":
        from remap.cli import smollm2

        smollm2.load(config.dtype)
        return
    with os.fdopen(int(progress_fd), "w", buffering=1) as pipe:

        def report(progress: Progress) -> None:
            pipe.write(json.dumps(vars(progress)) + "\n")

        try:
            found: dict[str, Any] = run_one(kind, config, report).to_dict()
        except Error as error:  # the parent raises it again, and shows no traceback
            found = {"refused": isinstance(error, InvalidArgument), "message": str(error)}
    Path(result_path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
