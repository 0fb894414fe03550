"""One rank: vLLM's worker, with its weights and its KV cache in one arena.

    load_model               vLLM loads (and quantises) as always; the layers are ours to bracket (offloader.py)
    determine_available_...  answers for the largest KV cache there could be: what is not usable yet is parked by the scheduler
    initialize_from_config   the weights move into the arena; vLLM's views of the KV cache are views of the tenant's region
    execute_model            one pass

What the scheduler calls on it (`remap_call`, through `collective_rpc`) comes between passes, in the order of the steps.
"""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from vllm.model_executor.offloader import set_offloader
from vllm.platforms import current_platform

import remap
from remap.adapters.settings import Settings
from remap.errors import InvalidArgument, InvalidState
from remap.footprint import footprint
from remap.ranks import Rank

from . import internals, metrics
from .offloader import RemapOffloader

__all__ = ["NAME", "worker_class"]

logger = logging.getLogger("vllm.remap")  # vLLM shows what its own loggers say

NAME = "vllm"
PAGE_BYTES = 2**21


class RemapWorker:
    """Comes before a worker class of vLLM's; see `worker_class`."""

    model_runner: Any
    vllm_config: Any
    cache_config: Any
    rank: int

    # -- starting --------------------------------------------------------------------------------------------------

    def init_device(self) -> None:
        internals.check_version()
        parallel = self.vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1 or self.vllm_config.speculative_config is not None:
            raise InvalidState(
                "remap's vLLM adapter serves neither pipeline parallelism nor speculative decoding yet; the engine was not started; "
                "use tensor parallelism, no drafter, or unset REMAP_ENABLE",
                pipeline_parallel_size=parallel.pipeline_parallel_size,
            )
        internals.refuse_whole_graphs(self.vllm_config)
        super().init_device()  # type: ignore[misc]
        self.remap_offloader = RemapOffloader()
        self.remap_rank: Rank | None = None
        set_offloader(self.remap_offloader)  # the runner, just made, has set its own

    def load_model(self, **kwargs: Any) -> None:
        with internals.weights_left_in_place() if current_platform.is_cpu() else nullcontext():
            super().load_model(**kwargs)  # type: ignore[misc]
        if not self.remap_offloader.layers:
            raise InvalidState(
                f"{self.vllm_config.model_config.model} does not build its layers with vLLM's make_layers: nothing can be remapped, "
                "the engine was not started; serve it without remap"
            )

    def get_supported_kv_cache_layouts(self) -> list[str]:
        layouts = super().get_supported_kv_cache_layouts()  # type: ignore[misc]
        found = internals.block_outermost(layouts)
        if not found:
            raise InvalidState(
                f"the attention backend reads only the KV layouts {', '.join(layouts)}, in which a block's layers lie apart; the "
                "engine was not started; choose another attention backend",
                layouts=tuple(layouts),
            )
        return found

    def determine_available_memory(self) -> int:
        """Bytes of the largest KV cache there could be: the first one, and all layers' weights but the ring's."""
        own = int(super().determine_available_memory())  # type: ignore[misc]
        size = footprint(self.model_runner.get_model(), self.remap_offloader.layers)
        self._remap_settings = settings = self._remap_read(size.nbytes + own)
        page = settings.page_bytes or (size.page_size() if current_platform.is_cpu() else PAGE_BYTES)
        self._remap_page, self._remap_weights = page, size.pages(page) * page
        first = settings.capacity - self._remap_weights
        if first < page:
            raise InvalidArgument(
                f"{settings.capacity} bytes are to hold weights of {self._remap_weights} bytes (in pages of {page}) and a KV cache; "
                "the engine was not started; raise REMAP_CAPACITY, or lower REMAP_PAGE_BYTES",
                capacity=settings.capacity,
                weights=self._remap_weights,
            )
        lendable = sorted(pages * page for pages in size.layer_pages(page))[:-1]
        most = first + sum(lendable if settings.max_layers is None else lendable[::-1][: settings.max_layers])
        self._remap_first = first
        return most

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self._remap_attach(kv_cache_config)
        nbytes = kv_cache_config.kv_cache_tensors[0].size
        memory = self.remap_rank.tenant.kv.memory
        if memory.numel() < nbytes:
            raise InvalidState(
                f"the KV region has {memory.numel()} bytes, vLLM wants {nbytes}; the engine was not started",
                region=memory.numel(),
                wanted=nbytes,
            )
        with internals.kv_allocated_in(memory, nbytes):
            super().initialize_from_config(kv_cache_config)  # type: ignore[misc]

    def _remap_read(self, capacity: int) -> Settings:
        """The environment, and what --additional-config adds. capacity: if none is given, what vLLM itself would use."""
        given = self.vllm_config.additional_config
        more = given.get("remap", {}) if isinstance(given, dict) else {}
        merged = {**os.environ, "REMAP_ENABLE": "1"} | {f"REMAP_{name.upper()}": str(value) for name, value in more.items()}
        settings = Settings.read({**merged, "REMAP_CAPACITY": merged.get("REMAP_CAPACITY") or str(capacity)})
        assert settings is not None
        return settings

    def _remap_attach(self, kv_cache_config: Any) -> None:
        model, layers = self.model_runner.get_model(), self.remap_offloader.layers
        page, block = self._remap_page, internals.block_bytes(kv_cache_config, len(layers))
        if not current_platform.is_cpu():
            _to_host(model)  # the session's pages take its place on the device
        pages = self._remap_first // page  # whole ones: a part of a page is lost
        first, most = min(pages * page // block, kv_cache_config.num_blocks), kv_cache_config.num_blocks
        session = remap.Session(
            capacity=self._remap_weights + pages * page,
            device="cpu" if current_platform.is_cpu() else f"cuda:{torch.cuda.current_device()}",
            page_bytes=page,
            controller=self._remap_settings.controller(),
        )
        # vLLM's own views say what lies in a block: to us it is so many bytes.
        kv = remap.KVSpec(
            layers=len(layers),
            kv_heads=1,
            head_dim=block // (2 * len(layers)),
            block_tokens=1,
            dtype="uint8",
            min_blocks=first,
            max_blocks=most,
        )
        tenant = session.attach(model, layers, name=NAME, kv=kv)
        pinned = session.snapshot().tenants[NAME].pinned
        if len(layers) - len(pinned) < 2:
            raise InvalidState("fewer than two layers can be streamed: nothing would ever move; the engine was not started")
        self.remap_offloader.tenant = tenant
        self.remap_rank = Rank(session, tenant, self.rank)
        self._remap_gauges = metrics.Writer() if self.rank == 0 else None
        self._remap_manifest = {
            "device": session.device,
            "capacity_bytes": session.capacity_bytes,
            "page_bytes": page,
            "layers": len(layers),
            "layers_that_can_stream": len(layers) - len(pinned),
            "weight_bytes": self._remap_weights,
            "block_bytes": block,
            "first_blocks": first,
            "most_blocks": most,
            "kv_cache_layout": self.cache_config.kv_cache_layout,
        }
        logger.info("remap: %s", self._remap_manifest)

    # -- a pass ----------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> Any:
        tokens = scheduler_output.total_num_scheduled_tokens
        if not tokens or self.remap_rank is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        decode = tokens == len(scheduler_output.num_scheduled_tokens)
        with self._remap_pass("decode" if decode else "prefill", tokens):
            return super().execute_model(scheduler_output)  # type: ignore[misc]

    def execute_dummy_batch(self) -> None:
        with self._remap_pass("decode", 1):
            super().execute_dummy_batch()  # type: ignore[misc]

    def _remap_pass(self, phase: str, tokens: int) -> Any:
        return _Pass(self, self.remap_rank.tenant.forward(phase, tokens))

    # -- what the scheduler asks for, between passes ---------------------------------------------------------------

    def remap_call(self, method: str, *args: Any) -> Any:
        """One call of this rank's `remap.ranks.Rank`."""
        return getattr(self.remap_rank, method)(*args)

    def remap_move(self, moves: dict[int, int]) -> None:
        """The contents of blocks, and every name of them on this rank."""
        self.remap_rank.tenant.kv.move(list(moves.items()))
        internals.rename_blocks(self.model_runner, moves)

    def remap_may_move(self) -> bool:
        """Whether `remap_move` knows this model runner."""
        return internals.can_rename_blocks(self.model_runner)

    def remap_snapshot(self) -> dict[str, Any]:
        """`session.snapshot()` of this rank, as plain values: it may cross processes."""
        return asdict(self.remap_rank.session.snapshot())

    def remap_manifest(self) -> dict[str, Any]:
        """What was moved where when the engine started."""
        return dict(self._remap_manifest)

    def shutdown(self) -> None:
        if self.remap_rank is not None:
            self.remap_rank.session.close()
        super().shutdown()  # type: ignore[misc]


class _Pass:
    """Brackets a pass for the tenant and opens the offloader's operators."""

    def __init__(self, worker: Any, bracket: Any) -> None:
        self._worker, self._bracket = worker, bracket

    def __enter__(self) -> None:
        self._bracket.__enter__()
        self._worker.remap_offloader.in_pass = True

    def __exit__(self, *error: Any) -> None:
        self._worker.remap_offloader.in_pass = False
        self._bracket.__exit__(*error)
        if self._worker._remap_gauges is not None:
            self._worker._remap_gauges.write(self._worker.remap_rank.tenant)


def _to_host(model: Any) -> None:
    """Unproven: needs a GPU. Parameters and buffers onto the host, so that the arena can be opened where they were."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.cpu()
    torch.accelerator.empty_cache()


def worker_class() -> type:
    """Our worker over the one that vLLM has for this platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Base
    else:
        from vllm.v1.worker.gpu_worker import Worker as Base
    return type("Worker", (RemapWorker, Base), {"__module__": __name__, "__doc__": RemapWorker.__doc__})
