# SPDX-License-Identifier: Apache-2.0
"""The hooks around SGLang's own calls, which ask the session before or after. versions.py has all that depends on
versions.

    alloc_memory_pool      attaches the model; the pool's buffers become views of tenant.kv.tensors; its allocator gets
                           the usable ids and no others
    init_cuda_graphs       captures graphs of layers at home; afterwards a version newer than the tested one is tried
    forward                is one pass
    can_run_graph          no, while a layer streams or is on its way: the pass runs as without graphs, with its hooks
    get_next_batch_to_run  makes one session.step; ids come and go through the allocator's free list
    evict_to_free_tokens   grows by the tokens that are missing after eviction, before SGLang retracts the decode batch
    check_prefill, ...     grow once for a request that was not admitted, and ask again
    on_idle                evicts drained ids that the prefix cache still holds
    update_weights_...     the layers come home, SGLang writes into them, and the master copies get what it wrote; so do the
                           begin and the end of several updates

With tensor parallelism each rank has a process, a scheduler and a session of its own. All call these hooks in the same order, and
so meet in `Adapter._ask`: rank 0 decides, and all make the same change, or none (`remap.ranks`).

With a broker's pages get_next_batch_to_run also ends the engine's turn when another process waits for its pages: SGLang retracts
its requests, which wait in its queue, and schedules none until the pages are to be had again (`Adapter.may_run`).

All of them run on the scheduler's thread, between passes or around them. A process serves one model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import remap
from remap.adapters.arenas import join
from remap.adapters.held_ids import HeldIds
from remap.adapters.hooks import attach_hooks
from remap.adapters.settings import Settings
from remap.adapters.touched import prove
from remap.config import Knobs
from remap.errors import InvalidState, OutOfMemory
from remap.internals import internals
from remap.kv.spec import KVGeometry
from remap.model.bind import find_layers, resolve_layers
from remap.model.footprint import footprint
from remap.ranks import Rank, RankGroup, RankReport, ids
from remap.rate_limited import RateLimitedWarning

from . import trial, versions

__all__ = ["Adapter", "configure", "current", *versions.TARGETS]

NAME = "sglang"
_CPU_PAGE = 64 << 10  # layer-major blocks come in groups of 2 x layers pages, so small pages are better
_PADDING = 0  # the page that padded tokens write into
_NO_TOKEN = "NO_TOKEN"
_TRIES = 3  # changes for one shortage, at most
_AGAIN_S = 0.05
"""How long requests of a model whose layers have no pages wait until these are asked for again."""
START_S = 300.0
"""For how long an engine that starts waits for the pages of its layers."""

logger = logging.getLogger("remap.adapters.sglang")


class Adapter:
    """One ModelRunner's session, and the ids of its pool."""

    def __init__(self, settings: Settings, runner: Any) -> None:
        """Attach the runner's model. On an error the session is closed again and the model is as it was."""
        versions.check_arguments(runner.server_args, settings.joins)
        self._ranks = int(runner.server_args.tp_size)
        with ExitStack() as undo:
            self._attach(settings, runner, undo)
            undo.pop_all()

    def _attach(self, settings: Settings, runner: Any, undo: ExitStack) -> None:
        shape = versions.geometry_of(runner)
        device = versions.device_of(runner)
        if settings.joins:
            self.session = join(settings, device, config=_controller(settings))
            undo.callback(self.session.close)
            there = self.session.snapshot()
            settings = replace(settings, capacity=there.capacity_bytes, page_bytes=there.page_bytes)
        capacity = settings.capacity
        assert capacity is not None  # `Settings.read` has it, or the broker
        capacity = min(self._gather(capacity))
        layers = resolve_layers(runner.model, find_layers(runner.model))
        size = footprint(runner.model, layers)
        chosen = _CPU_PAGE if device == "cpu" else size.page_size(device, ranges=2 * shape["layers"])
        page_bytes = settings.page_bytes or chosen
        widest = remap.KVSpec(**shape, min_blocks=0, max_blocks=1, layout="layer_major")
        blocks = most = max(1, capacity // widest.block_bytes)
        if settings.max_tokens is not None:
            most = max(1, min(blocks, settings.max_tokens // shape["block_tokens"]))
        self.most_tokens = most * shape["block_tokens"]
        """Tokens that SGLang's pool may ever have, without the padding page."""
        shape |= {"layout": "layer_major", "max_blocks": blocks + 1}  # and the padding page
        geometry = KVGeometry(remap.KVSpec(**shape, min_blocks=0), page_bytes)
        self.runner = runner
        self._waits = RateLimitedWarning(logger)
        self.allocator: Any = None
        self.scheduler: Any = None
        self.pool: Any = None
        self._wanted = 0  # blocks that the last iteration wanted to allocate
        self._refused = False  # the controller has refused to grow in this iteration
        self._unseen = set(range(len(layers)))
        self._group = -(-page_bytes // geometry.unit_bytes)  # blocks that become usable together
        weights = size.pages(page_bytes)
        pages = min(max(0, capacity // page_bytes - weights), geometry.region_pages)
        first = min(geometry.blocks_for_pages(pages), most + 1)  # use all pages: a free page gains nothing
        if settings.joins:
            # Of a broker's pages only those for one request of the greatest length: SGLang refuses longer ones.
            first = min(first, -(-versions.longest(runner) // shape["block_tokens"]) + 1)
        if first < 2:
            raise InvalidState(
                f"the capacity is {capacity} bytes, the weights take {weights * page_bytes} in whole pages, "
                f"and a KV cache grows by {geometry.ranges * page_bytes}; nothing was attached; raise REMAP_CAPACITY, "
                "or lower REMAP_PAGE_BYTES",
                capacity=capacity,
                weights=weights * page_bytes,
            )
        if self._ranks > 1:  # no page is free beside these: ranks could use it differently
            capacity = (weights + geometry.pages_for_blocks(first)) * page_bytes
        if not settings.joins:
            self.session = remap.Session(
                capacity,
                device,
                page_bytes=page_bytes,
                config=_controller(settings),
                platform=remap.advanced.Platform(copy_chunk_bytes=settings.copy_chunk_bytes),
            )
            undo.callback(self.session.close)
        if most < blocks:
            # The ceiling may lie inside of a layer, which needs a place as a whole: `HeldIds` has the limit.
            pages = size.reach(page_bytes, *map(geometry.pages_for_blocks, (first, most + 1)))
            groups = min(-(-pages // geometry.ranges) * geometry.ranges, geometry.donation_pages)
            shape["max_blocks"] = min(geometry.blocks_for_pages(groups) + 1, shape["max_blocks"])
        spec = remap.KVSpec(**shape, min_blocks=first)
        self.tenant = self._patiently(lambda: self.session.attach(runner.model, name=NAME, kv=spec, hooks=False))
        self.watches = [module.register_forward_pre_hook(self._seen(i)) for i, module in enumerate(layers)]
        self._hooks = attach_hooks(layers, self.tenant)
        if settings.link is not None:
            internals(self.tenant).calibrate_link(settings.link)
        self.spec = spec
        self.held = HeldIds(reserved=[_PADDING])
        self.rank = Rank(self.session, self.tenant, versions.rank(self._ranks), turn_s=settings.turn_s)
        self._opened: set[int] = set()  # ids that the allocator may hand out
        self._streams = False  # on some rank, when they last met
        self.asleep = False
        """Other processes have the pages, or may have them: no request holds a block, and none runs."""

    def _patiently(self, attach: Callable[[], remap.Tenant]) -> remap.Tenant:
        """attach(). Where other processes have the pages it is tried again until they have ended their turns: SGLang computes
        while it starts, so it starts with all that it needs. Raises what the last try raises."""
        give_up_s = time.monotonic() + START_S
        while True:
            try:
                return attach()
            except OutOfMemory as error:
                page, wanted = error.fields.get("page_bytes"), error.fields.get("minimum_bytes")
                if not (self.session.broker and page and wanted) or time.monotonic() >= give_up_s:
                    raise
                if int(str(wanted)) > self.session.capacity_bytes:
                    raise
                self._waits.warn("it starts when other processes give the pages of its layers: %s", error)
            time.sleep(_AGAIN_S)

    # -- the pool --------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens that the allocator holds now: free, in use, or draining."""
        return self.held.held * self.spec.block_tokens

    def buffers(self, pool: Any) -> None:
        """Give the pool its buffers: of each layer tensors of pool.size + page_size rows."""
        rows = pool.size + pool.page_size
        ours = [half.flatten(0, 1)[:rows] for tensor in self.tenant.kv.tensors for half in tensor]
        versions.set_buffers(pool, self.spec, ours)
        self.pool = pool

    def bind(self, allocator: Any) -> None:
        """Take the allocator over: from now on its free list has the usable ids and no others."""
        if self.pool is None or allocator.get_kvcache() is not self.pool:
            raise InvalidState(
                "SGLang built its KV pool without asking remap for its buffers, so the pool is not in remap's "
                "memory; unset REMAP_ENABLE to serve this model",
                pool=type(allocator.get_kvcache()).__name__,
            )
        self.allocator = allocator
        self.held = HeldIds(reserved=[_PADDING], limit=self.pool.size // self.spec.block_tokens + 1)
        versions.replace_free(allocator, [])
        self.group = RankGroup(self._ask, self._ranks)
        self.rank.listen(self._heard if self._ranks == 1 else None, zero=False)
        self._take(self.rank.report())
        self._publish()

    def restart(self) -> None:
        """Fill the free list again after the allocator was cleared."""
        versions.replace_free(self.allocator, self.held.restart(sorted(self._opened), self.rank.returned))
        self._publish()

    def _heard(self, report: RankReport) -> list[int]:
        """Open exactly the report's ids. Returns those that have left and are free."""
        before, self._opened = self._opened, ids(report.open)
        withdrawn = sorted(before - self._opened)
        if self.asleep:
            # In the thread that answers the broker: SGLang's lists stay as they are. They are made anew when it wakes.
            return withdrawn
        new = self.held.changed(sorted(self._opened - before), withdrawn)
        if new:
            versions.append_free(self.allocator, new)
        return self.held.declined() + self._leave()

    def _leave(self) -> list[int]:
        """Take the drained ids that are free now, on every rank, out of the free list."""
        if not self.held.leaving:
            return []
        found = versions.take_free(self.allocator, self.held.leaving)
        gone = set.intersection(*map(set, self._gather(found)))
        if len(gone) < len(found):
            versions.append_free(self.allocator, sorted(set(found) - gone))
        return self.held.leave(gone)

    def _sweep(self) -> None:
        """Give back drained ids that are free now."""
        self.rank.returned(self._leave())

    def _take(self, report: RankReport | None) -> None:
        """The change that all ranks have made reaches the allocator; of one rank alone it has done so already."""
        if report is not None and self._ranks > 1:
            self.rank.returned(self._heard(report))

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Each rank makes this call of its `Rank` now; all answers, in order. Whether layers stream is agreed by it, too."""
        answers = self._gather((getattr(self.rank, method)(*args), self.tenant.streaming))
        self._streams = self._ranks > 1 and any(streams for _, streams in answers)
        return [answer for answer, _ in answers]

    def _gather(self, own: Any) -> list[Any]:
        return versions.gather(own) if self._ranks > 1 else [own]

    @property
    def streaming(self) -> bool:
        """Whether a layer streams or is on its way, on any rank: a graph is replayed on all of them, or on none."""
        return self._streams or self.tenant.streaming

    def _publish(self) -> None:
        versions.set_sizes(self.runner, self.scheduler, self.tokens)

    # -- deciding --------------------------------------------------------------------------------------------------

    def begin(self, scheduler: Any) -> None:
        """Make a step at the start of a scheduler iteration, with the demand of the last one."""
        if scheduler is not self.scheduler:
            self.scheduler = scheduler
            self._publish()
        self._refused = False
        # SGLang has promised room for all of a prompt that it prefills in chunks: keep that room until the prompt is
        # in.
        promised = -(-versions.promised(scheduler) // self.spec.block_tokens)
        wanted, self._wanted = max(promised, self._wanted), 0
        free = self._free(scheduler.tree_cache)
        self._step(wanted, free, promised <= free and versions.running(scheduler))

    def grow(self, tokens: int, tree_cache: Any, *, urgent: bool = False) -> bool:
        """Ask for `tokens` more than are free or evictable now. Returns whether there are more than before.

        urgent: ask even if the controller has refused in this iteration.
        """
        before = free = self._free(tree_cache)
        short = -(-tokens // self.spec.block_tokens)
        wanted = free + short
        self._wanted = max(self._wanted, wanted)
        if self._refused and not urgent:
            return False
        # Blocks come in groups of 2 x layers pages: ask for whole groups. The next change starts with the rest of the
        # last group.
        whole = free - (-short // self._group) * self._group
        for _ in range(_TRIES):
            if free < wanted:
                self._step(whole, free, not urgent and self.scheduler is not None and versions.running(self.scheduler))
                free = self._free(tree_cache)
        self._refused = free < wanted
        return free > before

    def drain(self, tree_cache: Any) -> None:
        """Evict drained ids from the prefix cache. Call it when no request runs: then only that cache holds them."""
        self._sweep()
        leaving, cached = len(self.held.leaving) * self.spec.block_tokens, versions.evictable(tree_cache)
        if leaving and cached:
            versions.evict(tree_cache, min(leaving, cached))
            self._sweep()
            self._publish()

    def rewrite(self, write: Callable[[], Any]) -> Any:
        """write(), which writes the model's weights; then the master copies have them, too. Layers that cannot come home stream
        them. Raises InvalidState (fields tenant, layers) if other processes have the layers' pages; nothing is written then.
        """
        if self.asleep and not self._wake():
            raise InvalidState(
                f"other processes have the pages of {NAME}'s layers; nothing was written; update the weights when it serves",
                tenant=NAME,
                layers=list(self.session.snapshot().tenants[NAME].cold),
            )
        self._home()
        return remap.advanced.rewrite(self.session, NAME, write)

    def differs(self) -> str:
        """The difference if layers are away, or "" (see `trial.differs`). For an engine without requests; layers are home
        afterwards.
        """
        try:
            return trial.differs(self.runner, self.session, self.tenant)
        finally:
            self.rank.back(self.group.target)
            self._publish()

    def _home(self) -> None:
        """Bring all layers home, as far as no request uses their pages."""
        if self.group.target[0]:
            self._take(self.group.home())
            if self.scheduler is not None:
                self.drain(self.scheduler.tree_cache)
            self._step(0, 0)  # finishes what drained

    def _free(self, tree_cache: Any) -> int:
        """Blocks that requests could get now."""
        tokens = self.allocator.available_size() + versions.evictable(tree_cache)
        return max(0, int(tokens) // self.spec.block_tokens - len(self.held.leaving))

    def _step(self, wanted: int, free: int, can_wait: bool = False) -> None:
        self._sweep()
        held, layers = self.held.held, self.tenant.remapped
        report = self.group.step(wanted, free, can_wait=can_wait)
        self._take(report)
        self._publish()
        if not self.rank.rank and (self.held.held != held or self.tenant.remapped != layers):
            why = report.reason if report is not None else "blocks that drained have left"
            copied = self.session.snapshot().tenants[NAME].copied_bytes
            logger.info(
                "remapped layers %d, tokens %d, bytes streamed %d: %s", self.tenant.remapped, self.tokens, copied, why
            )

    # -- other processes -------------------------------------------------------------------------------------------

    def may_run(self, scheduler: Any) -> bool:
        """Whether SGLang may schedule now. The engine's turn ends here when another process has waited for long enough, or waits
        and no request is here."""
        if not self.session.broker:
            return True
        idle = bool(scheduler.is_fully_idle())
        if not self.asleep and (self.rank.turn.others_wait() if idle else self.rank.turn_over()):
            self._give_turn(scheduler)
        return not self.asleep or idle or self._wake()

    def _give_turn(self, scheduler: Any) -> None:
        versions.retract(scheduler)
        cached = versions.evictable(scheduler.tree_cache)
        if cached:
            versions.evict(scheduler.tree_cache, cached)
        self._sweep()
        self._publish()
        self.asleep = True
        try:
            self.rank.give_turn()
        except BaseException:
            self.asleep = not self.tenant.active
            raise

    def _wake(self) -> bool:
        report = self.rank.wake()
        if report is None:
            return False
        self.group.woken([report])
        self.asleep = False
        self.restart()
        return True

    # -- passes ----------------------------------------------------------------------------------------------------

    def _seen(self, layer: int) -> Callable[[Any, Any], None]:
        def hook(module: Any, args: Any) -> None:
            self._unseen.discard(layer)

        return hook

    def after_first_pass(self) -> None:
        """Raise InvalidState (field layers) if the first pass did not run every layer's hook.

        A model that does not call its layers as modules would compute wrong tokens once layers stream.
        """
        if self._unseen:
            raise InvalidState(
                f"layers {sorted(self._unseen)} ran past their hooks in the first pass; unset REMAP_ENABLE to serve "
                "this model",
                layers=sorted(self._unseen),
            )
        for watch in self.watches:
            watch.remove()
        self.watches = []


def _controller(settings: Settings) -> Knobs:
    """The controller's settings; without REMAP_RESERVE_BLOCKS it keeps no blocks free.

    SGLang's admission already reserves the tokens that running requests may need.
    """
    config = settings.controller()
    return replace(config, reserve_blocks=0) if config.reserve_blocks is None else config


# -- the one adapter of this process ---------------------------------------------------------------------------------

_settings: Settings | None = None
_version = ""
_applied: Callable[[str], bool] | None = None
_adapter: Adapter | None = None


def configure(settings: Settings, version: str, applied: Callable[[str], bool]) -> None:
    """Set the settings for `around_alloc`. version: SGLang's. applied(target): whether SGLang has put that hook in."""
    global _settings, _version, _applied
    _settings, _version, _applied = settings, version, applied


def current() -> Adapter | None:
    """The adapter that serves in this process."""
    return _adapter


def _bound(allocator: Any) -> Adapter | None:
    return _adapter if _adapter is not None and _adapter.allocator is allocator else None


def around_alloc(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    global _adapter
    assert _settings is not None and _applied is not None
    missing = [target for targets in versions.TARGETS.values() for target in targets if not _applied(target)]
    if missing or _adapter is not None:
        raise InvalidState(
            f"SGLang did not apply the hooks {missing}" if missing else "a second model in one process is not served",
            missing=missing,
        )
    _adapter = Adapter(_settings, runner)
    result = original(runner, *args, **kwargs)
    _adapter.bind(runner.token_to_kv_pool_allocator)
    logger.info(
        "%d layers attached, %d tokens usable, %d at most",
        _adapter.tenant.layers,
        _adapter.tokens,
        _adapter.most_tokens,
    )
    return result


def around_graphs(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Raises InvalidState (fields version, tested, differed), and detaches the model, if a version newer than the tested one
    computes something else with layers away.
    """
    if _adapter is not None and runner is _adapter.runner:
        remap.advanced.settle(_adapter.session)  # a driver call of its worker would end a capture
    result = original(runner, *args, **kwargs)
    if _adapter is not None and runner is _adapter.runner:
        prove("SGLang", _version, (versions.TESTED,), _adapter.differs, _leave, versions.otherwise())
    return result


def _leave() -> None:
    global _adapter
    assert _adapter is not None
    _adapter.session.close()
    _adapter = None


def around_profile(original: Any, configurator: Any, *args: Any, **kwargs: Any) -> Any:
    """Report the KV region's bytes: the free memory beside the arena does not limit the pool."""
    if _adapter is None:
        return original(configurator, *args, **kwargs)
    versions.check_states(configurator)
    return _adapter.spec.max_blocks * _adapter.spec.block_bytes


def around_budget(original: Any, configurator: Any, budget: int, *, cap_tokens: int | None = None) -> Any:
    if _adapter is not None:
        cap_tokens = min(cap_tokens or _adapter.most_tokens, _adapter.most_tokens)
    return original(configurator, budget, cap_tokens=cap_tokens)


def around_post_capture(original: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep SGLang from making its own reservation, which it would size once, after it has captured graphs."""
    return False


def around_buffers(original: Any, pool: Any) -> None:
    if _adapter is None:
        original(pool)
        return
    _adapter.buffers(pool)


def around_clear(original: Any, allocator: Any) -> None:
    original(allocator)
    adapter = _bound(allocator)
    if adapter is not None:
        adapter.restart()


def around_forward(original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    adapter = _adapter
    if adapter is None or runner is not adapter.runner:
        return original(runner, batch, *args, **kwargs)
    phase, tokens = versions.phase_of(batch)
    with adapter.tenant.forward(phase=phase, tokens=tokens):
        output = original(runner, batch, *args, **kwargs)
    if adapter.watches and tokens:
        adapter.after_first_pass()
    return output


def around_can_run(original: Any, graphs: Any, batch: Any) -> Any:
    """Whether SGLang may replay a graph in this pass. A graph calls no hook of a layer, and reads each where it was captured:
    none may be away or on its way then. Nothing changes that within the pass, which `around_forward` has opened.
    """
    adapter = _adapter
    if adapter is not None and graphs.model_runner is adapter.runner and adapter.streaming:
        return False
    return original(graphs, batch)


def around_update(original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """A refusal is answered as SGLang answers its own: (False, message)."""
    adapter = _adapter
    if adapter is None:
        return original(updater, *args, **kwargs)
    try:
        return adapter.rewrite(lambda: original(updater, *args, **kwargs))
    except InvalidState as error:
        logger.warning("%s", error)
        return False, str(error)


def around_update_session(original: Any, manager: Any, request: Any) -> Any:
    """Around the begin and the end of several updates: SGLang unpacks quantised weights in place, and packs them again.

    A refused begin opens nothing; after a refused end the updates are still open, and it can be called again.
    """
    adapter = _adapter
    if adapter is None:
        return original(manager, request)
    try:
        return adapter.rewrite(lambda: original(manager, request))
    except InvalidState as error:
        logger.warning("%s", error)
        return versions.refused(request, str(error))


def around_next_batch(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    adapter = _bound(scheduler.token_to_kv_pool_allocator)
    if adapter is not None:
        if not adapter.may_run(scheduler):
            time.sleep(_AGAIN_S)
            return versions.no_batch(scheduler)
        if not adapter.asleep:
            adapter.begin(scheduler)
    return original(scheduler, *args, **kwargs)


def around_idle(original: Any, scheduler: Any) -> None:
    adapter = _bound(scheduler.token_to_kv_pool_allocator)
    if adapter is not None and not adapter.asleep and scheduler.is_fully_idle():
        adapter.drain(scheduler.tree_cache)
    original(scheduler)


def around_evict(original: Any, allocator: Any, tree_cache: Any, num_tokens: int) -> Any:
    """Grow by the tokens that are missing after the original has evicted all that it can.

    SGLang calls this before it retracts requests (through `check_decode_capacity` and the retract loop) and before
    prefills.
    """
    result = original(allocator, tree_cache, num_tokens)
    adapter = _bound(allocator)
    if adapter is not None:
        short = num_tokens - int(allocator.available_size())
        if short > 0:
            adapter.grow(short, tree_cache, urgent=True)
    return result


def around_admission(original: Any, budget: Any, *, total_tokens: int, **kwargs: Any) -> Any:
    """Grow for a request that does not fit beside the tokens that running requests may still need."""
    result = original(budget, total_tokens=total_tokens, **kwargs)
    adapter = _bound(budget.allocator)
    if result[0] or adapter is None:
        return result
    if not adapter.grow(int(total_tokens - budget.remaining_total) + 1, budget.tree_cache):
        return result
    return original(budget, total_tokens=total_tokens, **kwargs)


def around_admission_ignore_eos(original: Any, adder: Any, request: Any) -> Any:
    """The same for requests of a known length: SGLang's rule for them considers when other requests end."""
    result = original(adder, request)
    adapter = _bound(adder.memory_budget.allocator)
    if adapter is None or result.name != _NO_TOKEN or request in adder.can_run_list:
        return result
    needed = len(request.full_untruncated_fill_ids) - request.prefix_len + request.sampling_params.max_new_tokens
    if not adapter.grow(needed, adder.memory_budget.tree_cache):
        return result
    adder.req_states = None  # it holds this request already; SGLang rebuilds it from the running ones
    return original(adder, request)


def around_state(original: Any, adder: Any) -> Any:
    """Grow if SGLang would admit no more requests in this iteration although some are waiting."""
    result = original(adder)
    adapter = _bound(adder.memory_budget.allocator)
    if adapter is None or result.name != _NO_TOKEN or len(adder.can_run_list) >= adder.waiting_queue_len:
        return result
    budget = adder.memory_budget
    short = 1 - int(min(budget.remaining_total, budget.remaining_current))
    if short <= 0 or not adapter.grow(short, budget.tree_cache):
        return result
    return original(adder)
