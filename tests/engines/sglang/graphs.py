"""Graphs where there is no CUDA, for engines with PRETEND_GRAPHS=1: SGLang's own runners, over a backend that this file makes up.

Real: the server arguments, both runners (buckets, padding to them, static inputs, `can_run_graph`, the eager tail of a prompt),
the scheduler and the model. Made up: what a graph is. Here it is the captured function itself, called again, as a graph would run
it: no layer's hook is called, and every weight is read at the address that it had at the capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.arg_groups import attention_hook
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.model_executor.runner import decode_cuda_graph_runner, prefill_cuda_graph_runner
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

logger = logging.getLogger("graphs")


@contextmanager
def past_hooks(model: torch.nn.Module) -> Iterator[None]:
    """Modules are called as their class has it: what was put in around them is not."""
    hooked = {
        module: module.__dict__.pop("_call_impl") for module in model.modules() if "_call_impl" in module.__dict__
    }
    try:
        yield
    finally:
        for module, call in hooked.items():
            module.__dict__["_call_impl"] = call


class Again(BreakableCudaGraphBackend):
    """A graph is a function that is called again. Of this class's base it has the name: the runner for prompts asks for it."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.captured = runner, {}
        self.decodes = isinstance(runner, decode_cuda_graph_runner.DecodeCudaGraphRunner)

    def addresses(self) -> list[int]:
        return [each.data_ptr() for each in self.runner.model_runner.model.parameters()]

    @contextmanager
    def capture_session(self, stream: object) -> Iterator[None]:
        yield

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def capture_one(self, shape_key: Any, forward_fn: Callable[[], Any], *rest: Any, **more: Any) -> None:
        forward_fn()  # as SGLang warms up: with what is around the layers, and outside of a pass
        self.captured[shape_key] = forward_fn, self.addresses()

    def can_run(self, batch: Any, shape_key: Any) -> bool:
        return shape_key in self.captured

    def replay(self, shape_key: Any, batch: Any, **kwargs: Any) -> Any:
        forward_fn, addresses = self.captured[shape_key]
        assert addresses == self.addresses(), "a weight is not where it was captured"
        logger.info("graph of %s rows replayed for %s", shape_key.size, "decode" if self.decodes else "prefill")
        with torch.no_grad(), past_hooks(self.runner.model_runner.model):
            if self.decodes:
                return forward_fn()
            layers = self.runner.layer_model  # its attention is a break: it runs anew, with the batch as it is now
            return type(layers).forward(layers, batch.input_ids, batch.positions, batch)


def capture_decode(*, model_runner: Any) -> Any:
    runner = decode_cuda_graph_runner.DecodeCudaGraphRunner(model_runner)
    return cuda_graph_setup.GraphCapture(runner=runner, memory_phase="decode", memory_usage_gb=0, capture_time=0)


@contextmanager
def no_stream(stream: object = None) -> Iterator[Any]:
    yield SimpleNamespace(stream=None)


def pretend() -> None:
    """In this process CPUs capture graphs."""
    attention_hook.with_phase = lambda config, phase, **changes: config  # "disabled" with this attention backend
    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda self: 1
    TorchNativeAttnBackend.init_cuda_graph_state = lambda self, *sizes: None
    cuda_graph_setup.capture_decode_graph = capture_decode
    cuda_graph_setup.current_platform = SimpleNamespace(capabilities=SimpleNamespace(graph_capture=True))
    for module in (decode_cuda_graph_runner, prefill_cuda_graph_runner):
        module.graph_capture = no_stream
        module.get_or_create_global_graph_capture_stream = lambda: None
    decode_cuda_graph_runner.DecodeCudaGraphRunner._record_in_graph_metadata_prep_done = lambda self: None
    decode_cuda_graph_runner.resolve_decode_backend = Again
    prefill_cuda_graph_runner.resolve_prefill_backend = Again
