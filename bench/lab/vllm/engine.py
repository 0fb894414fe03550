"""One engine of `bench.lab vllm`, in a process of its own: vLLM, with or without remap, serves the loads that it is given.

    python -m bench.lab.vllm.engine [spec.json] < spec.json > result.json

Requests come when the load says, whether or not earlier ones are done (open loop). vLLM's engine runs in this process, so that
what it does in each step can be counted; its own code is the same as behind `vllm serve`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["main", "serve"]


def main() -> None:
    """Reads the specification from a file or standard input, writes the results as the last line of standard output."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")) if len(sys.argv) > 1 else json.load(sys.stdin)
    begun = time.perf_counter()
    engine = _engine(spec)
    results: dict[str, Any] = {"started_s": time.perf_counter() - begun, "loads": {}}
    for load in spec["loads"]:
        results["loads"][load["name"]] = serve(engine, load["items"], spec["vocabulary"])
    if spec["side"] == "remap":
        results["manifest"] = engine.collective_rpc("remap_manifest")[0]
    sys.stdout.write("\n" + json.dumps(results) + "\n")


def _engine(spec: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from remap.adapters.vllm.served import HOST_KV

    host: dict[str, Any] = {}
    if spec["host_kv_bytes"]:
        # vLLM's own worker copies with streams of a GPU and does not start on a CPU: the copies are the adapter's, on all sides.
        module, name = HOST_KV
        more = {"spec_module_path": module, "spec_name": name, "offload_prompt_only": False}
        host["kv_offloading_size"] = spec["host_kv_bytes"] / 2**30
        host["kv_transfer_config"] = KVTransferConfig(kv_connector_extra_config=more)
    arguments = EngineArgs(
        model=spec["model"],
        dtype=spec["dtype"],
        kv_cache_memory_bytes=spec["kv_bytes"],
        block_size=spec["block_tokens"],
        max_model_len=spec["max_model_len"],
        max_num_seqs=spec["max_num_seqs"],
        max_num_batched_tokens=spec["max_batch_tokens"],
        disable_log_stats=True,
        additional_config={"remap": spec["remap"]} if spec["side"] == "remap" else {},
        **{"enforce_eager": True, **spec.get("engine", {})},
        **host,
    )
    return LLMEngine.from_engine_args(arguments)


class _Counts:
    """What vLLM's scheduler does, counted at its own methods."""

    def __init__(self, engine: Any) -> None:
        core = engine.engine_core.engine_core
        self.scheduler, self.core = core.scheduler, core
        self.preemptions = self.scheduled_tokens = self.loaded_tokens = 0
        self.blocks_peak = self.alpha_peak = 0
        self._preempt, self._schedule = self.scheduler._preempt_request, self.scheduler.schedule
        self.scheduler._preempt_request = self._on_preempt
        self.scheduler.schedule = self._on_schedule
        self._connector = self.scheduler.connector
        if self._connector is not None:
            self._load, self._connector.update_state_after_alloc = (
                self._connector.update_state_after_alloc,
                self._on_load,
            )

    def _on_preempt(self, *args: Any, **kwargs: Any) -> Any:
        self.preemptions += 1
        return self._preempt(*args, **kwargs)

    def _on_schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        self.scheduled_tokens += output.total_num_scheduled_tokens
        self.blocks_peak = max(self.blocks_peak, self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)
        link = getattr(self.scheduler, "remap", None)
        if link is not None:
            self.alpha_peak = max(self.alpha_peak, link.group.target[0])
        return output

    def _on_load(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.loaded_tokens += num_external_tokens
        self._load(request, blocks, num_external_tokens)

    def stop(self) -> None:
        del self.scheduler._preempt_request, self.scheduler.schedule
        if self._connector is not None:
            del self._connector.update_state_after_alloc


def serve(engine: Any, items: list[list[Any]], vocabulary: int) -> dict[str, Any]:
    """Serve [time_s, prompt tokens, output tokens, seed of the prompt] each; greedy, to the full length. Times in seconds."""
    import random

    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    counts = _Counts(engine)
    streamed = _streamed(engine)
    arrived: dict[str, float] = {}
    last: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    ttft: list[float] = []
    tbt: list[float] = []
    start = time.perf_counter()
    coming, index, needed = list(items), 0, 0
    while coming or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while coming and coming[0][0] <= now:
            due, prompt, output, seed = coming.pop(0)
            name, draw = f"r{index}", random.Random(seed)
            ids = [draw.randrange(10, vocabulary) for _ in range(prompt)]
            parameters = SamplingParams(
                temperature=0.0,
                max_tokens=output,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
                detokenize=False,
            )
            engine.add_request(name, {"prompt_token_ids": ids}, parameters)
            arrived[name], tokens[name] = due, []
            needed += prompt + output - 1
            index += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, min(0.01, coming[0][0] - now)))
            continue
        for output in engine.step():
            new = output.outputs[0].token_ids if output.outputs else []
            if not new:
                continue
            seen = time.perf_counter() - start
            name = output.request_id
            (ttft if name not in last else tbt).append(seen - last.get(name, arrived[name]))
            last[name] = seen
            tokens[name].extend(new)
    took = time.perf_counter() - start
    counts.stop()
    return {
        "requests": index,
        "seconds": took,
        "tokens": sum(map(len, tokens.values())),
        "answers": [tokens[f"r{number}"] for number in range(index)],
        "ttft_s": ttft,
        "tbt_s": tbt,
        "preemptions": counts.preemptions,
        "recomputed_tokens": counts.scheduled_tokens - needed,
        "loaded_tokens": counts.loaded_tokens,
        "blocks_peak": counts.blocks_peak,
        "alpha_peak": counts.alpha_peak,
        **{name: after - streamed[name] for name, after in _streamed(engine).items()},
    }


def _streamed(engine: Any) -> dict[str, float]:
    """Bytes streamed, stalls and passes so far; nothing without remap."""
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    if not hasattr(worker, "remap_snapshot"):
        return {}
    (tenant,) = worker.remap_snapshot()["tenants"].values()
    return {name: tenant[name] for name in ("copied_bytes", "copies", "stall_s", "passes", "compute_s")}


if __name__ == "__main__":
    main()
