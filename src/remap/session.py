"""The session: one arena, its tenants, and the only wiring between policy and memory.

    per step   demand -> Controller.decide -> Planner -> Plan -> Executor.apply -> blocks usable -> settle
    settle     Prefetcher.configure (which copies are due) -> Executor.commit (regions are re-pointed by the worker)

Blocks are usable when apply() returns: in aliased mode that is bookkeeping, without any backend call. Settling comes after
that. If settling fails nothing is lost: `tenant.forward()` tries it again, and raises instead of beginning a pass.

Threads: attach, step, remap, snapshot and close may be called from any thread, one at a time (one lock); passes belong to
the engine's thread. The re-pointing worker and the copy stream belong to the core and never call Python.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from . import _core
from .attach import MAX_BUFFERS, LayerSource, attach_layers, model_source, raw_source
from .changes import Changes
from .controller import Controller, ControllerConfig, Demand
from .errors import ArenaBroken, ForkedProcess, InvalidArgument, InvalidState
from .kv_cache import KVCache
from .kv_geometry import KVSpec
from .observe import check_books, make_report, take_snapshot
from .planner import plan_free_pages
from .policy import HiddenCopies, free_pages_of, view_of
from .sizes import parse_size
from .snapshot import Snapshot, StepReport
from .tenant import Tenant

__all__ = ["Session"]

_UNCHANGED = StepReport()


class _Lock:
    """The session's lock. A forked child is refused before it waits: the lock's holder may not exist there."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._generation = _core.fork_generation()

    def refuse_fork(self) -> None:
        if _core.fork_generation() != self._generation:
            raise ForkedProcess(
                "this process was forked from the one that owns the session and must not touch it; nothing changed; start "
                "workers with the 'spawn' method, or open a session in the child"
            )

    def __enter__(self) -> None:
        self.refuse_fork()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Session:
    """One arena of physical pages on one device, holding weights and KV cache of any number of tenants.

    capacity: bytes or "24GiB"; pages, ring and staging together never exceed it. device: "cpu". mode: "aliased" (growth
    without driver calls) or "strict" (only what is owned is mapped: a stray access faults). page_bytes: a multiple of the
    backend's granularity. backend: a ready backend instead of `device` (decorators, tests).

    Raises InvalidArgument for a bad size, device or mode, OutOfMemory or LimitExceeded if the pages cannot be had.
    """

    def __init__(
        self,
        capacity: int | str,
        device: str = "cpu",
        *,
        mode: str = "aliased",
        page_bytes: int | str = "2MiB",
        backend: Any = None,
        controller: ControllerConfig | None = None,
        copy_threads: int = 1,
    ) -> None:
        size, page = parse_size(capacity, "capacity"), parse_size(page_bytes, "page_bytes")
        if mode not in ("aliased", "strict"):
            raise InvalidArgument(f"mode must be 'aliased' or 'strict', got {mode!r}; nothing was created", mode=mode)
        if page == 0 or size < page:
            raise InvalidArgument(
                f"capacity of {size} bytes must hold at least one page of {page} bytes; nothing was created",
                capacity=size,
                page_bytes=page,
                minimum_bytes=page,
            )
        if backend is None:
            if device != "cpu":
                raise InvalidArgument(
                    f"device must be 'cpu', got {device!r}: no other backend is built in yet; nothing was created",
                    device=device,
                )
            backend = _core.make_host_backend(size - size % page, page, copy_threads)
        self.device = device
        self.capacity_bytes = size
        self._backend = backend
        self._arena = _core.Arena(backend, size, page, getattr(_core.Mode, mode))
        self._executor = _core.Executor(self._arena)
        self._changes = Changes(backend, self._arena, self._executor)
        self._config = controller or ControllerConfig()
        self._tenants: dict[str, Tenant] = {}
        self._controllers: dict[str, Controller] = {}
        self._next_tenant = 0
        self._lock = _Lock()
        self.closed = False

    # -- tenants ---------------------------------------------------------------------------------------------------

    def attach(
        self,
        model: Any,
        layers: Any = None,
        *,
        name: str = "model",
        priority: int = 0,
        kv: KVSpec,
        mutable: Sequence[str] = (),
        weights: Any = None,
        names: Mapping[str, str] | None = None,
        controller: ControllerConfig | None = None,
    ) -> Tenant:
        """Move a torch model's tensors into the arena and give it a KV cache.

        layers: the list of layers or its path ("model.layers"); found by itself for common families. mutable: patterns of
        tensors that the model writes; they stay resident. weights: safetensors file(s) or folder that the model was loaded
        from: where the bytes agree, the memory-mapped file is the master copy and no second copy is kept in memory.

        The model computes as before, at new addresses that never change again. Raises InvalidArgument (unknown layer path,
        wrong device, name in use, KVSpec that does not fit), OutOfMemory (field minimum_bytes); nothing changes then.
        """
        with self._lock:
            self._check_open()
            self._check_name(name)
            source = model_source(model, layers, memory=self._memory, mutable=mutable, weights=weights, names=names)
            return self._attach(source, name, priority, kv, controller)

    def attach_bytes(
        self,
        layers: Sequence[Any],
        *,
        name: str = "model",
        priority: int = 0,
        kv: KVSpec,
        controller: ControllerConfig | None = None,
    ) -> Tenant:
        """As `attach`, for an engine without torch: one buffer of bytes a layer, which stays alive as the master copy.

        `session.layer_address(name, i)` says where layer i lives.
        """
        with self._lock:
            self._check_open()
            self._check_name(name)
            return self._attach(raw_source(layers), name, priority, kv, controller)

    def _attach(
        self, source: LayerSource, name: str, priority: int, kv: KVSpec, config: ControllerConfig | None
    ) -> Tenant:
        number = self._next_tenant
        attachment, geometry, region, first = attach_layers(self._arena, number, source, kv, name)
        try:
            addresses = [self._arena.address(index) for index in attachment.pages.layer_regions]
            prefetcher = _core.Prefetcher(
                self._backend, list(zip(addresses, source.master_addresses, source.layer_bytes))
            )
            cache = KVCache(geometry, self._arena.address(region), self._changes.move_bytes, self._memory)
            tenant = Tenant(self, number, name, priority, attachment, cache, prefetcher)
            self._calibrate(tenant, addresses, source)
            if first:
                self._changes.apply(tenant, plan_free_pages(attachment.pages, self._arena.epoch, first, give=True))
                self._changes.settle(tenant)
        except BaseException:
            # Whatever it was, an interrupt included: nothing stays behind. It goes on to the caller.
            attachment.detach(())
            self._arena.remove_tenant(number, undoing=True)
            raise
        self._next_tenant += 1
        self._tenants[name] = tenant
        config = config or self._config
        hidden = HiddenCopies(tenant, config.slowdown)
        self._controllers[name] = Controller(config, bound=hidden.bound, stall=hidden.stall)
        tenant._prepare = hidden.prepare
        return tenant

    def _calibrate(self, tenant: Tenant, addresses: Sequence[int], source: LayerSource) -> None:
        """Load the largest layer once more, with a clock: the bytes are the same, the copy's time is not known yet."""
        largest = max(range(tenant.layers), key=lambda layer: source.layer_bytes[layer])
        nbytes = source.layer_bytes[largest]
        if nbytes:
            seconds = self._changes.copy_seconds(addresses[largest], source.master_addresses[largest], nbytes)
            tenant.calibrate_link(nbytes / max(seconds, 1e-9))

    def detach(self, name: str) -> None:
        """Take a tenant out: its model goes back onto ordinary memory, its pages become free.

        Raises InvalidState while a pass is open. Its KV tensors must not be used any more.
        """
        with self._lock:
            self._check_open()
            tenant = self._tenant(name)
            self._refuse_pass(tenant)
            self._changes.abandon(tenant)
            tenant._restore_model()
            tenant._retire()
            self._arena.remove_tenant(tenant.number)
            del self._tenants[name], self._controllers[name]

    def layer_address(self, name: str, layer: int) -> int:
        """Where a layer lives. It never changes."""
        regions = self._tenant(name)._attachment.pages.layer_regions
        if not 0 <= layer < len(regions):
            raise InvalidArgument(f"layer must lie in 0..{len(regions) - 1}, got {layer}; nothing changed", layer=layer)
        return int(self._arena.address(regions[layer]))

    # -- deciding --------------------------------------------------------------------------------------------------

    def step(self, demand: Mapping[str, Demand] | None = None) -> StepReport:
        """Once per scheduler iteration, between passes: decide and apply.

        demand: for each tenant, the blocks that its engine wants to be able to allocate now. Raises InvalidArgument for an
        unknown tenant and InvalidState inside a pass, before anything changes.
        """
        with self._lock:
            self._check_open()
            demand = demand or {}
            for name in demand:
                if name not in self._tenants:
                    self._tenant(name)
            report: dict[str, dict[str, Any]] | None = None
            for name, wanted in demand.items():
                tenant = self._tenants[name]
                if tenant._in_pass:
                    self._refuse_pass(tenant)
                decision = self._controllers[name].decide(view_of(self, tenant, wanted), wanted)
                if decision.action == "none" and not decision.unmet_blocks and not tenant._attachment.draining:
                    continue
                if report is None:
                    report = {}
                report[name] = self._carry_out(tenant, wanted, decision)
            return _UNCHANGED if report is None else make_report(self._arena.epoch, self._tenants, report)

    def _carry_out(self, tenant: Tenant, wanted: Demand, decision: Any) -> dict[str, Any]:
        changes, pool = self._changes, tenant.kv.pool
        moved: dict[int, int] = {}
        before = tenant.kv.usable_blocks
        if decision.action == "grow":
            changes.cancel_draining(tenant)
            if decision.free_pool_blocks_to_take:
                changes.take_free_pages(tenant, free_pages_of(self, tenant), decision.free_pool_blocks_to_take)
            if decision.remapped > tenant.remapped:
                changes.grow(
                    tenant,
                    decision.remapped,
                    decision.buffers,
                    predicted_stall_s=decision.predicted_stall_s,
                    reason=decision.reason,
                )
        elif decision.action == "shrink":
            moved = changes.restream(
                tenant,
                decision.remapped,
                decision.buffers,
                "nested",
                predicted_stall_s=decision.predicted_stall_s,
                reason=decision.reason,
                drain=True,
            )
        elif tenant._attachment.draining:
            moved = changes.continue_draining(tenant)
        added = max(0, tenant.kv.usable_blocks - before)
        # What there is, not what was planned: written layers may have made it less.
        free = (wanted.free or 0) + added if pool.external else pool.free_blocks
        return {
            "added": added,
            "moved": moved,
            "unmet": max(0, wanted.blocks - free) if decision.action != "shrink" else 0,
            "stall": decision.predicted_stall_s,
            "reason": decision.reason,
        }

    def remap(self, name: str, layers: int, buffers: int = 1, selection: str = "uniform") -> StepReport:
        """By hand: make `layers` layers' worth of the tenant's pages KV, streaming layers + buffers of them.

        layers = 0 gives all of them back. selection: "uniform" (evenly spaced) or "nested" (growing reloads nothing).
        Live blocks in pages that go back are moved; the report says where (`moved`). Raises InvalidArgument (fields:
        layers, buffers, maximum) if layers + buffers exceeds the streamable layers, OutOfBlocks if live blocks do not fit
        into what remains, InvalidState inside a pass; nothing changes then.
        """
        with self._lock:
            self._check_open()
            tenant = self._tenant(name)
            self._refuse_pass(tenant)
            if selection not in ("uniform", "nested"):
                raise InvalidArgument(
                    f"selection must be 'uniform' or 'nested', got {selection!r}; nothing changed", selection=selection
                )
            streamable = len(tenant._attachment.order)
            whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (layers, buffers))
            if not whole or layers < 0 or not 1 <= buffers <= MAX_BUFFERS or (layers and layers + buffers > streamable):
                raise InvalidArgument(
                    f"layers must lie in 0..{max(0, streamable - 1)}, buffers in 1..{MAX_BUFFERS}, and their sum must not "
                    f"exceed the {streamable} streamable layers of {name!r}; got {layers!r} and {buffers!r}; nothing changed",
                    layers=layers,
                    buffers=buffers,
                    streamable=streamable,
                    maximum=max(0, streamable - (min(max(buffers, 1), MAX_BUFFERS) if whole else 1)),
                )
            before = tenant.kv.usable_blocks
            self._changes.cancel_draining(tenant)
            reason = f"{layers} layers by hand"
            moved = self._changes.restream(tenant, layers, buffers, selection, reason=reason)
            entry = {
                "added": max(0, tenant.kv.usable_blocks - before),
                "moved": moved,
                "unmet": 0,
                "stall": tenant._predicted_stall_s,
                "reason": reason,
            }
            return make_report(self._arena.epoch, self._tenants, {name: entry})

    # -- settling (see the module's docstring) ---------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        """Whether a deferred re-pointing failed and waits to be tried again."""
        return bool(self._executor.failed_points)

    def settle(self, tenant: Tenant | None = None) -> None:
        """Finish what the last change deferred, now, and wait for it. Raises the backend's error if that fails again."""
        with self._lock:
            for each in [tenant] if tenant is not None else list(self._tenants.values()):
                self._changes.settle(each)
            if self._executor.failed_points:
                self._executor.retry_failed()
            if tenant is None:
                self._executor.drain()

    # -- looking ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Everything that can be seen, as frozen values of this moment. Changes nothing."""
        with self._lock:
            self._check_open(broken_too=True)
            return take_snapshot(self._arena, self.capacity_bytes, self._tenants)

    def check(self) -> None:
        """Verify all invariants of the arena and of every block pool (tests, debugging). Raises on a violation."""
        check_books(self._arena, self._tenants)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back. Models return to ordinary memory and stay usable; KV tensors must not be used any more.

        Idempotent. Allowed when the arena is broken.
        """
        if self.closed:
            return
        with self._lock:
            for tenant in self._tenants.values():
                self._changes.abandon(tenant)
                tenant._restore_model()
                tenant._retire()
            self._executor.stop()
            self._changes.close()
            self._tenants.clear()
            self._controllers.clear()
            self._arena.close()
            self.closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _memory(self, address: int, nbytes: int) -> Any:
        """A uint8 tensor over a region; keeps the arena alive."""
        from torch.utils.dlpack import from_dlpack

        return from_dlpack(_core.BytesView(address, nbytes, self._arena))

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            raise InvalidArgument(
                f"no tenant {name!r} is attached, there are {sorted(self._tenants)}; nothing changed", tenant=name
            )
        return tenant

    def _check_open(self, broken_too: bool = False) -> None:
        if self.closed:
            raise InvalidState("the session is closed; nothing changed; open a new one")
        if self._arena.broken and not broken_too:
            quarantined = self._arena.counts()["quarantine"]
            raise ArenaBroken(
                f"an earlier failure could not be undone, {quarantined} pages are quarantined; nothing changed; only snapshot() "
                "and close() are allowed",
                quarantined_pages=quarantined,
            )

    def _check_name(self, name: str) -> None:
        if name in self._tenants:
            raise InvalidArgument(
                f"a tenant {name!r} is attached already; nothing changed; give another name or detach it", tenant=name
            )

    def _refuse_pass(self, tenant: Tenant) -> None:
        if tenant._in_pass:
            raise InvalidState(
                f"tenant {tenant.name!r} is inside a pass; nothing changed; call this between passes",
                tenant=tenant.name,
            )
