# SPDX-License-Identifier: Apache-2.0
"""The session: one arena, its tenants, and the only wiring between policy and memory.

    per step   demand -> Controller.decide -> Planner -> Plan -> Executor.apply -> blocks usable -> settle
    settle     Prefetcher.configure (which copies are due) -> Executor.commit (regions are re-pointed by the worker)
    between tenants   what one needs and others could give (offers.py) -> Controller.decide -> lend.py -> plans as above

Blocks are usable when apply() returns; in aliased mode growth makes no backend call, unless pages have to be zeroed.
Settling comes after that. If settling fails, nothing is lost: `tenant.forward()` tries again, and raises if that fails
too, so no pass begins.

Threads: every method may be called from any thread. Methods that change something run one at a time; meanwhile the
tenants concerned begin no pass and hand out no block (locking.py). One thread at a time, the engine's, runs a tenant's
passes; each tenant may have its own engine thread. While a tenant is inside a pass, calls of other threads leave it
alone, and raise InvalidState if they name it. One tenant's step may move live blocks of another: the caller of step()
must pass the report's `moved` to the other engine before its next pass. The re-pointing worker and the copy stream
belong to the core and never call Python.

Interrupts: a call that an exception ends, KeyboardInterrupt included, has happened or has not. The next report tells of
the blocks that had moved by then. A step, which makes several changes, may have stopped between two of them.

On a GPU, step() does not wait for the device: its moves are ordered behind the tenant's compute stream (streams.py;
apply.py names the exceptions). attach, detach and close wait for this session's streams and the tenant's.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar, cast

from remap import _core
from remap.arguments import (
    require,
    require_attach,
    require_buffers,
    require_demands,
    require_module,
    require_options,
)
from remap.config import Config, Knobs, invalid, is_amount, is_count
from remap.errors import Error, InvalidArgument, OutOfMemory
from remap.joined import AskedSession, membership
from remap.kv.spec import KVSpec
from remap.locking import Moved, SessionLock, exclusive, outermost
from remap.memory import device as devices
from remap.memory.activate import ActivationReport, activate, deactivate
from remap.memory.apply import Changes
from remap.memory.attach import Attaching
from remap.memory.cold import Cold
from remap.memory.core import Core
from remap.memory.device import Platform
from remap.memory.entries import Entries, Entry
from remap.memory.host_memory import HostMemories, HostMemory, require_kv
from remap.memory.lend import Lending
from remap.memory.observe import Log, make_report, take_snapshot
from remap.memory.offers import Offers
from remap.memory.other_processes import Lacking, OtherProcesses
from remap.memory.passes import Passes
from remap.memory.registered import Registered
from remap.memory.stall_watch import StallWatch
from remap.memory.state import TenantState
from remap.memory.step import Steps
from remap.memory.streams import Streams
from remap.memory.tiers import Tiers
from remap.memory.trace import Trace
from remap.model.source import LayerSource, model_source, raw_source
from remap.notebook import table
from remap.nvtx import annotated
from remap.policy.views import Demand
from remap.report import Snapshot, StepReport
from remap.shown import show_if_asked
from remap.sizes import parse_size, show_size, shown
from remap.tenant import Internals, Tenant

__all__ = ["Session"]

Made = TypeVar("Made")
_UNCHANGED = StepReport()


def _nothing() -> None:
    return None


def _fetch(name: str, core: Core) -> Sequence[int]:
    """Call the pages of the tenant's layers that other processes have."""
    return () if core.other_processes is None else core.other_processes.activating(core.tenant(name))


def _memory(device: devices.Device, arena: Any, address: int, nbytes: int) -> Any:
    """A uint8 tensor over a region, on the session's device. The tensor keeps its addresses reserved: see
    `Device.tensor`."""
    # Not a method: a session that refers to itself would keep its memory until the next garbage collection.
    return device.tensor(address, nbytes, arena.hold(address, nbytes))


class Session:
    """One arena of physical pages on one device. It holds the weights and KV caches of any number of tenants.

    capacity: bytes or "24GiB"; pages, ring and staging together never exceed it.
    device: "cpu", "cuda", "cuda:N" or "sim:NAME" (a named machine in virtual time, see memory/device.py); by default
    the environment variable REMAP_DEVICE, else "cpu". "unix:PATH": the pages of the broker that `remap serve` has started
    there, which other processes use as well (docs/broker.md); leave capacity and page_bytes out, which are the broker's.
    mode: "aliased" (growth makes no driver calls) or "strict" (only owned pages are mapped: a stray access faults, and
    no mapping changes while the tenant's stream is at work); by default the environment variable REMAP_MODE, else
    "aliased".
    page_bytes: a power of two and a multiple of the backend's granularity. "auto": 2 MiB; on cuda 4 MiB, if the session has 1024
    of them, since the driver is called for every page that a layer is pointed at (layer_major KV grows by 2 x layers pages).
    `remap.model.footprint.footprint(model).page_size("cuda")` gives a size that suits a model.
    platform: settings for experts and tests (`remap.advanced.Platform`).
    host_budget, on cuda only: the most bytes of page-locked host memory. Master copies need as many bytes as the
    weights; those of models beyond it load more slowly, from ordinary memory or from the weights files (docs/cuda.md). By
    default the environment variable REMAP_HOST_BUDGET, else what the control group and the machine can spare. The field
    limited_by of LimitExceeded says which limit it was: "host_budget", "REMAP_HOST_BUDGET", "cgroup" or "machine".
    host_kv: host memory for KV of paused and preempted requests, of all tenants whose `KVSpec.host_blocks` is None together:
    bytes or "8GiB"; 0: none. The engines share it evenly. An engine that is made later gets its share while no engine has
    used a block. "auto": when an engine asks (`kv.host.open`), at most half of the memory that the machine and its control
    group can spare, and no more blocks than the session could hold. Unused blocks make room for master copies of models that
    are attached later. An engine that never asks takes none.

    Raises InvalidArgument for a bad size, device, mode or option; OutOfMemory or LimitExceeded if the pages cannot be
    allocated (on the CPU also, with fields requested, limit and limited_by, for more than the machine or its control
    group could ever hold, host_kv included); DriverError if the device has no driver, or one too old.

    `clock()` gives the time in seconds for idle times and uses: time.monotonic, or a simulated device's virtual time.
    """

    def __init__(
        self,
        capacity: int | str | None = None,
        device: str | None = None,
        *,
        mode: str | None = None,
        page_bytes: int | str = "auto",
        host_budget: int | str | None = None,
        host_kv: int | str = "auto",
        config: Config | None = None,
        platform: Platform | None = None,
    ) -> None:
        kv_bytes = None if host_kv == "auto" else parse_size(host_kv, "host_kv")
        if mode is None:
            mode = devices.default_mode()
        if mode not in ("aliased", "strict"):
            raise InvalidArgument(
                f"mode must be 'aliased' or 'strict', got {shown(mode)}; nothing was created", mode=mode
            )
        require("config", config, (Config, type(None)), "a remap.Config, or None")
        require("platform", platform, (Platform, type(None)), "a remap.advanced.Platform, or None")
        platform = platform or Platform()
        self.broker = ""  # the socket of the broker, if there is one
        self._leave: Callable[[], object] = _nothing  # the broker, if there is one
        named = None if platform.backend is not None else devices.default_name() if device is None else device
        joined = membership(named, capacity, page_bytes, host_budget)
        if joined is not None:
            self._leave = weakref.finalize(self, joined.close)  # also if what follows fails
            self.broker, size, page = joined.path, joined.pages * joined.page_bytes, joined.page_bytes
            shared = joined.make_backend(platform.copy_threads, devices.budget_of(host_budget))
            device, platform = None, replace(platform, backend=shared)
        else:
            size = parse_size(cast("int | str", capacity), "capacity")  # None is refused as any other
            auto = page_bytes == "auto"
            page = devices.usual_page_bytes(size, device, platform) if auto else parse_size(page_bytes, "page_bytes")
        if page == 0:
            raise invalid("page_bytes", 0, "'auto', or a power of two that is a multiple of the backend's granularity")
        if size < page:
            raise InvalidArgument(
                f"capacity of {size} bytes must hold at least one page of {page} bytes; nothing was created",
                capacity=size,
                page_bytes=page,
                minimum_bytes=page,
            )
        self._backend, self._device = devices.resolve(device, size, page, platform, host_budget)
        require_kv(self._device, size, kv_bytes)
        self.device = str(self._device.name)
        self.capacity_bytes = size
        self._arena = _core.Arena(self._backend, size, page, getattr(_core.Mode, mode), outside=joined is not None)
        self._executor = _core.Executor(self._arena)
        self.clock = self._device.clock
        self._streams = Streams(self._backend, self._device.simulator)
        budget = devices.budget_of(host_budget)
        self._host = HostMemories(self._backend, self._device, self._arena, kv_bytes, budget)
        self._config = Knobs.of(config or Config())
        self._tenants: dict[str, TenantState] = {}
        self._lock = SessionLock(_core.fork_generation, self, Session._begin_call, Session._end_call)
        self._changes = Changes(self._streams, self._arena, self._executor, self._tenants)
        self._lending = Lending(self._tenants, self._changes)
        self._memory = partial(_memory, self._device, self._arena)
        self._arrivals = Attaching(
            self._changes,
            self._tenants,
            self._device,
            self._lock,
            self._memory,
            self._host,
            devices.usual_chunk_bytes(self._device, platform),
        )
        self._link = self._arrivals.link
        self._offers = Offers(
            self._tenants, self._changes, self._lending, self._config, self.clock, self._link.switching
        )
        self._trace = trace = Trace()
        self._other_processes: OtherProcesses | None = None
        if joined is not None:
            self._other_processes = OtherProcesses(
                self._tenants, self._changes, self._lending, self._offers, joined, self.clock, trace
            )
            self._arrivals.supply, self._arrivals.borrowed = (
                self._other_processes.supply,
                self._other_processes.borrowed,
            )
        self._cold = Cold(self._tenants, self._changes, self._lending, self._offers)
        if self._other_processes is not None:
            self._cold.supply, self._cold.borrowed = self._other_processes.supply, self._other_processes.borrowed
        self._tiers = Tiers(self._tenants, self._host, self._device.cuda)
        self._steps = Steps(self._tenants, self._changes, self._lending, self._offers, self._other_processes)
        self._stalls = StallWatch()
        self._passes = Passes(self._changes, self._tenants, self._lock, self._stalls, self.clock, trace)
        if self._other_processes is not None:
            self._passes.serves, self._passes.come_home = self._other_processes.serves, self._other_processes.come_home
        self._registered = Registered(self._arena, self._tenants)
        self._core = Core(
            self._arena,
            self._tenants,
            self._changes,
            self._lending,
            self._offers,
            self._registered,
            self._cold,
            self._other_processes,
            trace,
        )
        self._log = Log(self.clock, trace)
        self._departed: list[TenantState] = []  # tenants on their way out: see _release_departed
        self._told: list[Moved] = []  # moves in the report of the call in progress
        self._closing = False  # all tenants depart
        self._claiming = False  # whether a call has claimed tenants
        self._asked: AskedSession | None = None
        if joined is not None:
            self._asked = AskedSession(self, joined)
            joined.serve(self._asked)
        show_if_asked(self)

    @property
    def closed(self) -> bool:
        """Whether `close` has succeeded."""
        return self._passes.closed

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
        config: Config | None = None,
        active: bool = True,
        extra_layers: Sequence[Any] = (),
        embedding: str = "device",
        hooks: bool = True,
        resident_layers: int | None = None,
        pages: str = "auto",
    ) -> Tenant:
        """Move a torch model's tensors into the arena and give it a KV cache.

        layers: the list of layers or its path ("model.layers"); remap finds it for common families.
        priority: of competing tenants, the one with the larger number is served first and gives last.
        mutable: patterns of tensors that the model writes; they stay resident.
        weights: the safetensors file(s) or folder that the model was loaded from. Where the bytes agree, the
        memory-mapped file is the master copy, and memory holds no second copy. On cuda that is so only of models beyond
        host_budget: page-locked copies load at the link's speed, and a file is not page-locked.
        config: the tenant's settings, by default the session's.
        active: whether the tenant may serve passes at once (see `activate`).
        extra_layers: modules, or their paths ("lm_head"), that stream like layers but have no KV; wait and done know
        them as n, n + 1, ...
        embedding: "host" keeps an untied input embedding in host memory, where each step gathers its few rows.
        hooks: torch hooks make each layer wait for its weights and say when it is done, and make each call of the model
        a pass (`remap.model.hooks`). No layer streams before one whole pass has waited for every layer. False: the
        engine itself calls wait and done, for every layer in every pass.
        resident_layers: this many layers have pages of their own. The others stream in every pass, for good, through a ring of
        Knobs.buffers buffers (2 by default): so a model that is larger than the session can be attached. The set of
        streaming layers never changes then, and none of the layers becomes KV. None: all layers have pages, and may come and go.
        pages: "own" takes pages of the arena for every layer and min_blocks KV blocks. "none", of an inactive tenant, takes none
        for them: `activate` brings them, from tenants that can spare them. So more models can be attached than there is memory
        for at once. "auto": "none" if active=False and there are too few, else "own". Of a tenant that is attached inactive,
        parameters outside of layers have master copies too, and go and come with the layers; otherwise they have pages always.

        The model may be on the CPU or on the session's device. Afterwards it is on that device and computes as before,
        at new addresses that never change again. A model from the CPU needs no room on the device beside the session.

        Raises InvalidArgument (not a torch module or not a KVSpec, unknown layer path, wrong device, name in use, or a
        KVSpec whose layers, heads, head_dim or dtype are not the model's: fields value and model_value, see kv_fit.py),
        OutOfMemory (field minimum_bytes), LimitExceeded (page-locked memory, or more than 2**26 blocks). Nothing
        changes then, nor if another call of this session is under way in this thread (InvalidState, field call).
        """

        def made(host: HostMemory) -> LayerSource:
            require_options(layers, mutable, weights, names, extra_layers, hooks)
            self._device.require_bytes()
            require_module(model)
            return model_source(
                model,
                layers,
                device=self._device,
                memory=self._memory,
                host=self._masters(host),
                kv=kv,
                mutable=mutable,
                weights=weights,
                names=names,
                extra=extra_layers,
                embedding=embedding,
                hooks=hooks,
                embedding_part=not active,
            )

        return self._attach("attach", made, name, priority, kv, config, active, resident_layers, pages)

    def attach_bytes(
        self,
        layers: Sequence[Any],
        *,
        name: str = "model",
        priority: int = 0,
        kv: KVSpec,
        config: Config | None = None,
        active: bool = True,
        resident_layers: int | None = None,
        pages: str = "auto",
    ) -> Tenant:
        """As `attach`, for an engine without torch: one buffer of bytes per layer. The session keeps it as the master
        copy.

        On cuda a writable buffer that starts at an OS page is page-locked in place; remap makes a page-locked copy of
        any other, or stages all of them if that passes host_budget. `remap.advanced.layer_address(session, name, i)` gives
        the address of layer i.
        """

        def made(host: HostMemory) -> LayerSource:
            return raw_source(require_buffers(layers), self._masters(host))

        return self._attach("attach_bytes", made, name, priority, kv, config, active, resident_layers, pages)

    @outermost
    def detach(self, name: str, *, device: Any = None) -> None:
        """Take a tenant out: its model goes back to ordinary memory and its pages become free. Waits for its last pass.

        device: the torch device that the model goes to; by default the one it is on. A GPU then needs room for it
        beside the session. Do not use the tenant's KV tensors afterwards. Raises InvalidState while a pass is open or a
        range of the tenant's is declared as registered, or inside another call (of a listener), and OutOfMemory (fields
        requested, device) without room for the model. It can be called again then; until it has succeeded, the tenant serves no
        pass.
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
        tenant.gone, tenant.at_others = frozenset(), False
        if self._other_processes is not None:
            self._other_processes.forget_gone()

    # -- deciding --------------------------------------------------------------------------------------------------

    @exclusive
    @annotated("remap.step")
    def step(self, demand: Mapping[str, int | Demand] | None = None) -> StepReport:
        """Decide and apply. Call it once per scheduler iteration, between passes.

        demand: for each tenant, the blocks that its engine wants to be able to allocate now: a number, or a Demand from
        an engine with its own allocator. Before anything changes, raises InvalidArgument for an unknown tenant or a
        demand that is neither, and InvalidState inside a pass. Raises the backend's error if nothing had changed by
        then; otherwise the report says what changed, and its reason names the error that ended the step early.
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
        began = self._trace.now()
        entries = self._steps.step(wanted)
        if self._asked is not None and self._asked.waits:
            self._asked.attend(self._core)
        if not (entries or self._changes.moved):
            return _UNCHANGED
        report = self._report(entries)
        self._trace.add("step", "", began, epoch=report.epoch, moved_blocks=sum(map(len, report.moved.values())))
        return report

    def _report(self, entries: Entries) -> StepReport:
        self._link.certify()
        self._log.add(self._arena.epoch, self._tenants, entries)
        resized = False
        for name in entries:
            tenant = self._tenants[name]
            before, tenant.told_alpha = tenant.told_alpha, tenant.alpha
            resized = resized or before != tenant.told_alpha
        return self._with_moved(lambda moved: make_report(self._arena.epoch, self._tenants, entries, moved, resized))

    def _with_moved(self, report: Callable[[Moved], Any]) -> Any:
        """report(moved) with all moves not reported yet, which are noted: if it is lost, the next report has them."""
        moved = self._changes.moved
        made = report(moved)
        self._told.append(moved)
        self._changes.moved = {}
        return made

    # -- whose turn it is ------------------------------------------------------------------------------------------

    @annotated("remap.activate")
    def activate(self, name: str, *, alone: bool = False, partial: bool | float = False) -> ActivationReport:
        """Let the tenant serve passes from now on; its lent layers come home first (see memory/activate.py). Between
        passes.

        alone: all other tenants become inactive (temporal sharing); otherwise they stay as they are (spatial sharing).

        If live blocks of other tenants are in the way and have no room elsewhere, nothing changes but who is inactive,
        and the report names the blocks (`preempt`): free them and call again. partial: serve at once nevertheless;
        layers that cannot come home stream through the ring, and come home when they can. A number: the same, but a
        pass may wait for at most this share of its computation; `preempt` names the blocks that are in the way of that.

        The session asks for layers whose pages another process has (device "unix:PATH"), and waits 0.25 s at most. A layer that
        has not come by then streams, whatever `partial` is, and comes home later.

        A tenant without pages (`attach(pages="none")`, or one that gave them up for another's activation) takes those that can
        be had: free ones, unused KV, layers of inactive tenants and KV of paused ones. With a broker's pages it asks other
        processes first, and waits without holding up other tenants: they give what they do not use, and layers of inactive
        tenants. Its layers load in the order of use, and a pass may begin at once. If its own live blocks fill what these
        layers need, `preempt` names them, too. If there are too few pages, nothing changes: OutOfMemory (fields requested,
        free, short, offered; broker: why none answers; outside: pages of other processes).

        Raises InvalidArgument for an unknown tenant or an invalid share (field partial), InvalidState inside a pass of a
        tenant concerned, and the backend's error; nothing changes then. If a tenant without pages has got some of its layers
        before such an error, the report says so instead: these load, and the tenant is not active.
        """
        require("alone", alone, bool, "True or False")
        if not isinstance(partial, bool) and not is_amount(partial):
            raise invalid("partial", partial, "True, False, or a share of a pass's computation, finite and at least 0")
        if self._other_processes is None or self._lock.is_within():
            return self._activate(name, alone, partial)
        with self._lock.patience:
            calls = self.exclusively(lambda core: _fetch(name, core), claims=False)
            self._other_processes.await_home(calls)  # others may begin passes meanwhile
            return self._supplied(name, lambda: self._activate(name, alone, partial))

    def _supplied(self, name: str, attempt: Callable[[], Made]) -> Made:
        """attempt(), a call that may lack pages: then it has only asked other processes for them, and is made again with what
        these give. Between the two this thread has no claim, and patience alone: other tenants' calls and passes go on."""
        if self._other_processes is None:
            return attempt()
        with self._other_processes.supplying(name) as await_supply:
            while True:
                try:
                    return attempt()
                except Lacking:
                    await_supply()

    @exclusive
    def _activate(self, name: str, alone: bool, partial: bool | float) -> ActivationReport:
        self._passes.check_open()
        self._claim()
        tenant = self._core.tenant(name)
        tenant.require_idle()
        others = [other for other in self._tenants.values() if alone and other is not tenant and other.active]
        for other in others:
            other.require_idle()
        with self._giving_back():
            parts = self._changes, self._lending, self._offers, self._cold
            report = activate(*parts, tenant, partial, self.clock(), others)
        self._link.certify()
        entry = Entry(stall=report.predicted_stall_s, reason=report.reason)
        self._log.add(self._arena.epoch, self._tenants, {name: entry})
        self._tiers.consider()
        made: ActivationReport = self._with_moved(
            lambda moved: replace(report, epoch=self._arena.epoch, moved=moved)  # the one after the change
        )
        return made

    @contextmanager
    def _giving_back(self) -> Iterator[None]:
        """Without enough pages, another process that lacks as many may have those that have come."""
        try:
            yield
        except OutOfMemory:
            if self._other_processes is not None:
                self._other_processes.give_spare()
            raise

    @exclusive
    def expect(self, name: str, *, blocks: int = 0) -> tuple[int, ...]:
        """On the first sign of a request for a tenant without pages, while others serve: its first layers begin to load, as many
        as find pages that nobody misses: free ones, unused KV, and layers that idle tenants need not keep. `activate` brings the
        rest. It stays inactive, and what has come is given to whoever needs it more; `deactivate(name, pages="none")` gives it
        up at once, if nobody asks after all.

        With a broker's pages other processes are asked for the rest, and give what none of them needs. The call does not wait for
        it: these layers begin to load when their pages come. blocks: KV blocks that the tenant, active or not, will want soon
        beyond those that it has: pages for them are asked for in the same way, so that the step that wants them finds free ones.
        What nobody has used two seconds after it came goes back.

        Returns the layers that come, ascending; () for an active tenant, which may be inside a pass, for one that lacks none, and
        where there is no room. Raises InvalidArgument for an unknown tenant, and a wrong number (field blocks), InvalidState for
        one that is being detached, and the backend's error; nothing changes then.
        """
        if not is_count(blocks):
            raise invalid("blocks", blocks, "an int of at least 0")
        self._passes.check_open()
        tenant = self._core.tenant(name)
        came: tuple[int, ...] = ()
        lacking = 0
        if not tenant.active and tenant.pages.cold:
            self._claim()
            tenant.require_idle()
            came, _ = self._cold.expect(tenant)
            if came:
                self._changes.wake(tenant)
            self._link.certify()
            lacking = self._cold.lacking(tenant)
        if self._other_processes is not None:
            self._other_processes.expect(tenant, lacking, blocks)
        return tuple(part for part in came if part < tenant.layers)

    @exclusive
    def deactivate(self, name: str, *, pages: str = "own") -> None:
        """Let the tenant serve no pass until it is activated again. Its live blocks stay; it may lend its unused KV and
        layers.

        pages: "none" frees its pages at once: all layers' but those that something wrote into, and KV without live blocks (an
        engine with its own allocator has all open ones: a step withdraws them first). Its activation brings them back, as after
        `attach(pages="none")`. "auto": the same, but the tenant keeps as many first layers as let the others load behind their
        computation, or its first token come within `ttft_s`, by the passes that it has made; before its first one, none. With a
        broker's pages they are the broker's again.

        Raises InvalidArgument for an unknown tenant and InvalidState inside a pass; nothing changes then.
        """
        if pages not in ("own", "none", "auto"):
            raise invalid("pages", pages, "'own', 'none' or 'auto'")
        self._passes.check_open()
        self._claim()
        tenant = self._core.tenant(name)
        tenant.require_idle()
        with self._changes.part():
            deactivate(self._changes, tenant)
            if pages != "own":
                self._cold.give_all(tenant, self._cold.first_kept(tenant) if pages == "auto" else 0)
        if self._other_processes is not None:
            if pages != "own":
                self._other_processes.give_spare(tenant)
            self._other_processes.await_question()
        self._link.certify()
        self._tiers.consider()
        if self._asked is not None and self._asked.waits:
            self._asked.attend(self._core)

    # -- for remap.advanced ----------------------------------------------------------------------------------------

    @exclusive
    def change(self, verb: Callable[[Core], Entries]) -> StepReport:
        """Run verb(parts of the session) as one call of the session, and report. `remap.advanced` has the verbs.

        The call claims every tenant that is not inside a pass until it is over. On any exception: undo all that is begun
        and not decided, then re-raise.
        """
        self._passes.check_open()
        self._claim()
        return self._report(verb(self._core))

    @exclusive
    def exclusively(self, call: Callable[[Core], Any], *, always: bool = False, claims: bool = True) -> Any:
        """As `change`, for a call without a report: returns the call's result. always: also on a broken arena or a
        closed session (which has no tenants). claims: False for a call that changes nothing; other threads may begin
        passes beside it.
        """
        if not always:
            self._passes.check_open()
        if claims:
            self._claim()
        return call(self._core)

    # -- looking ---------------------------------------------------------------------------------------------------

    @property
    @exclusive
    def tenants(self) -> Mapping[str, Tenant]:
        """The attached tenants by name, in the order in which they came: as of now, read only. Empty once closed."""
        return MappingProxyType({name: cast(Internals, state.handle).tenant for name, state in self._tenants.items()})

    def __repr__(self) -> str:
        """Such as <remap.Session of 40 MiB on cpu: llama>. Takes no lock."""
        held = "closed" if self.closed else ", ".join(self._tenants) or "no tenants"
        return f"<remap.Session of {show_size(self.capacity_bytes)} on {self.device}: {held}>"

    def _repr_html_(self) -> str:
        """The HTML for a notebook: the snapshot, or why the session has none."""
        size = show_size(self.capacity_bytes)
        if not self.closed:
            try:
                return self.snapshot()._repr_html_()
            except Error as error:
                why = f"{type(error).__name__}: {error}"
        else:
            why = "closed"
        return table("session", lambda: (("device", self.device), ("capacity", size), ("state", why)))

    @exclusive
    def snapshot(self) -> Snapshot:
        """The state of the session at this moment, as frozen values. Changes nothing."""
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
        """Give everything back. Models return to ordinary memory and stay usable; do not use KV tensors afterwards.

        Waits for the last passes. device and OutOfMemory: as for `detach`; but without `device`, a model that does not fit
        beside the session's own memory goes to the CPU, with a RuntimeWarning, if the machine has room for it: the device's
        memory is free afterwards. Idempotent; it can be called again after an error. While another thread is inside a pass
        (field tenant), and inside another call of the session (of a listener, or a signal handler), it raises InvalidState, and
        the session stays open; a pass of the calling thread is abandoned. Allowed when the arena is broken, and with ranges
        still declared as registered: their owners must have deregistered them by then.
        """
        if not self.closed:
            self._close(device)
        self._leave()  # without the lock: a thread of the membership may wait for it

    @outermost
    def _close(self, device: Any) -> None:
        self._claim()
        for tenant in self._tenants.values():
            if tenant.turn.elsewhere:  # a pass of this thread, or of one that has ended, is abandoned
                tenant.require_idle(leaving=True)
        for tenant in self._tenants.values():
            tenant.leaving = tenant.leaving or tenant.rest is not None  # nothing that is due is waited for
        for tenant in self._tenants.values():
            self._changes.abandon(tenant)
            self._move_out(tenant, device)
            tenant.retire()
        self._executor.stop()
        self._departed.extend(self._tenants.values())
        self._closing = True
        self._release_departed()
        self._streams.close()
        self._host.close()
        owners = self._arena.owners()
        self._arena.close()
        if self._other_processes is not None:
            self._other_processes.hand_back([page for page, owner in enumerate(owners) if owner != _core.Owner.outside])
        self._passes.closed = True

    def _move_out(self, tenant: TenantState, device: Any) -> None:
        """The model goes to `device`; without one, to where it is, or to the CPU if it does not fit there twice."""
        try:
            tenant.source.detach(sorted(tenant.absent), device)
        except OutOfMemory as error:
            where, needed = self._device.torch_device, cast(int, error.fields["requested"])
            if device is not None or where == "cpu" or needed > devices.machine_room()[0]:
                raise
            tenant.source.detach(sorted(tenant.absent), "cpu")
            warnings.warn(
                f"the model of {tenant.name!r}, {show_size(needed)}, does not fit onto {where} twice, and is on the CPU "
                f"now; model.to({where!r}) moves it back once the session is closed",
                RuntimeWarning,
                stacklevel=5,
            )

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
            self._claiming = True  # release all claims, however far the call came
            for tenant in self._tenants.values():
                tenant.kv.pool.not_telling()
            self._undo()
            self._registered.pin()
            while told:
                if self._changes.moved is not told[-1]:  # _with_moved had taken it out
                    self._changes.untold(told[-1])
                told.pop()
        self._release_claims()

    def _undo(self) -> None:
        """Undo the work that a call has begun and not decided. Can be called again."""
        self._changes.undo()
        self._arrivals.undo()
        if self._departed:
            self._release_departed()

    def _release_departed(self) -> None:
        """Remove tenants whose memory is gone from all tables, and release their resources outside the arena."""
        while self._departed:
            tenant = self._departed[-1]
            name = tenant.name
            if self._closing or not self._arena.knows(tenant.number):
                self._tenants.pop(name, None)
                self._changes.moved.pop(name, None)
                self._offers.forget(name)
                self._changes.release(tenant)
                self._tiers.leave(tenant)
                self._host.give_back(tenant.host)
            self._departed.pop()

    def _claim(self) -> None:
        """Claim every tenant that is not inside a pass, until this call is over."""
        self._claiming = True
        for tenant in self._tenants.values():
            tenant.turn.claim()

    def _release_claims(self) -> None:
        if self._claiming:
            for tenant in self._tenants.values():
                tenant.turn.release()
            self._claiming = False

    def _attach(self, call: str, make: Callable[[HostMemory], LayerSource], *asked: Any) -> Tenant:
        """The master copies, made once, then the tenant (`_supplied`): calls of their own. asked: the rest of `_admit`'s
        arguments."""
        self._lock.refuse_inside(call)
        hosts: list[HostMemory] = []
        with self._lock.patience:
            try:
                source = self._make_source(hosts, make, asked)
                return self._supplied(asked[0], lambda: self._admit(source, hosts[0], *asked))
            finally:
                with self._lock.held:
                    self._host.settle(hosts, self._is_kept)

    @exclusive
    def _make_source(
        self, hosts: list[HostMemory], make: Callable[[HostMemory], LayerSource], asked: Sequence[Any]
    ) -> LayerSource:
        self._check_attach(*asked)
        return make(self._host.take(asked[0], hosts))

    @exclusive
    def _admit(
        self,
        source: LayerSource,
        host: HostMemory,
        name: str,
        priority: int,
        kv: KVSpec,
        config: Config | None,
        active: bool,
        resident_layers: int | None,
        pages: str,
    ) -> Tenant:
        self._passes.check_open()  # another thread may have closed it since
        made: list[Internals] = []

        def handle(state: TenantState) -> Internals:
            made.append(Internals(state, self._passes, self))
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
            resident_layers,
            pages,
        )
        return made[-1].tenant

    def _masters(self, host: HostMemory) -> HostMemory | None:
        """Where master copies have to be page-locked; None: they may lie anywhere."""
        return host if self._device.cuda else None

    def _is_kept(self, host: HostMemory) -> bool:
        return any(tenant.host is host for tenant in self._tenants.values())

    def _check_attach(self, name: str, *others: object) -> None:
        """The first checks of every way of attaching, before anything changes."""
        self._passes.check_open()
        require_attach(name, *others)
        if name in self._tenants:
            raise InvalidArgument(
                f"a tenant {name!r} is attached already; nothing changed; give another name or detach it", tenant=name
            )
