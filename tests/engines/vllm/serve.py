"""Serve what a JSON file asks for, with vLLM, and write down what came out: python serve.py JOB.json OUT.json

JOB: {"runs": [run, ...]}, one engine each, one after the other in this process (unless its environment says otherwise).
run: {"name", "model", "remap": bool, "engine": keyword arguments of LLM, "settings": of remap, "rounds": [[request, ...], ...],
"told_more": blocks that vLLM is told of beyond those that there can be,
"keep": bool, "wait": a file to wait for first, "touch": one to make at last,
"calls": of workers, [method, *arguments] each, made after the step "calls_at", "load": one before all rounds}.
request: {"prompt": token ids, "new": int, "at": the step before which it arrives, "abort": the step before which
it is aborted, "image" and "audio": seeds of what the prompt holds,
"params": of SamplingParams ("structured": of StructuredOutputsParams), "lora": folder, "priority": int}.
"tokens" of a request with several answers are those of all.

OUT: by name of the run {"rounds": [{"tokens", "outputs", "cached", "alphas", "free", "usable", "reset"}, ...], "preempted", ...}.
"outputs": how often a request got tokens. Where the engine lives in this process the scheduler's books are compared with what
they must be, after every step.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = {"worker_cls": "remap.adapters.vllm.Worker", "scheduler_cls": "remap.adapters.vllm.Scheduler"}
DEFAULTS = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "block_size": 32,
    "disable_log_stats": False,
    "enable_prefix_caching": False,
}


PARAMETERS = {"temperature": 0, "ignore_eos": True, "detokenize": False}


def _tokens(answers: dict[int, list[int]]) -> list[Any]:
    """Of one answer, or of all."""
    in_order = [answers[index] for index in sorted(answers)]
    return in_order if len(in_order) > 1 else [token for answer in in_order for token in answer]


def _seen(request: dict[str, Any]) -> dict[str, Any]:
    """Noise, as pictures and as sound."""
    import numpy as np

    draws = {
        "image": lambda draw: draw.integers(0, 255, (84, 84, 3), dtype=np.uint8),
        "audio": lambda draw: (draw.normal(size=8000).astype(np.float32), 16000),
    }
    data = {
        kind: [drawn(np.random.default_rng(seed)) for seed in request[kind]]
        for kind, drawn in draws.items()
        if kind in request
    }
    return {"multi_modal_data": data} if data else {}


class Stepper:
    """One LLM, stepped by hand."""

    def __init__(self, run: dict[str, Any]) -> None:
        from vllm import LLM

        self.run = run
        wanted = {**DEFAULTS, "model": run["model"], **run.get("engine", {})}
        if run["remap"] and not os.environ.get("REMAP_ENABLE"):
            wanted = {**FLAGS, **wanted}
        if run.get("settings"):
            wanted["additional_config"] = {"remap": run["settings"]}
        self.llm = LLM(**wanted)
        self.engine = self.llm.llm_engine
        client = self.engine.engine_core
        self.core = getattr(client, "engine_core", None)  # None where it is another process
        self.preempted = 0
        self.called: list[dict[str, Any]] = []
        if self.core is not None:
            self._count_preemptions()

    def _count_preemptions(self) -> None:
        scheduler, original = self.core.scheduler, self.core.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preempted += 1
            return original(*args, **kwargs)

        scheduler._preempt_request = counted

    def snapshot(self) -> dict[str, Any]:
        return self.llm.collective_rpc("remap_snapshot")[0]

    def tenant(self) -> dict[str, Any]:
        (found,) = [
            each
            for name, each in self.snapshot()["tenants"].items()
            if name == self.llm.collective_rpc("remap_manifest")[0]["tenant"]
        ]
        return found

    def serve(self, requests: list[dict[str, Any]], number: int) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams

        results: dict[str, dict[str, Any]] = {}
        alphas, step = [], 0
        waiting = sorted(enumerate(requests), key=lambda each: each[1].get("at", 0))
        aborts = {i: request["abort"] for i, request in enumerate(requests) if "abort" in request}
        while waiting or self.engine.has_unfinished_requests():
            while waiting and waiting[0][1].get("at", 0) <= step:
                index, request = waiting.pop(0)
                wanted = {**PARAMETERS, "max_tokens": request["new"], **request.get("params", {})}
                if "structured" in wanted:
                    wanted["structured_outputs"] = StructuredOutputsParams(**wanted.pop("structured"))
                if "logit_bias" in wanted:  # JSON has no integers for keys
                    wanted["logit_bias"] = {int(token): bias for token, bias in wanted["logit_bias"].items()}
                params = SamplingParams(**wanted)
                lora = LoRARequest("one", 1, request["lora"]) if "lora" in request else None
                prompt = {"prompt_token_ids": request["prompt"], **_seen(request)}
                priority = request.get("priority", 0)
                self.engine.add_request(f"{number}-{index}", prompt, params, lora_request=lora, priority=priority)
                results[f"{number}-{index}"] = {"answers": {}, "cached": 0, "outputs": 0}
            for index in [i for i, when in aborts.items() if when <= step]:
                del aborts[index]
                self.engine.abort_request([f"{number}-{index}"])
            for output in self.engine.step():
                entry = results[output.request_id]
                entry["answers"].update({each.index: list(each.token_ids) for each in output.outputs})
                entry["outputs"] += 1
                entry["cached"] = output.num_cached_tokens or 0
                if output.outputs[0].finish_reason == "error":
                    entry["error"] = output.outputs[0].stop_reason
                scored = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
                if scored:
                    entry["logprobs"] = [
                        sorted((token, round(each.logprob, 3)) for token, each in one.items()) for one in scored if one
                    ]
            step += 1
            if step == self.run.get("calls_at"):
                self.called = [self.call(*each) for each in self.run["calls"]]
            if self.core is not None and self.run["remap"]:
                alphas.append(self.core.scheduler.remap.group.target[0])
                if step % 4 == 0:
                    check_books(self.core.scheduler)
            if step > 4000:
                said = self.report().get("decisions", [])[-2:]
                raise RuntimeError(f"{self.engine.get_num_unfinished_requests()} requests after {step} steps; {said}")
        self._flush()
        said: dict[str, Any] = {
            "tokens": [_tokens(results[f"{number}-{i}"]["answers"]) for i in range(len(requests))],
            "outputs": [results[f"{number}-{i}"]["outputs"] for i in range(len(requests))],
            "cached": [results[f"{number}-{i}"]["cached"] for i in range(len(requests))],
            "logprobs": [results[f"{number}-{i}"].get("logprobs") for i in range(len(requests))],
            "errors": [results[f"{number}-{i}"].get("error") for i in range(len(requests))],
            "alphas": alphas,
            "steps": step,
        }
        if self.run["remap"]:
            tenant = self.tenant()
            said |= {name: tenant[name] for name in ("remapped", "copies", "usable_blocks", "withdrawn_blocks")}
        if self.core is not None:
            pool = self.core.scheduler.kv_cache_manager.block_pool
            said |= {"free": pool.get_num_free_blocks(), "blocks": pool.num_gpu_blocks, "usage": pool.get_usage()}
            if self.run["remap"]:
                check_books(self.core.scheduler)
        return said

    def call(self, method: str, *arguments: Any) -> dict[str, Any]:
        """One call of the workers; what it gave, or the error, and how many layers were away."""
        said = {"remapped": self.tenant()["remapped"] if self.run["remap"] else 0}
        try:
            return {**said, "gave": self.llm.collective_rpc(method, args=arguments)[0]}
        except Exception as error:  # noqa: BLE001  whatever it is, the test sees it
            return {**said, "error": type(error).__name__, "text": str(error)}

    def _flush(self) -> None:
        """The steps in which the engine tells its worker of the last requests that have ended."""
        for _ in range(4):
            if self.core is not None:
                self.engine.step()

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = {"preempted": self.preempted, "moved": 0, "called": self.called}
        if self.core is None:
            metrics = self.llm.get_metrics()
            found["preempted"] = sum(int(each.value) for each in metrics if each.name == "vllm:num_preemptions")
        found["cache_info"] = self.engine.vllm_config.cache_config.metrics_info()
        if self.run["remap"]:
            snapshots = self.llm.collective_rpc("remap_snapshot")
            found["manifest"] = self.llm.collective_rpc("remap_manifest")[0]
            found["ranks"] = [
                {key: each[key] for key in ("remapped", "copies", "usable_blocks")}
                for snapshot in snapshots
                for each in snapshot["tenants"].values()
            ]
            found["decisions"] = [each["reason"] for each in snapshots[0]["decisions"]]
            if self.core is not None:
                found["moved"] = self.core.scheduler.remap.moved
        return found


@contextmanager
def told_more(blocks: int) -> Iterator[None]:
    """vLLM is told of so many KV blocks more than there can ever be."""
    if not blocks:
        yield
        return
    from remap.adapters.vllm.reach import Reach

    original = Reach.reached
    Reach.reached = lambda self, *args: original(self, *args) + blocks
    try:
        yield
    finally:
        Reach.reached = original


def check_books(scheduler: Any) -> None:
    """Every block is in one place: null, free, with requests, or parked; parked ones are nobody's."""
    books, pool = scheduler.remap.books, scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert len(free) == len(set(free)) == pool.get_num_free_blocks()
    held = {block.block_id for block in pool.blocks if block.ref_cnt > 0 and not block.is_null}
    there = books.opened | books.leaving
    assert not books.opened & books.leaving
    assert set(free) <= there and held <= there and not held & set(free)
    assert set(free) | held | {pool.null_block.block_id} == there, (len(free), len(held), len(there))
    assert pool.num_gpu_blocks == len(there)
    assert [block.block_id for block in pool.blocks] == list(range(len(pool.blocks)))
    cached = pool.cached_block_hash_to_block._cache.values()
    for entry in cached:
        for block in entry.values() if isinstance(entry, dict) else (entry,):
            assert pool.blocks[block.block_id] is block and block.block_id in there
    links = {
        manager_block.block_id
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
        for blocks in manager.req_to_blocks.values()
        for manager_block in blocks
        if not manager_block.is_null
    }
    assert links == held


@contextmanager
def pretended_version(version: str | None) -> Iterator[None]:
    from remap.adapters.vllm import engine_internals

    original = engine_internals.installed_version
    if version is not None:
        engine_internals.installed_version = lambda: version
    try:
        yield
    finally:
        engine_internals.installed_version = original


def serve_run(run: dict[str, Any], kept: dict[str, Stepper]) -> dict[str, Any]:
    """One run. "use": the engine of an earlier one, kept. "refused": it must not start; says why."""
    if "wait" in run:  # until the other process has come so far
        end = time.monotonic() + 600
        while not Path(run["wait"]).exists():
            assert time.monotonic() < end, run["wait"]
            time.sleep(0.05)
    if "use" in run:
        stepper = kept[run["use"]]
    else:
        try:
            with pretended_version(run.get("version")), told_more(run.get("told_more", 0)):
                stepper = Stepper(run)
        except Exception as error:
            if not run.get("refused"):
                raise
            fields = {name: str(value) for name, value in getattr(error, "fields", {}).items()}
            said = {"error": type(error).__name__, "text": str(error), "fields": fields}
            return {**said, "trace": traceback.format_exc()}
    before = stepper.preempted
    loaded = stepper.call(*run["load"]) if "load" in run else None
    rounds = []
    for number, requests in enumerate(run.get("rounds", [])):
        said = stepper.serve(requests, number)
        if run.get("reset"):
            said["reset"] = stepper.llm.reset_prefix_cache()
        rounds.append(said)
    found = {"rounds": rounds, **stepper.report(), "loaded": loaded}
    found["preempted"] -= before
    if run["remap"] and (kept or run.get("keep")):
        snapshot = stepper.snapshot()["tenants"]
        tenants = snapshot.values()
        found["shared"] = {"lent": sum(each["lent_pages"] for each in tenants), "tenants": len(tenants)}
        found["shared"]["cold"] = {name: len(each["cold"]) for name, each in snapshot.items()}
    if run.get("keep"):
        kept[run["name"]] = stepper
    elif "use" not in run:
        shut(stepper)
    if "touch" in run:
        Path(run["touch"]).touch()
    return found


def shut(stepper: Stepper) -> None:
    stepper.engine.engine_core.shutdown()


def main() -> None:
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    if job.get("plain_linear"):
        import vllm._custom_ops as ops

        ops._supports_onednn = False  # the same kernels with and without remap
    said: dict[str, Any] = {}
    kept: dict[str, Stepper] = {}
    for run in job["runs"]:
        said[run["name"]] = serve_run(run, kept)
        out.write_text(json.dumps(said))
    for stepper in kept.values():
        shut(stepper)


if __name__ == "__main__":
    main()
