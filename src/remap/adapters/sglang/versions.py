# SPDX-License-Identifier: Apache-2.0
"""The code that depends on SGLang's version: the places of its sizes, its free lists, and the refused settings.

It follows the source of 0.5.23. The adapter serves a newer version with a warning if every hooked function is there
with the same parameters and the trial before the first request (trial.py) shows no difference, and refuses it otherwise:
SGLang skips a hook on a method that has moved with a log line, and half of the hooks would be worse than none.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from remap.adapters.touched import Touched, admit
from remap.errors import InvalidState

__all__ = [
    "ALLOCATORS",
    "TARGETS",
    "TESTED",
    "append_free",
    "check_arguments",
    "check_states",
    "check_version",
    "device_of",
    "evict",
    "evictable",
    "gather",
    "geometry_of",
    "longest",
    "no_batch",
    "otherwise",
    "phase_of",
    "promised",
    "rank",
    "refused",
    "replace_free",
    "retract",
    "set_buffers",
    "set_sizes",
    "take_free",
    "touched",
]

TESTED = "0.5.23"

logger = logging.getLogger("remap.adapters.sglang")

_ALLOCATOR = "sglang.srt.mem_cache.allocator"
ALLOCATORS = (f"{_ALLOCATOR}.token.TokenToKVPoolAllocator", f"{_ALLOCATOR}.paged.PagedTokenToKVPoolAllocator")

_RUNNER = "sglang.srt.model_executor.runner"
_GRAPHS = ("full", "breakable")

# name of the hook (hooks.py) -> the functions that it is put around
TARGETS: dict[str, tuple[str, ...]] = {
    "around_alloc": ("sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool",),
    "around_graphs": ("sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",),
    "around_forward": ("sglang.srt.model_executor.model_runner.ModelRunner.forward",),
    "around_can_run": (
        f"{_RUNNER}.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
        f"{_RUNNER}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
    ),
    "around_profile": ("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",),
    "around_budget": ("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget",),
    "around_post_capture": (
        "sglang.srt.model_executor.model_runner_components.kv_pool_runtime.is_post_capture_kv_active",
    ),
    "around_buffers": tuple(
        f"sglang.srt.mem_cache.memory_pool.{name}"
        for name in ("MHATokenToKVPool._create_buffers_normal", "MLATokenToKVPool._create_buffers")
    ),
    "around_clear": tuple(f"{name}.clear" for name in ALLOCATORS),
    "around_evict": (f"{_ALLOCATOR}.base.BaseTokenToKVPoolAllocator.evict_to_free_tokens",),
    "around_admission": ("sglang.srt.mem_cache.prefill_budget.PrefillBudget.check_prefill",),
    "around_admission_ignore_eos": ("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req_ignore_eos",),
    "around_state": ("sglang.srt.managers.schedule_policy.PrefillAdder.budget_state",),
    "around_next_batch": ("sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",),
    "around_idle": ("sglang.srt.managers.scheduler.Scheduler.on_idle",),
    "around_update": tuple(
        f"sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.{name}"
        for name in (
            "update_weights_from_disk",
            "load_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
        )
    ),
    "around_update_session": tuple(
        f"sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.{name}"
        for name in ("begin_weight_update", "end_weight_update")
    ),
}

# name of the hook -> the original's parameters (see `touched.Touched`)
_TAKES: dict[str, str | None] = {
    "around_alloc": "self",
    "around_graphs": "self *",
    "around_forward": "self forward_batch",
    "around_can_run": "self forward_batch",
    "around_profile": "self *",
    "around_budget": "self budget_bytes cap_tokens=",
    "around_post_capture": None,
    "around_buffers": "self",
    "around_clear": "self",
    "around_evict": "self tree_cache num_tokens",
    "around_admission": "self total_tokens= *",
    "around_admission_ignore_eos": "self req",
    "around_state": "self",
    "around_next_batch": "self *",
    "around_idle": "self",
    "around_update": "self *",
    "around_update_session": "self recv_req",
}

# What hooks call with other parameters than SGLang's: as `_TAKES`
_CALLED = {
    "sglang.srt.managers.scheduler.Scheduler.pause_generation": "self recv_req",
    "sglang.srt.managers.scheduler.Scheduler.continue_generation": "self recv_req",
}

_STORED = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

# argument -> the values that the adapter serves, and why it does not serve others
_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "pp_size": ((1,), "a stage has only some of the layers"),
    "dcp_size": ((1,), "block ids are then not rows of the pool"),
    "attn_cp_size": ((1,), "ranks of a prompt's parts have not been tried"),
    "enable_dp_attention": ((False,), "ranks schedule different requests, and all would have to grow in the same step"),
    "ep_size": ((1,), "ranks with different experts have not been tried"),
    "dwdp_size": ((1,), "ranks read each other's experts at addresses that they keep"),
    "speculative_algorithm": ((None,), "the draft model has a pool of its own"),
    "enable_memory_saver": ((False,), "it unmaps the memory that layers lie in"),
    "enable_weights_cpu_backup": ((False,), "it unmaps the memory that layers lie in"),
    "enable_unified_memory": ((False,), "its pool hands out other ids"),
    "enable_hierarchical_cache": ((False,), "it copies KV by addresses that it keeps"),
    "enable_hisparse": ((False,), "its pool hands out other ids"),
    "enable_kv_cache_sharding": ((False,), "its pool hands out other ids"),
    "enable_page_major_kv_layout": ((False,), "the KV region is laid out layer by layer"),
    "prefill_only_disable_kv_cache": ((False,), "there is no KV cache"),
    "disaggregation_mode": (("null",), "the other side keeps addresses and sizes of the pool"),
    "enable_pd_role_switch": ((False,), "the other side keeps addresses and sizes of the pool"),
    "enable_two_batch_overlap": ((False,), "layers do not run one after the other"),
    "enable_single_batch_overlap": ((False,), "layers do not run one after the other"),
    "enable_pdmux": ((False,), "passes run at the same time"),
    "dllm_algorithm": ((None,), "its passes have no layer times"),
    "enable_torch_compile": ((False,), "the compiler removes the layers' hooks; leave out --enable-torch-compile"),
    "enable_nvidia_megakernel": ((False,), "layers are one kernel"),
    "cpu_offload_gb": ((0,), "SGLang's own offloader moves the same weights"),
    "offload_group_size": ((-1, 0, None), "SGLang's own offloader moves the same weights"),
    "startup_weight_load_mode": (("serial",), "weights arrive after the model was attached"),
    "enable_eplb": ((False,), "experts are rewritten while serving"),
    "elastic_ep_backend": ((None,), "experts are rewritten while serving"),
}


def check_version(version: str) -> None:
    """Raises InvalidState (fields version, tested, unlike) for a version that the adapter cannot work with; see
    `admit`.
    """
    admit("SGLang", version, (TESTED,), touched(), logger.warning, otherwise())


def touched() -> list[Touched]:
    """The functions that the hooks are put around, and those that end a turn."""
    hooked = [_place(target, takes) for name, takes in _TAKES.items() for target in TARGETS[name]]
    return [*hooked, *(_place(target, takes) for target, takes in _CALLED.items())]


def otherwise() -> str:
    """The advice to a user whose version is refused."""
    return f"install sglang=={TESTED}, or unset REMAP_ENABLE to serve without remap"


def _place(target: str, takes: str | None) -> Touched:
    """The Touched of a dotted name: module.Class.method or module.function."""
    parts = target.split(".")
    names = 2 if parts[-2][0].isupper() else 1
    return Touched(".".join(parts[:-names]), ".".join(parts[-names:]), takes)


def check_arguments(arguments: Any, joins: bool = False) -> None:
    """Raises InvalidState (fields argument, value) for a server argument that the adapter does not serve. joins: a broker."""
    ranks = getattr(arguments, "tp_size", 1)
    if joins and ranks > 1:
        raise _unserved(
            "tp_size", ranks, "ranks would get different pages of a broker (REMAP_ARENA), and so different blocks"
        )
    for name, (served, why) in _SERVED.items():
        value = getattr(arguments, name, served[0])
        if value not in served:
            raise _unserved(name, value, why)
    graphs = getattr(arguments, "cuda_graph_config", None)
    for phase in ("decode", "prefill"):
        part = graphs.get(phase) if isinstance(graphs, dict) else getattr(graphs, phase, None)
        backend = part.get("backend") if isinstance(part, dict) else getattr(part, "backend", None)
        backend = getattr(backend, "value", backend)
        if backend not in (None, "disabled", *_GRAPHS) and not getattr(arguments, "disable_cuda_graph", False):
            why = f"it may compile the layers, which removes their hooks; --cuda-graph-backend-{phase}={_GRAPHS[-1]} does not"
            raise _unserved(f"cuda_graph_config.{phase}", backend, why)


def _unserved(name: str, value: object, why: str) -> InvalidState:
    return InvalidState(
        f"remap does not serve {name}={value!r}: {why}; nothing was attached; change it, or unset REMAP_ENABLE",
        argument=name,
        value=value,
    )


def device_of(runner: Any) -> str:
    """The session's device for a ModelRunner."""
    kind = str(runner.device).split(":", 1)[0]
    return kind if kind == "cpu" else f"{kind}:{runner.gpu_id}"


def rank(ranks: int) -> int:
    """This process's rank among those of tensor parallelism."""
    if ranks == 1:
        return 0
    from sglang.srt.runtime_context import get_parallel  # the engine's own, there when this runs

    return int(get_parallel().tp_rank)


def gather(own: Any) -> list[Any]:
    """What every rank of tensor parallelism passes here, in rank order. All have to call it at the same place."""
    from sglang.srt.runtime_context import get_parallel  # the engine's own, there when this runs

    group = get_parallel().tp_group
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, own, group=group.cpu_group)
    return found


def longest(runner: Any) -> int:
    """Tokens of the longest request that the model takes."""
    return int(runner.model_config.context_len)


def geometry_of(runner: Any) -> dict[str, Any]:
    """A KVSpec's arguments for a ModelRunner without a pool: layers, kv_heads, head_dim, block_tokens, dtype. A row is bytes, and
    each of `layers` has two buffers of rows: keys and values of a layer, or latents of two layers.

    Raises InvalidState for a model whose KV cache is something else.
    """
    config = runner.model_config
    for name, why in (
        (
            "is_hybrid_swa",
            "windows have a pool and ids of their own; --disable-hybrid-swa-memory puts all layers into one",
        ),
        ("is_draft_worker", "the draft model has a pool of its own"),
    ):
        if getattr(runner, name):
            raise _unserved(name, True, why)
    dtype, layers = runner.kv_cache_dtype, runner.layer_info.num_effective_layers
    if runner.use_mla_backend:
        buffers, row = layers, config.kv_lora_rank + config.qk_rope_head_dim
    else:
        buffers, row = 2 * layers, config.get_num_kv_heads(runner.server_args.tp_size) * config.head_dim
        if config.head_dim != config.v_head_dim:
            raise _unserved("v_head_dim", config.v_head_dim, f"keys have {config.head_dim}")
    if dtype not in _STORED:
        raise _unserved("kv_cache_dtype", str(dtype), "such caches have scales beside them")
    others = {param.dtype for param in runner.model.parameters()} - {dtype}
    if runner.page_size > 1 and others:
        raise _unserved(
            "page_size",
            runner.page_size,
            f"kernels read whole pages, and bytes of {others} weights may be NaN as {dtype}",
        )
    return {
        "layers": -(-buffers // 2),
        "kv_heads": 1,
        "head_dim": row * dtype.itemsize,
        "block_tokens": runner.page_size,
        "dtype": "uint8",
    }


def check_states(configurator: Any) -> None:
    """Raises InvalidState (field states) for a model whose requests have states beside KV, as SGLang describes its cache."""
    if configurator.mambaish_config is not None:
        raise InvalidState(
            "remap does not serve a model whose layers keep states of requests beside KV; unset REMAP_ENABLE to serve it",
            states=type(configurator.mambaish_config).__name__,
        )


def set_buffers(pool: Any, spec: Any, ours: list[torch.Tensor]) -> None:
    """Make the pool's buffers views of these: uint8, (rows, 1, bytes). Of latents in an odd number of layers one is left over.

    Raises InvalidState (fields found, expected) if SGLang builds another pool than `spec` describes.
    """
    kind, heads = type(pool).__name__, {}
    if kind == "MLATokenToKVPool":
        heads = {"kv_buffer": (1, pool.kv_cache_dim)}
    elif kind == "MHATokenToKVPool" and pool.kv_cache_layout == "nhd":
        heads = {"k_buffer": (pool.head_num, pool.head_dim), "v_buffer": (pool.head_num, pool.v_head_dim)}
    sizes = {count * dim * pool.store_dtype.itemsize for count, dim in heads.values()}
    found = (-(-len(heads) * pool.layer_num // 2), sizes, pool.page_size)
    expected = (spec.layers, {spec.head_dim}, spec.block_tokens)
    if found != expected:
        raise InvalidState(
            f"SGLang builds a {kind} of {pool.layer_num} layers with (pairs of buffers, bytes of a row, page) = {found}, remap "
            f"reserved {expected}; unset REMAP_ENABLE to serve this model",
            found=found,
            expected=expected,
        )
    for number, (name, shape) in enumerate(heads.items()):
        mine = ours[number : len(heads) * pool.layer_num : len(heads)]
        setattr(pool, name, [each.view(pool.store_dtype).view(-1, *shape) for each in mine])


# -- the free list: tensors of page ids, some of them waiting to be sorted in ------------------------------------------


def append_free(allocator: Any, ids: list[int]) -> None:
    """Append pages to the list: SGLang may hand them out from now on."""
    new = torch.tensor(ids, dtype=torch.int64, device=allocator.device)
    allocator.free_pages = torch.cat((allocator.free_pages, new))


def take_free(allocator: Any, wanted: frozenset[int]) -> list[int]:
    """Take the wanted pages that are free out of the list and return them. The other pages keep their order."""
    allocator.merge_and_sort_free()
    pages = allocator.free_pages
    leaving = torch.isin(pages, torch.tensor(sorted(wanted), dtype=pages.dtype, device=pages.device))
    found: list[int] = pages[leaving].tolist()
    if found:
        allocator.free_pages = pages[~leaving]
    return found


def replace_free(allocator: Any, ids: list[int]) -> None:
    """Make exactly these pages free (after the allocator's own `clear`)."""
    allocator.free_pages = torch.tensor(ids, dtype=torch.int64, device=allocator.device)


# -- sizes ------------------------------------------------------------------------------------------------------------


def set_sizes(runner: Any, scheduler: Any, tokens: int) -> None:
    """Set every copy of max_total_num_tokens that SGLang reads while it serves. tokens: of the allocator, free or in
    use.

    Does not change the allocator's `size` and `num_pages` and the pool's `size` (they bound the ids, and `clear` builds
    a list from them), MemoryPoolConfig, max_req_len (a request must fit without remapping), nor the values that SGLang
    logs or exports once at the start.
    """
    runner.max_total_num_tokens = tokens
    if scheduler is None:
        return
    scheduler.max_total_num_tokens = tokens
    for name in ("pool_stats_observer", "invariant_checker", "load_inquirer", "kv_events_publisher"):
        part = getattr(scheduler, name)
        object.__setattr__(part, "max_total_num_tokens", tokens)  # frozen dataclasses, some of them


def refused(request: Any, why: str) -> Any:
    """SGLang's answer to a request that was not carried out."""
    from sglang.srt.managers import io_struct  # the engine's own, there when this runs

    name = type(request).__name__.removesuffix("Input") + "Output"
    return getattr(io_struct, name)(success=False, message=why)


def promised(scheduler: Any) -> int:
    """Tokens that an admitted request will allocate without another check for room: the rest of its prompt."""
    request = scheduler.chunked_req
    return 0 if request is None else int(request.seqlen - request.prefix_len) + scheduler.page_size


def running(scheduler: Any) -> bool:
    """Whether there are requests to go on with."""
    batches = (scheduler.running_batch, scheduler.last_batch)
    return any(batch is not None and not batch.is_empty() for batch in batches)


def retract(scheduler: Any) -> None:
    """All requests that run go back to the queue, and hold no token, as before an update of weights. Between two batches."""
    from sglang.srt.managers import io_struct  # the engine's own, there when this runs

    scheduler.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
    scheduler.continue_generation(io_struct.ContinueGenerationReqInput(torch_empty_cache=False))


def no_batch(scheduler: Any) -> Any:
    """A plan that runs nothing."""
    from sglang.srt.managers.schedule_batch import NextBatchPlan  # the engine's own, there when this runs

    return NextBatchPlan(batch_to_run=None, running_batch=scheduler.running_batch)


def evictable(tree_cache: Any) -> int:
    """Tokens that the prefix cache can evict."""
    return int(tree_cache.evictable_size()) if tree_cache is not None else 0


def evict(tree_cache: Any, tokens: int) -> None:
    """Make the prefix cache evict `tokens` tokens."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # the engine's own, there when this runs

    tree_cache.evict_for_alloc(EvictParams(num_tokens=tokens))


def phase_of(batch: Any) -> tuple[str, int]:
    """(phase, tokens) of a ForwardBatch, for `tenant.forward`."""
    mode = batch.forward_mode
    tokens = int(batch.input_ids.shape[0]) if batch.input_ids is not None else 1
    if mode.is_decode():
        return "decode", tokens
    return ("mixed" if mode.is_mixed() else "prefill"), tokens
