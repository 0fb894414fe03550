"""A small continuous-batching engine: the worked example of adopting remap, and the engine of the demo and the benches.

How a request lives: `LLMEngine.add_request` queues it; each `LLMEngine.step` asks the session for blocks, lets the
`Scheduler` choose chunks (pure bookkeeping), lets the `ModelRunner` run one pass over them with paged KV, and samples
one token for every sequence whose last known token was in the pass.

| module | one line |
|---|---|
| request.py | what the user asks for, what he gets, and the engine's own record of a sequence |
| scheduler.py | who runs in the next pass: admission, chunked prefill, preemption by recompute; pure |
| metrics.py | latencies, throughput, recomputed tokens, and the timeline; pure |
| attention.py | attention over blocks that may lie anywhere in the KV region |
| models.py | one forward for Llama, Qwen2, Qwen3 and one for OPT, from the modules' own weights |
| runner.py | one pass: flat token batch -> logits; sampling |
| engine.py | the loop. **remap is adopted in `LLMEngine.step` and `ModelRunner.forward`, about ten lines in all** |

Importing this package imports no torch; the first use of `LLMEngine` or `ModelRunner` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remap.engine.metrics import Metrics, Sample
from remap.engine.request import Output, Request, SamplingParams
from remap.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from remap.engine.engine import LLMEngine, Result, StepOutput
    from remap.engine.runner import ModelRunner

__all__ = [
    "LLMEngine",
    "Metrics",
    "ModelRunner",
    "Output",
    "Request",
    "Result",
    "Sample",
    "SamplingParams",
    "Scheduler",
    "StepOutput",
]

_LAZY = {"LLMEngine": "engine", "Result": "engine", "StepOutput": "engine", "ModelRunner": "runner"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
