"""The session: one arena, its tenants, and the only wiring between policy and memory.

    per step   demand -> Controller.decide -> Planner -> Plan -> Executor.apply -> blocks usable -> settle
    settle     Prefetcher.configure (which copies are due) -> Executor.commit (regions are re-pointed by the worker)
    between tenants   what one needs and others could give (offers.py) -> Controller.decide -> lend.py -> plans as above

Blocks are usable when apply() returns: in aliased mode that is bookkeeping, without any backend call. Settling comes after
that. If settling fails nothing is lost: `tenant.forward()` tries it again, and raises instead of beginning a pass.

Threads: every method may be called from any thread. Those that change something run one at a time; meanwhile no pass begins and
no block is handed out of the tenants concerned (locking.py). A tenant's passes belong to one thread at a time, its engine's, and
each tenant may have an engine on a thread of its own: while it is inside a pass, other threads' calls leave it alone, or refuse
(InvalidState) where it is named. Live blocks of one tenant may move in another's step: whoever calls step() has to hand the
report's `moved` to that tenant's engine before its next pass. The re-pointing worker and the copy stream belong to the core and
never call Python.

Interrupts: a call that an exception ends, KeyboardInterrupt included, has happened or has not; blocks that had moved by then are
in the next report. Calls that consist of several changes may have stopped between two.

On a GPU step() does not wait for the device: what it moves is ordered behind the tenant's compute stream (streams.py;
apply.py names the exceptions). attach, detach and close do wait, for this session's streams and the tenant's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from remap import _core
from remap.arguments import (
    require,
    require_attach,
    require_buffers,
    require_demands,
    require_module,
    require_options,
)
from remap.config import Config, Knobs, invalid, is_amount
from remap.errors import InvalidArgument
from remap.kv.spec import KVSpec
from remap.locking import Moved, SessionLock, exclusive
from remap.memory import device as devices
from remap.memory.activate import ActivationReport, activate, deactivate
from remap.memory.apply import Changes
from remap.memory.attach import Arrivals
from remap.memory.core import Core
from remap.memory.device import Platform
from remap.memory.host_memory import HostMemories, HostMemory
from remap.memory.lend import Lending
from remap.memory.moves import compose_all
from remap.memory.observe import Log, make_report, take_snapshot
from remap.memory.offers import Offers
from remap.memory.passes import Passes
from remap.memory.registered import Registered
from remap.memory.stall_watch import StallWatch
from remap.memory.state import TenantState
from remap.memory.step import Entries, Steps
from remap.memory.streams import Streams
from remap.model.source import LayerSource, model_source, raw_source
from remap.nvtx import annotated
from remap.policy.views import Demand
from remap.report import Snapshot, StepReport
from remap.sizes import parse_size
from remap.tenant import Tenant

__all__ = ["Session"]

_UNCHANGED = StepReport()


def _memory(device: devices.Device, arena: Any, address: int, nbytes: int) -> Any:
    """A uint8 tensor over a region, on the session's device. It keeps its addresses: see `Device.tensor`."""
    # Not a method: a session that refers to itself would keep its memory until the next garbage collection.
    return device.tensor(address, nbytes, arena.hold(address, nbytes))


class Session:
    """One arena of physical pages on one device, holding weights and KV cache of any number of tenants.

    capacity: bytes or "24GiB"; pages, ring and staging together never exceed it. device: "cpu", "cuda", "cuda:N" or "sim:NAME"
    (a named machine in virtual time, see memory/device.py); by default the environment variable REMAP_DEVICE, else "cpu". mode:
    "aliased" (growth without driver calls) or "strict" (only what is owned is mapped: a stray access faults, and no mapping
    changes while the tenant's stream is at work); by default the environment variable REMAP_MODE, else "aliased". page_bytes: a
    power of two and a multiple of the backend's granularity; `remap.model.footprint.footprint(model).page_size("cuda")` gives a
    size that suits a model: a driver is called for every page that a layer is pointed at. platform: what experts and tests set
    (`remap.advanced.Platform`).

    host_budget, on cuda only, bounds page-locked host memory, which master copies take as many bytes of as there are weights: by
    default the environment variable REMAP_HOST_BUDGET, else what the control group and the machine have to spare. LimitExceeded
    says which of these it was: limited_by is "host_budget", "REMAP_HOST_BUDGET", "cgroup" or "machine".

    Raises InvalidArgument for a bad size, device, mode or option, OutOfMemory or LimitExceeded if the pages cannot be had (on the
    CPU also, with fields requested, limit and limited_by, for more than the machine or its control group could ever hold),
    DriverError if the device has no driver or one too old.

    `clock()` gives the seconds that idle times and uses are measured in: time.monotonic, or a simulated device's virtual time.
    """

    def __init__(
        self,
        capacity: int | str,
        device: str | None = None,
        *,
        mode: str | None = None,
        page_bytes: int | str = "2MiB",
        host_budget: int | str | None = None,
        config: Config | None = None,
        platform: Platform | None = None,
    ) -> None:
        size, page = parse_size(capacity, "capacity"), parse_size(page_bytes, "page_bytes")
        if mode is None:
            mode = devices.default_mode()
        if mode not in ("aliased", "strict"):
            raise InvalidArgument(f"mode must be 'aliased' or 'strict', got {mode!r}; nothing was created", mode=mode)
        require("config", config, (Config, type(None)), "a remap.Config, or None")
        require("platform", platform, (Platform, type(None)), "a remap.advanced.Platform, or None")
        if page == 0 or size < page:
            raise InvalidArgument(
                f"capacity of {size} bytes must hold at least one page of {page} bytes; nothing was created",
                capacity=size,
                page_bytes=page,
                minimum_bytes=page,
            )
        platform = platform or Platform()
        self._backend, self._device = devices.resolve(device, size, page, platform, host_budget)
        self.device = str(self._device.name)
        self.capacity_bytes = size
        self._arena = _core.Arena(self._backend, size, page, getattr(_core.Mode, mode))
        self._executor = _core.Executor(self._arena)
        self.clock = self._device.clock
        self._streams = Streams(self._backend, self._device.simulator)
        self._host = HostMemories(self._backend, self._device)
        self._config = Knobs.of(config or Config())
        self._tenants: dict[str, TenantState] = {}
        self._lock = SessionLock(_core.fork_generation, self, Session._begin_call, Session._end_call)
        self._changes = Changes(self._streams, self._arena, self._executor)
        self._lending = Lending(self._tenants, self._changes)
        self._offers = Offers(self._tenants, self._changes, self._lending, self._config, self.clock)
        self._steps = Steps(self._tenants, self._changes, self._lending, self._offers)
        self._memory = partial(_memory, self._device, self._arena)
        self._arrivals = Arrivals(
            self._changes, self._tenants, self._device, self._lock, self._memory, int(platform.copy_chunk_bytes)
        )
        self._stalls = StallWatch()
        self._passes = Passes(self._changes, self._tenants, self._lock, self._stalls, self.clock)
        self._registered = Registered(self._arena, self._tenants)
        self._core = Core(self._arena, self._tenants, self._changes, self._lending, self._registered)
        self._log = Log()
        self._departed: list[TenantState] = []  # on their way out: see _release_departed
        self._told: list[Moved] = []  # moves that the report of the call in progress tells of
        self._closing = False  # all tenants depart
        self._claiming = False  # whether a call has claimed tenants

    @property
    def closed(self) -> bool:
        """Whether `close` has succeeded."""
        return self._passes.closed

    # -- tenants ---------------------------------------------------------------------------------------------------

    @exclusive
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
        config: Config | None = None,
        active: bool = True,
        extra_layers: Sequence[Any] = (),
        embedding: str = "device",
        hooks: bool = True,
    ) -> Tenant:
        """Move a torch model's tensors into the arena and give it a KV cache.

        priority: of tenants that compete, the one with the larger number is served first and gives last. active: whether it may
        serve passes at once (see `activate`). config: its own settings, by default the session's. extra_layers: modules, or
        their paths ("lm_head"), that stream like layers although they have no KV: number n, n + 1, ... for wait and done.
        embedding: "host" keeps an untied input embedding in host memory, where a step gathers its few rows.

        hooks: torch hooks make each layer wait for its weights and say when it is done, and make a call of the model a
        pass (`remap.model.hooks`). Nothing is streamed before one whole pass has waited for every layer. False: the engine calls
        wait and done itself, for every layer in every pass.

        layers: the list of layers or its path ("model.layers"); found by itself for common families. mutable: patterns of
        tensors that the model writes; they stay resident. weights: safetensors file(s) or folder that the model was loaded
        from: where the bytes agree, the memory-mapped file is the master copy and no second copy is kept in memory. On cuda
        master copies have to be page-locked, so they are always copies.

        The model lies on the CPU or on the session's device, and is on that device afterwards, computing as before at new
        addresses that never change again; from the CPU it needs no room there but the session's. Raises InvalidArgument
        (what is no torch module or no KVSpec, unknown layer path, wrong device, name in use, KVSpec whose layers, heads, head_dim
        or dtype are not the model's: fields value and model_value, see kv_fit.py), OutOfMemory (field minimum_bytes),
        LimitExceeded (page-locked memory, or more than 2**26 blocks); nothing changes then.
        """
        self._passes.check_open()
        require_attach(name, priority, kv, config, active)
        require_options(layers, mutable, weights, names, extra_layers, hooks)
        self._check_name(name)
        self._device.require_bytes()
        require_module(model)
        with self._host.taken(self._is_kept) as host:
            source = model_source(
                model,
                layers,
                device=self._device,
                memory=self._memory,
                host=host,
                kv=kv,
                mutable=mutable,
                weights=weights,
                names=names,
                extra=extra_layers,
                embedding=embedding,
                hooks=hooks,
            )
            return self._admit(source, name, priority, kv, config, host, active)

    @exclusive
    def attach_bytes(
        self,
        layers: Sequence[Any],
        *,
        name: str = "model",
        priority: int = 0,
        kv: KVSpec,
        config: Config | None = None,
        active: bool = True,
    ) -> Tenant:
        """As `attach`, for an engine without torch: one buffer of bytes a layer, which stays alive as the master copy.

        On cuda a writable buffer that starts at an OS page is page-locked in place; of any other a page-locked copy is made.
        `remap.advanced.layer_address(session, name, i)` says where layer i lives.
        """
        self._passes.check_open()
        require_attach(name, priority, kv, config, active)
        self._check_name(name)
        views = require_buffers(layers)
        with self._host.taken(self._is_kept) as host:
            source = raw_source(views, host)
            return self._admit(source, name, priority, kv, config, host, active)

    @exclusive
    def detach(self, name: str, *, device: Any = None) -> None:
        """Take a tenant out: its model goes back onto ordinary memory, its pages become free. Waits for its last pass.

        device: the torch device that the model goes to; by default where it is, which on a GPU has to have room for it
        beside the session. Its KV tensors must not be used any more. Raises InvalidState while a pass is open or a range
        of the tenant's is declared as registered, and OutOfMemory (fields requested, device) without room for the model; it
        can be called again then, and until it has succeeded the tenant serves no pass.
        """
        self._passes.check_open()
        self._claim()
        tenant = self._core.tenant(name)
        tenant.require_idle(leaving=True)
        self._registered.refuse_detach(tenant)
        self._changes.abandon(tenant)
        tenant.source.detach(sorted(tenant.absent), device)
        tenant.retire()
        self._departed.append(tenant)
        self._arena.remove_tenant(tenant.number)  # from here it has gone
        self._release_departed()

    # -- deciding --------------------------------------------------------------------------------------------------

    @exclusive
    @annotated("remap.step")
    def step(self, demand: Mapping[str, int | Demand] | None = None) -> StepReport:
        """Once per scheduler iteration, between passes: decide and apply.

        demand: for each tenant, the blocks that its engine wants to be able to allocate now: a number, or a Demand from an engine
        with its own allocator. Raises InvalidArgument for an unknown tenant or what is neither and InvalidState inside a pass,
        before anything changes; and the backend's error if nothing has changed by then. If something has, the report says what,
        and its reason which error ended the step early.
        """
        self._passes.check_open()
        wanted = require_demands(demand)
        self._claim()
        for name in wanted:
            if name not in self._tenants:
                self._core.tenant(name)
        for name in wanted:
            tenant = self._tenants[name]
            if tenant.busy or not tenant.active:
                tenant.require_idle(asleep=True)
        entries = self._steps.step(wanted)
        return self._report(entries) if entries or self._changes.moved else _UNCHANGED

    def _report(self, entries: dict[str, dict[str, Any]]) -> StepReport:
        self._log.add(self._arena.epoch, entries)
        resized = False
        for name in entries:
            tenant = self._tenants[name]
            resized = resized or tenant.alpha != tenant.told_alpha
            tenant.told_alpha = tenant.alpha
        return self._with_moved(lambda moved: make_report(self._arena.epoch, self._tenants, entries, moved, resized))

    def _with_moved(self, report: Callable[[Moved], Any]) -> Any:
        """report(moved), which tells of all moves that no report has told of: noted, for the case that it does not arrive."""
        moved = self._changes.moved
        made = report(moved)
        self._told.append(moved)
        self._changes.moved = {}
        return made

    # -- whose turn it is ------------------------------------------------------------------------------------------

    @exclusive
    @annotated("remap.activate")
    def activate(self, name: str, *, alone: bool = False, partial: bool | float = False) -> ActivationReport:
        """The tenant serves passes from now on: what it has lent comes home first (see memory/activate.py). Between passes.

        alone: all other tenants become inactive (temporal sharing); otherwise they stay as they are (spatial sharing). Where
        live blocks of others lie in the way and have no room elsewhere, nothing changes but who is inactive, and the report
        names them (`preempt`): free them and call again. partial: serve at once all the same; what cannot come home is streamed
        through the ring, and comes home when it can. A number: only as far as a pass then waits for at most this share of its
        computation; blocks in the way of more than that are in `preempt`.

        Raises InvalidArgument for an unknown tenant or a share that is none (field partial), InvalidState inside a pass of a
        tenant concerned, and the backend's error; nothing changes then. If what was done before such an error could not be taken
        back, the report says so instead.
        """
        require("alone", alone, bool, "True or False")
        if not isinstance(partial, bool) and not is_amount(partial):
            raise invalid("partial", partial, "True, False, or a share of a pass's computation, finite and at least 0")
        self._passes.check_open()
        self._claim()
        tenant = self._core.tenant(name)
        tenant.require_idle()
        others = [other for other in self._tenants.values() if alone and other is not tenant and other.active]
        for other in others:
            other.require_idle()
        before = {each: each.active for each in (tenant, *others)}
        try:
            report = activate(self._changes, self._lending, self._offers, tenant, partial, self.clock())
            for other in others:
                deactivate(self._changes, other)
            entry = {"added": 0, "unmet": 0, "stall": report.predicted_stall_s, "reason": report.reason}
            self._log.add(self._arena.epoch, {name: entry})
            made: ActivationReport = self._with_moved(lambda moved: replace(report, moved=moved))
            return made
        except BaseException:
            for each, active in before.items():
                each.active = active
            raise

    @exclusive
    def deactivate(self, name: str) -> None:
        """The tenant serves no pass until it is activated again. Its live blocks stay; its unused KV and its layers may be lent.

        Raises InvalidArgument for an unknown tenant and InvalidState inside a pass; nothing changes then.
        """
        self._passes.check_open()
        self._claim()
        tenant = self._core.tenant(name)
        tenant.require_idle()
        deactivate(self._changes, tenant)

    # -- for remap.advanced ----------------------------------------------------------------------------------------

    @exclusive
    def change(self, verb: Callable[[Core], Entries]) -> StepReport:
        """verb(parts of the session) as one call of it, and its report. `remap.advanced` has the verbs.

        Every tenant that is not inside a pass is this call's until it is over. If it raises, whatever it raises, what it has
        begun and not decided is undone.
        """
        self._passes.check_open()
        self._claim()
        return self._report(verb(self._core))

    @exclusive
    def exclusively(self, call: Callable[[Core], Any], *, always: bool = False, claims: bool = True) -> Any:
        """As `change`, for a call that reports nothing: its result. always: also on a broken arena, and on a closed session,
        which has no tenants. claims: False for a call that changes nothing, beside which other threads' passes may begin."""
        if not always:
            self._passes.check_open()
        if claims:
            self._claim()
        return call(self._core)

    # -- looking ---------------------------------------------------------------------------------------------------

    @exclusive
    def snapshot(self) -> Snapshot:
        """Everything that can be seen, as frozen values of this moment. Changes nothing."""
        self._passes.check_open(broken_too=True)
        return take_snapshot(
            self.capacity_bytes,
            self._arena,
            self._lending,
            self._tenants,
            self._log.records(),
            self._stalls.share(self._passes.active_numbers()),
        )

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, *, device: Any = None) -> None:
        """Give everything back. Models return to ordinary memory and stay usable; KV tensors must not be used any more.

        Waits for the last passes. device and OutOfMemory: as for `detach`. Idempotent; after an error it can be called again.
        Allowed when the arena is broken, and with ranges declared as registered: their owner has let go of them.
        """
        if not self.closed:
            self._close(device)

    @exclusive
    def _close(self, device: Any) -> None:
        for tenant in self._tenants.values():
            self._changes.abandon(tenant)
            tenant.source.detach(sorted(tenant.absent), device)
            tenant.retire()
        self._executor.stop()
        self._departed.extend(self._tenants.values())
        self._closing = True
        self._release_departed()
        self._streams.close()
        self._host.close()
        self._arena.close()
        self._passes.closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _begin_call(self) -> list[Moved]:
        self._undo()
        self._release_claims()
        self._told = []
        return self._told

    def _end_call(self, told: list[Moved] | None, failed: bool) -> None:
        if failed:
            self._claiming = True  # whatever it had come to
            for tenant in self._tenants.values():
                tenant.kv.pool.not_telling()
            self._undo()
            self._registered.pin()
            while told:
                if self._changes.moved is not told[-1]:  # it was taken out for the report
                    self._changes.moved = compose_all(told[-1], self._changes.moved)
                told.pop()
        self._release_claims()

    def _undo(self) -> None:
        """What a call has begun and not decided never was. Can be called again."""
        self._changes.undo()
        self._arrivals.undo()
        if self._departed:
            self._release_departed()

    def _release_departed(self) -> None:
        """Of tenants whose memory has gone nothing is left: neither in the tables, nor what they hold outside of the arena."""
        while self._departed:
            tenant = self._departed[-1]
            name = tenant.name
            if self._closing or self._arena.counts(tenant.number)["total"] == 0:
                self._tenants.pop(name, None)
                self._changes.moved.pop(name, None)
                self._offers.forget(name)
                self._changes.release(tenant)
                self._host.give_back(tenant.host)
            self._departed.pop()

    def _claim(self) -> None:
        """All tenants that are not inside a pass are this call's until it is over."""
        self._claiming = True
        for tenant in self._tenants.values():
            tenant.turn.claim()

    def _release_claims(self) -> None:
        if self._claiming:
            for tenant in self._tenants.values():
                tenant.turn.release()
            self._claiming = False

    def _admit(
        self,
        source: LayerSource,
        name: str,
        priority: int,
        kv: KVSpec,
        config: Config | None,
        host: HostMemory | None,
        active: bool,
    ) -> Tenant:
        made: list[Tenant] = []

        def handle(state: TenantState) -> Tenant:
            made.append(Tenant(state, self._passes, self))
            return made[-1]

        self._arrivals.admit(
            source,
            name,
            priority,
            kv,
            self._config if config is None else Knobs.of(config),
            host,
            active,
            self.clock,
            handle,
        )
        return made[-1]

    def _is_kept(self, host: HostMemory) -> bool:
        return any(tenant.host is host for tenant in self._tenants.values())

    def _check_name(self, name: str) -> None:
        if name in self._tenants:
            raise InvalidArgument(
                f"a tenant {name!r} is attached already; nothing changed; give another name or detach it", tenant=name
            )
