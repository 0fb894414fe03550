# SPDX-License-Identifier: Apache-2.0
"""A small continuous-batching engine: the worked example of adopting remap, and the engine of the demo and the benches.

How a request lives: `LLMEngine.add_request` queues it; each `Engine.step` asks the session for blocks, lets the
`Scheduler` choose chunks (pure bookkeeping), lets the `ModelRunner` run one pass over them with paged KV, and samples
one token for every sequence whose last known token was in the pass.

| module | one line |
|---|---|
| request.py | the user's request, its answer, and the engine's own record of a sequence |
| scheduler.py | the requests of the next pass: admission, chunked prefill, preemption by recompute; pure |
| metrics.py | latencies, throughput, recomputed tokens, and the timeline; pure |
| attention.py | attention over blocks that may lie anywhere in the KV region |
| models.py | a forward for Llama, Qwen2 and Qwen3, for OPT and for GPT-2, from the modules' own weights; KV from activations |
| layer_run.py | consecutive layers of a flat token batch, on the CPU |
| runner.py | one pass on the CPU: flat token batch -> logits |
| sampling.py | logits -> the next token: penalties, cuts, a draw; logprobs |
| sharing.py | several engines on one arena, in turns or in rounds; shared_metrics.py: its cost |
| offline.py | serves a file of requests; offline_file.py: the files of requests and answers; pure |
| throughput.py | offline batches, KV in host memory; throughput_runner.py: their passes; throughput_times.py: their cost |
| engine.py | the loop; with a model. **remap is adopted in `Engine.step` and `LayerRun.compute`, about ten lines in all** |

On a GPU, `gpu_runner` stands in the place of `runner`:

| module | one line |
|---|---|
| gpu_runner.py | one pass on a stream: decodes replayed, prompts launched; one wait a step, for the tokens |
| captured.py | a decode pass of a fixed batch size as one recording, or as one for each layer while layers are streamed |
| graphs.py | what records: CUDA graphs, or a stand-in on the CPU |
| inputs.py | batch tensors and block tables: page-locked staging, fixed addresses on the device |
| paged.py | which attention kernels: FlashInfer, the project's own, torch |
| paged_triton.py, prefill_triton.py | decode and prefill attention over strided paged KV |
| paged_flashinfer.py | the same by FlashInfer |
| fused_triton.py | Llama-like layers with few launches |

Importing this package imports no torch; the first use of `LLMEngine` or a runner does. The GPU's part is not yet run on one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remap_serve.engine.metrics import Metrics, StepSample
from remap_serve.engine.request import Output, Request, SamplingParams, TokenLogprobs
from remap_serve.engine.scheduler import Scheduler
from remap_serve.engine.shared_metrics import SharedResult

if TYPE_CHECKING:
    from remap_serve.engine.engine import LLMEngine, Result, StepOutput
    from remap_serve.engine.gpu_runner import GpuRunner
    from remap_serve.engine.offline import OfflineProgress, generate_offline
    from remap_serve.engine.runner import ModelRunner
    from remap_serve.engine.sharing import SharedEngines
    from remap_serve.engine.throughput import ThroughputEngine

__all__ = [
    "GpuRunner",
    "LLMEngine",
    "Metrics",
    "ModelRunner",
    "OfflineProgress",
    "Output",
    "Request",
    "Result",
    "SamplingParams",
    "Scheduler",
    "SharedEngines",
    "SharedResult",
    "StepOutput",
    "StepSample",
    "ThroughputEngine",
    "TokenLogprobs",
    "generate_offline",
]

_LAZY = {
    "GpuRunner": "gpu_runner",
    "LLMEngine": "engine",
    "ModelRunner": "runner",
    "OfflineProgress": "offline",
    "Result": "engine",
    "SharedEngines": "sharing",
    "StepOutput": "engine",
    "ThroughputEngine": "throughput",
    "generate_offline": "offline",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
