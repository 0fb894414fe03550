# SPDX-License-Identifier: Apache-2.0
"""One rank: vLLM's worker, with its weights and its KV cache in one arena.

    load_model               lets vLLM load (and quantise) as usual; offloader.py brackets the layers
    determine_available_...  returns the bytes of the largest KV cache; the scheduler withholds unusable blocks
    initialize_from_config   moves the weights into the arena; vLLM's KV tensors become views of the tenant's region
    compile_or_warm_up_model sees only the open blocks; then the layers are compared with their master copies
    execute_model            is one pass

The scheduler calls `remap_call` through `collective_rpc` between passes, in the order of the steps.
"""

from __future__ import annotations

import gc
import logging
import math
import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from vllm.model_executor.offloader import set_offloader
from vllm.platforms import current_platform

import remap
from remap.adapters.arenas import shared
from remap.adapters.settings import Settings
from remap.errors import InvalidArgument, InvalidState, OutOfMemory
from remap.internals import internals
from remap.memory.core import Core
from remap.model.footprint import footprint
from remap.policy.hidden import verdict
from remap.ranks import Rank
from remap.session import Session
from remap.tenant import Tenant

from . import engine_internals, metrics
from .apart import RankApart
from .cpu_linear import weights_left_in_place
from .offloader import RemapOffloader
from .reach import Reach

__all__ = ["NAME", "worker_class"]

logger = logging.getLogger("vllm.remap")  # vLLM shows only messages of its own loggers

NAME = "vllm"
_TRIED = 8  # tokens of the passes that try a version newer than the tested ones
_WAKE_TURNS = 60  # how long a pass without requests waits for the pages that it needs: turns of other processes


def _writes(name: str) -> Callable[..., Any]:
    def call(self: RemapWorker, *args: Any, **kwargs: Any) -> Any:
        return self._remap_write(name, partial(getattr(super(RemapWorker, self), name), *args, **kwargs))

    call.__name__, call.__doc__ = name, "As vLLM's, by `_remap_write`."
    return call


class RemapWorker:
    """The part of the worker that is ours: `worker_class` puts it before a worker class of vLLM's."""

    model_runner: Any
    vllm_config: Any
    cache_config: Any
    rank: int
    local_rank = 0
    weight_transfer_engine: Any
    _remap_writing = False  # a call writes weights
    _remap_ranks = 1
    _remap_apart = False  # of several ranks each has a broker's pages: other ones than the others

    # -- starting --------------------------------------------------------------------------------------------------

    def init_device(self) -> None:
        engine_internals.show_logs()
        newer = engine_internals.check_version()
        scheduler = self.vllm_config.scheduler_config.get_scheduler_cls()
        if not hasattr(scheduler, "bind"):
            raise InvalidState(
                "remap's worker needs remap's scheduler, which hands out only usable blocks; this engine's scheduler "
                f"is {scheduler}; the engine was not started; give --scheduler-cls remap.adapters.vllm.Scheduler, or "
                "no --worker-cls",
                scheduler=str(scheduler),
            )
        engine_internals.admit_config(self.vllm_config)  # again, unless the worker was given by a flag
        settings = self._remap_read(1)
        arena, self._remap_ranks = settings.arena, self.vllm_config.parallel_config.world_size
        self._remap_apart = settings.joins and self._remap_ranks > 1
        if arena and self.vllm_config.kv_transfer_config is not None:
            raise InvalidState(
                f"KV in host memory, and the arena {arena!r} that engines of this process share: vLLM has one KV connector in a "
                "process, and a second engine's blocks would go through the first one's; the engine was not started; leave out "
                "--kv-offloading-size and --kv-transfer-config, or REMAP_ARENA",
                arena=arena,
            )
        # A version newer than the tested ones, and a GPU, on which the adapter was not tested: they show what they compute.
        self._remap_trial = newer or not current_platform.is_cpu()
        beside = settings.joins and not current_platform.is_cpu()
        with engine_internals.memory_beside_a_broker() if beside else nullcontext():
            super().init_device()  # type: ignore[misc]
        self.remap_offloader = RemapOffloader(lambda: getattr(self.model_runner, "model", None) is not None)
        self.remap_rank: Any = None  # a Rank, once it is attached
        self._remap_told = self.rank > 0  # what remap can do here
        self._remap_moved = 0  # blocks
        set_offloader(self.remap_offloader)  # the runner, just made, has set its own

    def load_model(self, **kwargs: Any) -> None:
        packed = self._remap_read(1).cpu_linear == "packed"
        with weights_left_in_place(packed) if current_platform.is_cpu() else nullcontext():
            super().load_model(**kwargs)  # type: ignore[misc]
        if not self.remap_offloader.layers:
            found = engine_internals.layers_of_transformers(self.model_runner.get_model())
            if not found:
                raise InvalidState(
                    f"{self.vllm_config.model_config.model} does not build its layers with vLLM's make_layers, and is not of "
                    "its Transformers backend: nothing can be remapped; the engine was not started; unset REMAP_ENABLE"
                )
            self.remap_offloader.bracket(found)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        layouts = super().get_supported_kv_cache_layouts()  # type: ignore[misc]
        found = engine_internals.block_outermost(layouts)
        if not found:
            raise InvalidState(
                f"the attention backend reads only the KV layouts {', '.join(layouts)}, in which a block's layers lie "
                "apart; the engine was not started; choose another attention backend",
                layouts=tuple(layouts),
            )
        return found

    def determine_available_memory(self) -> int:
        """Bytes of the largest KV cache that there will ever be: the first one, and all layers' pages but those of the ring, in
        whole blocks."""
        specs = self.model_runner.get_kv_cache_spec()
        block = engine_internals.bytes_of_block(self.vllm_config, specs)
        # At a broker room for one request of the greatest length is its own for good, and for vLLM's null block; all else is for
        # the engine that needs it.
        longest = engine_internals.bytes_of_tokens(specs, self.vllm_config.model_config.max_model_len) + block
        joins = self._remap_read(1).joins
        if joins and not current_platform.is_cpu() and self.cache_config.kv_cache_memory_bytes is None:
            # The KV lies in the broker's pages, so what is free beside them says nothing; and vLLM, which would look, ends where
            # another engine gives memory back meanwhile.
            self.cache_config.kv_cache_memory_bytes = longest
        own = int(super().determine_available_memory())  # type: ignore[misc]
        size = footprint(self.model_runner.get_model(), self.remap_offloader.layers)
        self._remap_settings = settings = self._remap_read(size.nbytes + own)
        if joins:
            capacity = shared(settings.arena).join(settings, _device())
            own = min(own, longest)
            if self._remap_apart and _least(capacity) != capacity:
                raise InvalidState(
                    f"the broker at {settings.arena} has {capacity} bytes, and another rank's fewer; the engine was not started; "
                    "start the brokers of all ranks with the same --capacity",
                    arena=settings.arena,
                    capacity=capacity,
                )
        else:
            assert settings.capacity is not None  # read above
            capacity = settings.capacity
        self._remap_capacity = capacity
        page = settings.page_bytes or shared(settings.arena).page_bytes or size.page_size(_device(), kv_bytes=own)
        self._remap_plain, self._remap_rounding = own, size.pages(page) * page - size.nbytes
        self._remap_page, self._remap_weights = page, size.pages(page) * page
        first = own if settings.arena else capacity - self._remap_weights
        if self._remap_ranks > 1:  # all ranks open the same blocks
            first = _least(first)
        reach = self._remap_reach = Reach(size, page, block, first)
        if reach.first < 1:
            raise InvalidArgument(
                f"{capacity} bytes are to hold weights of {self._remap_weights} bytes (in pages of {page}) "
                "and a KV cache; the engine was not started; raise REMAP_CAPACITY, or lower REMAP_PAGE_BYTES",
                capacity=capacity,
                weights=self._remap_weights,
            )
        most = reach.reached_of(capacity) if settings.arena else reach.reached(settings.max_layers)
        if self._remap_apart:  # a block of the engine's may lie in any page here
            most = -(-capacity // reach.block)
        if settings.max_tokens is not None:
            most = min(
                most, max(reach.first, engine_internals.bytes_of_tokens(specs, settings.max_tokens) // reach.block)
            )
        engine_internals.refuse_more_blocks(self.cache_config, most)
        return most * reach.block

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self._remap_before: list[torch.Tensor] = []
        if self._remap_trial:
            self._remap_before = [engine_internals.dummy_pass(self.model_runner, _TRIED) for _ in range(2)]
        self._remap_attach(kv_cache_config)
        nbytes = kv_cache_config.kv_cache_tensors[0].size
        memory = self.remap_rank.tenant.kv.memory
        if memory.numel() < nbytes:
            raise InvalidState(
                f"the KV region has {memory.numel()} bytes, vLLM wants {nbytes}; the engine was not started",
                region=memory.numel(),
                wanted=nbytes,
            )
        engine_internals.specs_of_sharing_layers(self.vllm_config, kv_cache_config)
        with engine_internals.kv_allocated_in(memory, nbytes):
            super().initialize_from_config(kv_cache_config)  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """Raises InvalidState (field layers) if vLLM has written into layers meanwhile, and (fields version, tested,
        passes) if a version newer than the tested ones, or a GPU, computes something else on remap.
        """
        if self.remap_rank is None:  # a model without KV cache
            return super().compile_or_warm_up_model()  # type: ignore[misc]
        rank = self.remap_rank
        if self._remap_trial and not rank.tenant.active:  # cold, and passes come before the first request
            rank.sleep()
            self._remap_wake()
        with engine_internals.only_blocks(self.model_runner, rank.tenant.kv.usable_blocks):
            made = super().compile_or_warm_up_model()  # type: ignore[misc]
        written = remap.advanced.differing(rank.session, rank.tenant.name)
        if written:
            raise InvalidState(
                f"vLLM wrote into layers {sorted(written)} while it warmed up; the engine was not started; serve without "
                "remap, and report the version of vLLM",
                layers=tuple(sorted(written)),
                written=written,
            )
        if self._remap_before:
            self._remap_try()
        return made

    def _remap_wake(self) -> None:
        """Bring the layers of a model that started cold: they come home, or stream one after another where others keep the
        pages. The scheduler lets it sleep again until its first request. Raises OutOfMemory if nobody gives any in many turns."""
        rank = self.remap_rank
        rank.wake_within(self._remap_waits_s)
        # All have loaded behind it: vLLM's own passes before the first request wait for no layer.
        with self.remap_offloader.entered(rank.tenant, "prefill", _TRIED):
            engine_internals.dummy_pass(self.model_runner, _TRIED)

    def _remap_try(self) -> None:
        """One pass with all layers at home, and one that streams: each computes what the model did before it moved. Where others
        keep the pages of some, both stream."""
        rank, found = self.remap_rank, {}
        (before, again), self._remap_before = self._remap_before, []
        for alpha in (0, 1):
            try:
                remap.advanced.remap(rank.session, rank.tenant.name, alpha, 1, "nested")
            except InvalidArgument:  # so small a KV cache (REMAP_MAX_TOKENS) that no layer ever leaves
                break
            except OutOfMemory:  # of a broker's pages others have some
                pass
            self._remap_guard_graphs()
            with self.remap_offloader.entered(rank.tenant, "prefill", _TRIED):
                passed = engine_internals.dummy_pass(self.model_runner, _TRIED)
            found[f"{rank.tenant.remapped} layers away"] = float((passed - before).abs().max())
        with suppress(OutOfMemory):
            remap.advanced.remap(rank.session, rank.tenant.name, 0, 1, "nested")
        if not torch.equal(before, again):
            logger.warning(
                "remap: two equal passes of the model gave other values before it moved: only bytes were compared"
            )
            return
        most = 1e-2 * float(before.abs().max())
        if not all(difference <= most for difference in found.values()):  # NaN is no match, either
            version = engine_internals.installed_version()
            raise InvalidState(
                f"remap was tested with vLLM {' to '.join(engine_internals.TESTED)} on a CPU; with {version} on {_device()} the "
                f"same pass gives other values on remap, by {found} where {most} is rounding; the engine was not started; "
                f"install vllm=={engine_internals.TESTED[-1]}.*, try REMAP_MODE=strict, or unset REMAP_ENABLE",
                version=version,
                tested=engine_internals.TESTED,
                passes=found,
            )

    def _remap_read(self, capacity: int) -> Settings:
        """The settings of the environment and of --additional-config. capacity: bytes, used if neither gives a
        capacity, or a broker."""
        given = self.vllm_config.additional_config
        more = given.get("remap", {}) if isinstance(given, dict) else {}
        merged = {**os.environ, "REMAP_ENABLE": "1"} | {
            f"REMAP_{name.upper()}": str(value) for name, value in more.items()
        }
        settings = Settings.read(merged, capacity)
        assert settings is not None
        return replace(settings, arena=settings.arena.replace("{device}", str(self.local_rank)))

    def _remap_attach(self, kv_cache_config: Any) -> None:
        model, layers = self.model_runner.get_model(), self.remap_offloader.layers
        page, block = self._remap_page, engine_internals.block_bytes(kv_cache_config)
        engine_internals.own_rotary_tables(model)
        if current_platform.is_cpu() and self.vllm_config.model_config.use_mla:
            engine_internals.latents_apart(model)
        if not current_platform.is_cpu():
            _to_host(model)  # the session's pages need its place on the device
        most = kv_cache_config.num_blocks
        self._remap_reach = self._remap_reach._replace(block=block)  # vLLM may round it for some layouts
        first = min(self._remap_reach.first, most)
        settings = self._remap_settings
        # Of a broker's any page may be its own one day.
        places = -(-self._remap_capacity // block) if settings.joins else self._remap_reach.places(first, most)
        self._remap_arena = arena = shared(settings.arena)
        session = arena.enter(
            capacity=self._remap_capacity
            if settings.arena
            else self._remap_weights + self._remap_reach.pages(first) * page,
            device=_device(),
            page_bytes=page,
            copy_chunk_bytes=settings.copy_chunk_bytes,
            config=settings.controller(),
        )
        name = arena.name_for(self.vllm_config.model_config.model) if settings.arena else NAME
        # vLLM's own views lay out a block: for us a block is a number of bytes.
        kv = remap.KVSpec(
            layers=1,
            kv_heads=1,
            head_dim=block // 2,
            block_tokens=1,
            dtype="uint8",
            min_blocks=first,
            max_blocks=max(most, places),
        )
        with ExitStack() as undo:
            undo.callback(arena.leave, name)
            attach = partial(session.attach, model, layers, name=name, kv=kv, config=settings.controller(), hooks=False)
            tenant = self._remap_attach_joined(session, attach) if settings.joins else attach()
            pinned = session.snapshot().tenants[name].pinned
            if len(layers) - len(pinned) < 2:
                raise InvalidState(
                    "fewer than two layers can stream, so no layer could be remapped; the engine was not started"
                )
            undo.pop_all()
        if settings.link is not None:
            internals(tenant).calibrate_link(settings.link)
        given = session, tenant, self.rank, settings.cold_s if settings.joins else None, settings.turn_s
        apart = {"blocks": most, "may_move": self.remap_may_move, "renamed": self._remap_rename}
        self.remap_rank = RankApart(*given, **apart) if self._remap_apart else Rank(*given)
        engine_internals.around_loading(model, partial(self._remap_write, "load_weights"))
        self._remap_gauges = (
            metrics.Writer(engine_internals.engine_index(self.vllm_config), most) if self.rank == 0 else None
        )
        shows = settings.arena and self._remap_gauges is not None
        self._remap_shows = metrics.Repeated(self._remap_show) if shows else None
        self._remap_manifest = {
            "tenant": name,
            "arena": settings.arena,
            "device": session.device,
            "capacity_bytes": session.capacity_bytes,
            "page_bytes": page,
            "layers": len(layers),
            "layers_that_can_stream": len(layers) - len(pinned),
            "weight_bytes": self._remap_weights,
            "page_rounding_bytes": self._remap_rounding,
            "block_bytes": block,
            "first_blocks": first,
            "most_blocks": most,
            "kv_cache_layout": self.cache_config.kv_cache_layout,
        }
        logger.info("remap: %s", self._remap_manifest)
        logger.info(
            "remap: %d KV blocks now, up to %d as layers leave (vLLM's own lines above name the largest cache)",
            first,
            most,
        )
        alone = self._remap_plain // block
        if first < alone and not settings.arena:
            logger.warning(
                "remap: %d KV blocks now, %d without remap in the same memory: weights take whole pages of %d bytes, "
                "%d bytes more than they have; a smaller REMAP_PAGE_BYTES takes fewer",
                first,
                alone,
                page,
                self._remap_rounding,
            )

    def _remap_attach_joined(self, session: Session, attach: Callable[..., Tenant]) -> Tenant:
        """As an inactive tenant at first, so that what lies outside of the layers can go too while other processes need its
        pages. Where these have no room for it now, it starts cold: its first request brings it pages, or the first pass before it
        serves (`_remap_wake`)."""
        try:
            tenant = attach(active=False, pages="own")
        except OutOfMemory as error:
            if error.fields.get("broker") != "":
                raise
            tenant = attach(active=False, pages="none")
            session.exclusively(partial(_open_first, tenant.name))
            logger.info("remap: there is no room for the model now, so it starts cold (%s)", error)
        else:
            session.activate(tenant.name)
        return tenant

    # -- a pass ----------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> Any:
        tokens = scheduler_output.total_num_scheduled_tokens
        if self._remap_apart and self.rank:
            engine_internals.translate(scheduler_output, self.remap_rank.places)
        if not tokens or self.remap_rank is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        drafted = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        decode = tokens - drafted == len(scheduler_output.num_scheduled_tokens)
        self._remap_guard_graphs()
        whole = getattr(scheduler_output, "remap_whole", None)
        with self.remap_offloader.entered(self.remap_rank.tenant, "decode" if decode else "prefill", tokens, whole):
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
        self._remap_show()
        if decode and not self._remap_told:
            self._remap_tell()
        return output

    def _remap_tell(self) -> None:
        """One line on what remap can do here, once the link is known: by REMAP_LINK, or when copies have been measured."""
        tenant = internals(self.remap_rank.tenant)
        if not tenant.copy_seconds():
            return
        times, prefill = tenant.times(), tenant.prefill_times()
        if times is not None and prefill is not None:
            knobs = self._remap_settings.controller()
            late_s = knobs.late_s(math.fsum(prefill.compute_s))
            said = verdict(times.compute_s, times.transfer_s, knobs.slowdown, prefill.compute_s, late_s)
            logger.info("remap: %s", said)
            self._remap_told = True

    def execute_dummy_batch(self) -> None:
        """As vLLM's, beside the passes of its other engines (data parallelism): one that sleeps wakes for it, since a pass needs
        its layers; others wait for it, so it waits for many turns of other processes. Raises OutOfMemory as `Rank.awake`."""
        if self.remap_rank is None:
            return super().execute_dummy_batch()  # type: ignore[misc]
        self._remap_guard_graphs()
        # Of several ranks none knows what the others would replay.
        whole = None if self._remap_ranks == 1 else False
        with (
            self.remap_rank.awake(self._remap_waits_s),
            self.remap_offloader.entered(self.remap_rank.tenant, "decode", 1, whole),
        ):
            return super().execute_dummy_batch()  # type: ignore[misc]

    @property
    def _remap_waits_s(self) -> float:
        return _WAKE_TURNS * self._remap_settings.turn_s

    def _remap_guard_graphs(self) -> None:
        offloader = self.remap_offloader
        engine_internals.guard_whole_graphs(self.model_runner, offloader.may_be_whole, offloader.is_whole)

    # -- calls of the scheduler, between passes --------------------------------------------------------------------

    def remap_call(self, method: str, *args: Any) -> Any:
        """One call of this rank's `remap.ranks.Rank`."""
        answer = getattr(self.remap_rank, method)(*args)
        if answer is not None:  # after a step without a change the next pass shows the figures
            self._remap_show()
        return answer

    def _remap_show(self) -> None:
        if self._remap_gauges is not None and self.remap_rank is not None:
            self._remap_gauges.write(self.remap_rank.tenant, self._remap_moved)

    def remap_move(self, moves: dict[int, int]) -> None:
        """Move the contents of blocks, and replace their ids on this rank. moves: old id -> new id."""
        if self._remap_apart and self.rank:
            self.remap_rank.exchange(moves)
            return
        internals(self.remap_rank.tenant).kv.move(list(moves.items()))
        self._remap_rename(moves)

    def _remap_rename(self, moves: dict[int, int]) -> None:
        engine_internals.rename_blocks(self.model_runner, moves)
        self._remap_moved += len(moves)

    def remap_may_move(self) -> bool:
        """Whether `remap_move` knows this model runner."""
        return engine_internals.can_rename_blocks(self.model_runner)

    def remap_settled(self) -> bool:
        """Whether no layer of this rank has anything to wait for, until the scheduler changes something."""
        tenant = self.remap_rank.tenant
        return bool(internals(tenant).seen and not tenant.streaming)

    def remap_snapshot(self) -> dict[str, Any]:
        """`session.snapshot()` of this rank, as plain values: it may cross processes."""
        return asdict(self.remap_rank.session.snapshot())

    def remap_manifest(self) -> dict[str, Any]:
        """The sizes of the arena and its parts when the engine started."""
        return dict(self._remap_manifest)

    def remap_offers(self) -> list[tuple[int, float]]:
        """Bytes by which the KV cache has grown, or may grow, beyond its first blocks, and by how many seconds a pass is longer
        when all of them are used; the cheapest for its bytes first. See `remap.advanced.offers`."""
        rank = self.remap_rank
        block = rank.tenant.kv.spec.block_bytes
        quotes = remap.advanced.offers(rank.session, rank.tenant.name)
        found = [(each.blocks * block, each.stall_s + each.share * each.reload_s) for each in quotes]
        return sorted(found, key=lambda each: each[1] / max(1, each[0]))

    # -- calls that read or write all weights ----------------------------------------------------------------------

    def save_sharded_state(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, at any time: it reads the model's state dict, which has the master copies of layers that are away.

        Raises InvalidState for packed weights, which a vLLM that loads them would not recognise. See
        `remap.model.guards`.
        """
        self._remap_as_loaded("save_sharded_state")
        super().save_sharded_state(*args, **kwargs)  # type: ignore[misc]

    def save_tensorized_model(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's.

        Raises InvalidState for packed weights, and (field layers) while layers are away: it would write the ring's
        bytes.
        """
        self._remap_as_loaded("save_tensorized_model")
        self._remap_all_home("save_tensorized_model")
        super().save_tensorized_model(*args, **kwargs)  # type: ignore[misc]

    def compute_weight_checksums(self) -> dict[str, str]:
        """As vLLM's. Raises InvalidState (field layers) while layers are away."""
        self._remap_all_home("compute_weight_checksums")
        return dict(super().compute_weight_checksums())  # type: ignore[misc]

    def _remap_write(self, call: str, write: Callable[[], Any]) -> Any:
        """A call that writes weights, as trainers make it between steps, whether requests are kept or layers are away: what it
        writes is what computes and streams afterwards. One that is made inside of another belongs to it.

        Raises InvalidState for packed weights: nothing is written.
        """
        if self.remap_rank is None or self._remap_writing:
            return write()
        self._remap_as_loaded(call)
        self._remap_writing = True
        try:
            with weights_left_in_place(False) if current_platform.is_cpu() else nullcontext():
                return remap.advanced.rewrite(self.remap_rank.session, self.remap_rank.tenant.name, write)
        finally:
            self._remap_writing = False

    reload_weights = _writes("reload_weights")
    reset_weights = _writes("reset_weights")
    start_weight_update = _writes("start_weight_update")
    start_draft_weight_update = _writes("start_draft_weight_update")
    finish_weight_update = _writes("finish_weight_update")

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, by `_remap_write`. An engine that would write later, in threads, does so now: later nobody would see it."""

        def write() -> None:
            super(RemapWorker, self).update_weights(*args, **kwargs)  # type: ignore[misc]
            getattr(self.weight_transfer_engine, "drain_pending", lambda: None)()

        self._remap_write("update_weights", write)

    def _remap_as_loaded(self, call: str) -> None:
        if current_platform.is_cpu() and self._remap_read(1).cpu_linear == "packed":
            raise InvalidState(
                f"{call} reads or writes weights as they are loaded, and REMAP_CPU_LINEAR=packed keeps them in another "
                "order; nothing was written; start with REMAP_CPU_LINEAR=exact",
                cpu_linear="packed",
            )

    def _remap_all_home(self, call: str) -> None:
        away = () if self.remap_rank is None else tuple(sorted(internals(self.remap_rank.tenant).away()))
        if away:
            raise InvalidState(
                f"{call} reads weights at their addresses, but layers {away} are streamed or loading; nothing was read "
                "or written; call it while the engine is idle, or call save_sharded_state, which reads all layers at "
                "any time",
                layers=away,
            )

    def discard(self, *args: Any, **kwargs: Any) -> None:
        """Raises InvalidState: the session's pages are none of vLLM's allocator's."""
        raise InvalidState(
            "remap holds pages that neither a discard nor a checkpoint of the process covers; nothing changed; restart the "
            "engine, or serve without remap"
        )

    checkpoint_prepare = checkpoint_restore = discard

    def sleep(self, level: int = 1) -> None:
        """For vLLM's `/sleep`: the pages of all layers are the broker's, or for the other engines of its arena, until the first
        request behind `wake_up`.

        Raises InvalidState without an arena, for another level than 1, and while there are requests; nothing changes then.
        """
        arena = self._remap_settings.arena
        if not arena or level != 1:
            raise InvalidState(
                f"sleep at level {level}, REMAP_ARENA={arena!r}: remap gives an engine's pages to those that share its arena, at "
                "level 1, and keeps the weights in host memory; an arena of its own goes back to the driver when it ends, so "
                "nobody would get them; nothing changed; start the engine with REMAP_ARENA=unix:PATH, or with a name that "
                "engines of its process share, or serve without remap",
                level=level,
                arena=arena,
            )
        if not self.remap_rank.turn_cold():
            raise InvalidState(
                "sleep while there are requests: their KV would be lost; nothing changed; sleep with mode=abort or mode=wait"
            )

    def wake_up(self, tags: list[str] | None = None) -> None:
        """The first request brings the layers, in the order of use. Raises InvalidState without an arena."""
        if not self._remap_settings.arena:
            self.sleep()

    def shutdown(self) -> None:
        if self.remap_rank is not None:
            if self._remap_shows is not None:
                self._remap_shows.stop()
            self.remap_rank.close()
            self._remap_arena.leave(self.remap_rank.tenant.name)
            self.remap_rank = None
        super().shutdown()  # type: ignore[misc]


def _least(value: int) -> int:
    """The least of all ranks' values."""
    from vllm.distributed.parallel_state import get_world_group

    found = torch.tensor([value])
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, get_world_group().cpu_group)
    return int(found)


def _open_first(name: str, core: Core) -> None:
    """vLLM's block 0 stands for none in block tables: its page is the engine's own, also while all others are others'."""
    core.cold.open_first(core.tenant(name))
    assert core.other_processes is not None  # it has joined a broker
    core.other_processes.give_spare()


def _device() -> str:
    return "cpu" if current_platform.is_cpu() else f"cuda:{torch.cuda.current_device()}"


def _to_host(model: Any) -> None:
    """Move parameters and buffers to the host, to make room for the arena on the device. Not run on a GPU.

    Raises InvalidState (fields nbytes, kept) if a tenth of their memory is still in use then: a kernel's object holds views of
    them (repacked weights), and would compute from these, not from the arena.
    """
    tensors = (*model.parameters(), *model.buffers())
    nbytes = sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())
    before = torch.accelerator.memory_allocated()
    for tensor in tensors:
        tensor.data = tensor.data.cpu()
    gc.collect()
    torch.accelerator.empty_cache()
    kept = nbytes - (before - torch.accelerator.memory_allocated())
    if kept > nbytes / 10:
        raise InvalidState(
            f"of {nbytes} bytes of weights on the device {kept} are still in use though the model has left: kernels hold them in "
            "an order of their own (a quantised model's); the engine was not started; serve this model without remap",
            nbytes=nbytes,
            kept=kept,
        )


def worker_class() -> type:
    """A class of our worker and of vLLM's worker for this platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Base
    else:
        from vllm.v1.worker.gpu_worker import Worker as Base
    return type("Worker", (RemapWorker, Base), {"__module__": __name__, "__doc__": RemapWorker.__doc__})
