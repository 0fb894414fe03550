"""Calls of the core with whatever arguments: run as a program of its own, `hostile_calls.main(first_seed, seeds)`.

A call may raise any ordinary exception. It must not crash, hang, or leave tables that `Arena.check()` refuses. What nobody can
validate is left out: addresses of the caller's own memory that are read or written (copy, fill, a prefetcher's layers).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from remap import _core
from remap.errors import Error

PAGE = 4096
PAGES = 24
NUMBERS: list[Any] = [0, 1, 2, 3, 5, 7, 8, 23, 24, 255, 4096, 4097, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 2]
NUMBERS += [(1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1, 1 << 64, 1 << 70]
ODD: list[Any] = [None, -1, -(1 << 63), 1.5, float("nan"), float("inf"), "x", b"", (), [], {}, object(), True]
SIMULATED = {"capacity_bytes": 1 << 24, "h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 1e9, "hbm_bytes_per_s": 1e11}
DRAWN = ("capacity_bytes", "h2d_bytes_per_s", "granularity")
REFUSALS = (Error, TypeError, ValueError, OverflowError, MemoryError, RuntimeError, IndexError)


class World:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.backend = _core.make_fault_backend(_core.make_host_backend(PAGES * PAGE, PAGE))
        self.arena = _core.Arena(self.backend, PAGES * PAGE, PAGE, rng.choice([_core.Mode.aliased, _core.Mode.strict]))
        self.executor = _core.Executor(self.arena)
        self.draft = _core.Draft(self.arena)
        self.regions = [0, 1, 2, 3, 4, 5]
        self.arena.add_layer_region(1, "one", self.arena.take(2, _core.Owner.params, 1))
        self.arena.add_layer_region(1, "two", self.arena.take(2, _core.Owner.params, 1))
        self.arena.add_ring_region(1, 4)
        self.arena.designate(self.arena.add_kv_region(1, 12), 0, range(4, 12))
        self.master = bytearray(8 * PAGE)
        layers = [(self.arena.address(region), _core.buffer_address(self.master), 2 * PAGE) for region in (0, 1)]
        self.prefetcher = _core.Prefetcher(self.backend, layers, keep=(self.arena, self.master))
        self.plain = _core.make_trace_backend(_core.make_host_backend(8 * PAGE, PAGE))
        self.sim = _core.make_sim_backend(**SIMULATED)
        self.handles: list[int] = [self.plain.create_stream(), self.plain.create_event(), self.plain.create_page(PAGE)]
        self.places: list[int] = [self.plain.reserve(4 * PAGE, PAGE)]
        self.plan = _core.Plan(self.arena.epoch)
        self.views: list[Any] = []

    # -- arguments -------------------------------------------------------------------------------------------------

    def number(self) -> Any:
        return self.rng.choice(ODD if self.rng.random() < 0.08 else NUMBERS)

    def small(self) -> Any:
        return self.rng.randrange(30) if self.rng.random() < 0.7 else self.number()

    def tenant(self) -> Any:
        return self.rng.choice([1, 1, 1, 2, 3]) if self.rng.random() < 0.8 else self.number()

    def pages(self) -> Any:
        draw = self.rng.random()
        if draw < 0.1:
            odd = [range(-1, 3), range(5, 0, -1), range(1 << 40), range(1 << 31, (1 << 31) + 3), None, 7]
            return self.rng.choice(odd)
        return [self.small() for _ in range(self.rng.randrange(5))]

    def owner(self) -> Any:
        if self.rng.random() < 0.1:
            return self.rng.choice([None, 3, "kv", _core.Mode.strict])
        if self.rng.random() < 0.1:
            return _core.Owner(self.rng.randrange(256))
        return self.rng.choice([_core.Owner.free, _core.Owner.params, _core.Owner.kv, _core.Owner.ring])

    def place(self) -> Any:
        if self.rng.random() < 0.5:
            return self.rng.choice(self.places) + self.rng.choice([0, 0, PAGE, -PAGE, 1])
        return self.number()

    def handle(self) -> Any:
        return self.rng.choice(self.handles) if self.rng.random() < 0.7 else self.number()

    def address(self) -> Any:
        if self.rng.random() < 0.5:
            return self.rng.choice([self.arena.address(region) for region in range(4)])
        return self.number()

    # -- calls -----------------------------------------------------------------------------------------------------

    def calls(self) -> list[Callable[[], Any]]:
        arena, executor, draft, plan, prefetcher = self.arena, self.executor, self.draft, self.plan, self.prefetcher
        plain, sim, choose = self.plain, self.sim, self.rng.choice
        number, small, pages, place, handle, address = (
            self.number, self.small, self.pages, self.place, self.handle, self.address,
        )  # fmt: skip
        tenant, owner = self.tenant, self.owner

        def any_of(kind: Any) -> Any:
            return kind(self.rng.randrange(256))

        def stream() -> Any:
            return handle() if self.rng.random() < 0.1 else 0

        return [
            lambda: arena.take(small(), owner(), tenant(), pages()),
            lambda: arena.add_layer_region(tenant(), "x", pages()),
            lambda: arena.add_ring_region(tenant(), small()),
            lambda: arena.add_kv_region(tenant(), small()),
            lambda: arena.designate(small(), small(), pages()),
            lambda: arena.designate_ring(2, small(), pages()),
            lambda: arena.designate_ring(small(), number(), pages()),
            lambda: arena.prepare_view(choose([0, 1]), [small(), small()]),
            lambda: arena.prepare_view(small(), pages()),
            lambda: arena.remove_tenant(choose([2, 3, number()])),
            lambda: arena.declare_registered(address(), number()),
            lambda: arena.withdraw_registered(address(), number()),
            lambda: arena.hold(address(), number()),
            lambda: (arena.address(small()), arena.region_bytes(small()), arena.shown(small())),
            lambda: (arena.counts(number()), arena.owners(), arena.tenants(), arena.free_pages(), arena.regions),
            lambda: plan.set_owner(pages(), owner(), owner(), tenant()),
            lambda: plan.point(small(), small(), pages(), bool(self.rng.randrange(2)), small()),
            lambda: plan.point(choose([0, 1]), 0, [small(), small()], True, choose([0, 1])),
            lambda: setattr(self, "plan", _core.Plan(arena.epoch if self.rng.random() < 0.8 else number())),
            lambda: executor.apply(plan, stream(), stream()),
            lambda: executor.apply(self.sensible()),
            lambda: executor.commit(choose([None, prefetcher, 3]), stream()),
            lambda: draft.add(plan),
            lambda: draft.cut(small()),
            lambda: executor.change(draft, [(tenant(), 0, stream())]),
            lambda: executor.zero_due([handle()] if self.rng.random() < 0.1 else []),
            lambda: executor.zero_free(),
            lambda: executor.pass_on(draft, pages(), bool(self.rng.randrange(2))),
            lambda: (draft.begin(), draft.join(small())),
            lambda: (draft.end(), draft.rests()),
            lambda: draft.withdraw(tenant(), pages()),
            lambda: draft.reopen(tenant()),
            lambda: (draft.free_pages(), draft.holders(pages()), draft.depth, draft.plans),
            lambda: _core.Draft(choose([None, 3])),
            lambda: (executor.undecided(), executor.failed_points(), executor.failed_points(number())),
            lambda: executor.retry_failed(choose([None, 1, number()])),
            lambda: executor.forget(tenant()),
            lambda: executor.drain(),
            lambda: _core.Executor(choose([None, 3])),
            lambda: _core.Arena(None, number(), number(), _core.Mode.aliased),
            lambda: _core.Arena(plain, number(), number(), any_of(_core.Mode)),
            lambda: _core.Prefetcher(None, []),
            lambda: _core.Prefetcher(plain, [(number(), number(), number())]),
            lambda: prefetcher.configure(pages(), [], number(), pages(), fresh=True, offsets=pages(), places=pages()),
            lambda: prefetcher.configure([], [], 0, pages(), home=[(small(), number(), number())]),
            lambda: (prefetcher.begin_pass(), prefetcher.ready(number()), prefetcher.end_pass()),
            lambda: (prefetcher.done(small()), prefetcher.stats(), prefetcher.take_timings(), prefetcher.loading()),
            lambda: prefetcher.begin_pass(number()),
            lambda: prefetcher.end_pass(),
            lambda: self.places.append(plain.reserve(number(), number())),
            lambda: plain.release(place(), number()),
            lambda: plain.retire(place(), number()),
            lambda: self.handles.append(plain.create_page(number())),
            lambda: plain.destroy_page(handle()),
            lambda: plain.map(place(), [handle() for _ in range(self.rng.randrange(4))], choose([PAGE, number()])),
            lambda: plain.unmap(place(), number()),
            lambda: plain.set_access(place(), number(), any_of(_core.Access)),
            lambda: plain.exchange(place(), place(), number()),
            lambda: plain.populate(place(), number()),
            lambda: plain.free_host(place(), number()),
            lambda: plain.unregister_host(place(), number()),
            lambda: plain.use_host(place(), number(), any_of(_core.HostUse)),
            lambda: plain.destroy_stream(handle()),
            lambda: plain.adopt_stream(number()),
            lambda: plain.forget_stream(handle()),
            lambda: plain.copy(handle(), 0, choose([0, number()]), number()),
            lambda: plain.fill(handle(), 0, number(), number()),
            lambda: plain.destroy_event(handle()),
            lambda: plain.record(handle(), handle()),
            lambda: plain.stream_wait(handle(), handle()),
            lambda: plain.query(handle()),
            lambda: plain.synchronize(handle(), number()),
            lambda: plain.elapsed(handle(), handle()),
            lambda: self.backend.arm(any_of(_core.Call), 1 << 40),
            lambda: (self.backend.calls(any_of(_core.Call)), plain.count(any_of(_core.Call))),
            lambda: _core.make_limit_backend(choose([None, plain]), streams=number()),
            lambda: _core.make_trace_backend(None),
            lambda: _core.make_fault_backend(None),
            lambda: _core.make_host_backend(number(), number(), choose([-1, 0, 257, None])),
            lambda: _core.make_sim_backend(**SIMULATED | {name: number() for name in DRAWN}),
            lambda: (sim.advance(number()), sim.advance_to(number())),
            lambda: (sim.compute(number(), number()),),
            lambda: (sim.hold(number(), number()), sim.stream_end(number())),
            lambda: (sim.finish(number()), sim.traffic()),
            lambda: sim.reserve(number(), number()),
            lambda: sim.create_page(number()),
            lambda: _core.fill_bytes(choose([0, 1, 4095, 1 << 47, 1 << 63, (1 << 64) - 1]), number(), number()),
            lambda: _core.buffer_address(number()),
            lambda: self.views.append(_core.BytesView(address(), number(), choose([None, arena.hold(arena.address(0), 1)]))),
            lambda: _core.BytesView(number(), number(), None, choose(["host", "cuda", "x", None]), number()),
            lambda: choose(self.views).__dlpack__(max_version=choose([None, (1, 0), (9, 9), (), 5, "ab", (number(),)])),
            lambda: choose(self.views).__dlpack__(stream=number(), copy=number(), dl_device=number()),
            lambda: _core.parse_trace(choose(["", "map ok 1 2", "reserve ok 1 2 3 4", "x" * 100, None])),
            lambda: _core.replay(None, plain),
        ]  # fmt: skip

    def sensible(self) -> Any:
        """A plan that often can be applied."""
        plan = _core.Plan(self.arena.epoch)
        owners = self.arena.owners()
        page = self.rng.randrange(PAGES)
        names = [_core.Owner.free, _core.Owner.kv, _core.Owner.params, _core.Owner.ring]
        plan.set_owner([page], owners[page], self.rng.choice(names), 1)
        return plan


def main(first_seed: int, seeds: int, calls: int = 120) -> None:
    """`calls` calls a seed. Prints each seed before it begins, so that a crash is known by the last one."""
    for seed in range(first_seed, first_seed + seeds):
        sys.stdout.write(f"{seed}\n")
        sys.stdout.flush()
        rng = random.Random(seed)
        world = World(rng)
        for _ in range(calls):
            call = rng.choice(world.calls())
            with suppress(*REFUSALS):
                call()
            world.executor.drain()
            world.arena.check()
        world.executor.stop()
        world.prefetcher.close()
        world.arena.close()
        for call in world.calls()[:40]:  # use after the end
            with suppress(*REFUSALS):
                call()
