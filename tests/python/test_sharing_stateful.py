"""Three tenants on one arena do whatever they may, in any order: nobody's byte is lost, and every page is where the books say.

An aliased and a strict session do the same; what can be seen of both must be equal. Free blocks are poisoned all the time, so
that a layer which still shows them is found by the next pass.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from arena_worlds import PAGE, visible
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sharing_worlds import Engine, Shared, set_times, times_of

import remap
from reference.sharing_model import SharingModel, TenantBooks
from remap.errors import InvalidState, OutOfBlocks

MODES = ("aliased", "strict")
SHAPES = {"a": (6, 2), "b": (7, 3), "c": (5, 1)}  # layers, pages of each
NAMES = tuple(SHAPES)
POISON = 0xDF
EXAMPLES = int(os.environ.get("REMAP_SHARING_EXAMPLES", "6"))

name_st = st.sampled_from(NAMES)
share_st = st.floats(0, 1)


def ranges_of(engine: Engine, block: int) -> list[tuple[int, int]]:
    kv = engine.tenant.kv
    return [(kv.address + offset, nbytes) for offset, nbytes in kv.geometry.byte_ranges_of_block(block)]


class SharingMachine(RuleBasedStateMachine):
    config = remap.advanced.Knobs(policy="lru", min_idle=0.0, dwell=1, reload_s=1e9, hysteresis_blocks=1)
    layout = "block_major"

    @initialize(fast=st.booleans())
    def start(self, fast: bool) -> None:
        self.fast = fast
        self.tag = 10
        self.worlds = {mode: Shared(SHAPES, spare=5, mode=mode, config=self.config) for mode in MODES}
        self.total = self.worlds["strict"].session.snapshot().pages.total
        self.models = {mode: SharingModel(self.total) for mode in MODES}
        self.addresses: dict[tuple[str, str], list[int]] = {}
        for name in NAMES:
            self.know(name)

    def know(self, name: str) -> None:
        """After attaching: injected times, so that both sessions decide alike, and what must not change from now on."""
        for mode, world in self.worlds.items():
            engine = world.engines[name]
            layers = engine.tenant.layers
            set_times(engine, times_of(layers, 1.0, 0.1 if self.fast else 0.9), copy_s=0.1)
            self.models[mode].tenants[name] = TenantBooks(
                engine.tenant.number, engine.tenant._state.pages.homes, engine.tenant.kv.spec.min_blocks
            )
            self.addresses[mode, name] = self.addresses_of(engine)

    @staticmethod
    def addresses_of(engine: Engine) -> list[int]:
        kv = engine.tenant.kv
        return [
            *(remap.advanced.layer_address(engine.session, engine.name, i) for i in range(engine.tenant.layers)),
            kv.address,
        ]

    def both(self, act: Callable[[Shared], Any]) -> Any:
        """In both sessions; the same comes of it. A call that raises has changed nothing."""
        seen = {}
        for mode, world in self.worlds.items():
            before = visible(world.session)
            try:
                seen[mode] = act(world)
            except OutOfBlocks as error:
                seen[mode] = ("refused", dict(error.fields.get("preempt") or {}))
                unchanged = visible(world.session) == before
                if not unchanged:
                    raise
            assert not world.session._changes.moved
        assert seen["aliased"] == seen["strict"]
        return seen["strict"]

    def attached(self, name: str) -> bool:
        return name in self.worlds["strict"].engines

    def tenant(self, name: str) -> Any:
        return self.worlds["strict"].engines[name].tenant

    # -- the controller ----------------------------------------------------------------------------------------------

    @rule(demand=st.dictionaries(name_st, st.integers(0, 40), max_size=3))
    def step(self, demand: dict[str, int]) -> None:
        wanted = {name: n for name, n in demand.items() if self.attached(name) and self.tenant(name).active}
        report = self.both(lambda world: world.step(**wanted))
        assert isinstance(report, remap.StepReport), report
        for name, unmet in report.unmet_blocks.items():
            assert unmet <= wanted[name]

    @rule(name=name_st, times=st.integers(3, 12))
    def quiet(self, name: str, times: int) -> None:
        """Nobody wants anything for a while: layers come home."""
        for _ in range(times):
            report = self.both(lambda world: world.step())
            assert isinstance(report, remap.StepReport), report
            self.all_is_right()

    # -- by hand -------------------------------------------------------------------------------------------------------

    @rule(name=name_st, other=name_st, share=share_st, buffers=st.sampled_from([1, 2]), give=st.booleans())
    def lend(self, name: str, other: str, share: float, buffers: int, give: bool) -> None:
        if not (self.attached(name) and self.attached(other)) or name == other:
            return
        tenant = self.tenant(name)
        buffers = tenant.buffers or buffers
        layers = round(share * (tenant.layers - buffers))
        report = self.both(
            lambda world: world.tell(
                remap.advanced.lend(world.session, name, layers, buffers, to=other if give else None)
            )
        )
        if isinstance(report, remap.StepReport):
            assert self.tenant(name).remapped == layers

    @rule(name=name_st, share=share_st, buffers=st.sampled_from([1, 2]), kind=st.sampled_from(["uniform", "nested"]))
    def remap(self, name: str, share: float, buffers: int, kind: str) -> None:
        if not self.attached(name):
            return
        layers = round(share * (self.tenant(name).layers - buffers))
        report = self.both(lambda world: world.tell(remap.advanced.remap(world.session, name, layers, buffers, kind)))
        if isinstance(report, remap.StepReport):
            assert self.tenant(name).remapped == layers

    # -- turns ---------------------------------------------------------------------------------------------------------

    @rule(name=name_st, alone=st.booleans(), partial=st.booleans())
    def activate(self, name: str, alone: bool, partial: bool) -> None:
        if not self.attached(name):
            return
        if alone:
            for model in self.models.values():
                for other in model.tenants:
                    model.tenants[other].active = model.tenants[other].active and other == name
        report = self.both(lambda world: world.tell(world.session.activate(name, alone=alone, partial=partial)))
        if not report.activated:
            assert not partial and report.preempt
            self.all_is_right()
            self.freed(report.preempt)
            again = self.both(lambda world: world.tell(world.session.activate(name)))
            assert again.activated, f"{report.preempt} were freed, and still {again.preempt} are in the way"
        for model in self.models.values():
            model.tenants[name].active = True
        if not partial:
            assert self.tenant(name).lent_pages == 0

    def freed(self, preempt: dict[str, tuple[int, ...]]) -> None:
        for mode, world in self.worlds.items():
            for other, blocks in preempt.items():
                world.engines[other].free(blocks)
                for block in blocks:
                    del self.models[mode].tenants[other].blocks[block]

    @rule(name=name_st)
    def deactivate(self, name: str) -> None:
        if not self.attached(name):
            return
        self.both(lambda world: world.session.deactivate(name))
        for mode, world in self.worlds.items():
            self.models[mode].tenants[name].active = False
            with pytest.raises(InvalidState, match="inactive"):
                world.engines[name].tenant.forward().__enter__()
            with pytest.raises(InvalidState, match="inactive"):
                world.session.step({name: remap.Demand(1)})

    @rule(name=name_st, other=name_st, share=share_st, every=st.integers(1, 4))
    def crowd(self, name: str, other: str, share: float, every: int) -> None:
        """Where returning is hardest: an idle tenant has lent, and the holder's live blocks are spread over all it has."""
        if name != other and self.attached(name) and self.attached(other):
            self.deactivate(name=name)
            self.lend(name=name, other=other, share=share, buffers=1, give=True)
            self.all_is_right()  # before anything is written
            self.allocate(name=other, share=1.0)
            self.free(name=other, every=every, offset=0)

    # -- engines -------------------------------------------------------------------------------------------------------

    @rule(name=name_st, share=share_st)
    def allocate(self, name: str, share: float) -> None:
        if not self.attached(name):
            return
        count = round(share * self.tenant(name).kv.free_blocks)
        for world in self.worlds.values():
            world.engines[name].allocate(count)
        assert self.worlds["aliased"].engines[name].held == self.worlds["strict"].engines[name].held

    @rule(name=name_st, every=st.integers(1, 4), offset=st.integers(0, 3))
    def free(self, name: str, every: int, offset: int) -> None:
        if not self.attached(name):
            return
        for world in self.worlds.values():
            engine = world.engines[name]
            engine.free(sorted(engine.held)[offset % every :: every])

    @rule()
    def passes(self) -> None:
        for world in self.worlds.values():
            for engine in world.engines.values():
                if engine.tenant.active:
                    engine.serve()

    @rule()
    def settle(self) -> None:
        for world in self.worlds.values():
            remap.advanced.settle(world.session)

    # -- coming and going ----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.worlds["strict"].engines) > 1)
    @rule(name=name_st)
    def detach(self, name: str) -> None:
        if not self.attached(name):
            return
        for mode, world in self.worlds.items():
            world.session.detach(name)
            del world.engines[name], self.models[mode].tenants[name], self.addresses[mode, name]

    @rule(name=name_st, active=st.booleans())
    def attach(self, name: str, active: bool) -> None:
        if self.attached(name):
            return
        layers, pages = SHAPES[name]
        self.tag += 1
        fits = set()
        for world in self.worlds.values():
            before = visible(world.session)
            try:
                world.engines[name] = Engine(world.session, name, layers, pages, self.tag, active=active)
                fits.add(True)
            except remap.OutOfMemory:
                fits.add(False)
                after = visible(world.session)
                after["epoch"] = before["epoch"]
                assert after == before
        assert len(fits) == 1
        if fits == {True}:
            self.know(name)
            for model in self.models.values():
                model.tenants[name].active = active

    # -- what must hold after every step -------------------------------------------------------------------------------

    @invariant()
    def all_is_right(self) -> None:
        if not hasattr(self, "worlds"):
            return
        owners = {}
        for mode, world in self.worlds.items():
            arena = world.session._arena
            owners[mode] = [owner.name for owner in arena.owners()], list(arena.tenants())
            remap.advanced.check(world.session)
            self.books_agree(mode, *owners[mode])
            self.what_changed_hands_is_zero(mode, *owners[mode])
            self.bytes_are_right(mode)
        assert owners["aliased"] == owners["strict"]

    def books_agree(self, mode: str, owners: list[str], tenant_of: list[int]) -> None:
        world, model = self.worlds[mode], self.models[mode]
        snapshot = world.session.snapshot()
        counts = {kind: owners.count(kind) for kind in ("free", "params", "kv", "ring", "quarantine")}
        assert vars(snapshot.pages) == {**counts, "total": self.total}
        assert sum(counts.values()) == self.total and not counts["quarantine"]
        assert sum(seen.lent_pages for seen in snapshot.tenants.values()) >= sum(
            seen.borrowed_pages for seen in snapshot.tenants.values()
        )
        for name, seen in snapshot.tenants.items():
            books = model.books(name, owners, tenant_of)
            assert world.engines[name].tenant._state.pages.lent == books.lent
            assert (dict(seen.lent_to), seen.borrowed_pages) == (dict(books.lent_to), books.borrowed)
            assert (seen.pages.kv, seen.pages.ring, seen.pages.params) == (books.kv, books.ring, books.params)
            assert model.violations(name, owners, tenant_of, seen.streamed, seen.buffers) == []
            assert seen.usable_blocks >= model.tenants[name].min_blocks, f"{name} has lost blocks that were promised"
            assert seen.active == model.tenants[name].active
            assert self.addresses_of(world.engines[name]) == self.addresses[mode, name]
            assert not world.engines[name].tenant._state.reclaimed

    def what_changed_hands_is_zero(self, mode: str, owners: list[str], tenant_of: list[int]) -> None:
        world = self.worlds[mode]
        by_number = {engine.tenant.number: engine for engine in world.engines.values()}
        for page, number in self.models[mode].changed_hands(owners, tenant_of).items():
            engine = by_number[number]
            attachment, kv = engine.tenant._state, engine.tenant.kv
            slot = kv.geometry.giving_slot(attachment.index_of[page])
            first = kv.address + slot * PAGE
            data = bytearray(ctypes.string_at(first, PAGE))
            for block in engine.held:  # live blocks may have moved here already
                for at, nbytes in ranges_of(engine, block):
                    low, high = max(at, first), min(at + nbytes, first + PAGE)
                    if low < high:
                        data[low - first : high - first] = bytes(high - low)
            assert not any(data), f"{engine.name} can read what page {page} was before"

    def bytes_are_right(self, mode: str) -> None:
        for name, engine in self.worlds[mode].engines.items():
            self.models[mode].tenants[name].blocks = dict(engine.held)
            pool = engine.tenant.kv.pool
            assert set(engine.held) == set(pool.live_ids()), f"{name}: blocks were lost, or moved without a word"
            for block, value in engine.held.items():
                for at, nbytes in ranges_of(engine, block):
                    assert ctypes.string_at(at, nbytes) == bytes([value]) * nbytes, f"{mode}: block {block} of {name}"
            for block in set(pool.open_ids()).difference(engine.held):
                for at, nbytes in ranges_of(engine, block):
                    ctypes.memset(at, POISON, nbytes)

    def teardown(self) -> None:
        for world in getattr(self, "worlds", {}).values():
            for engine in world.engines.values():
                if engine.tenant.active:
                    engine.serve()
            world.session.close()
            usage = world.backend.usage()
            assert usage["page_bytes"] == usage["reserved_bytes"] == usage["mapped_bytes"] == 0


def walk(machine: SharingMachine, rng: random.Random, turns: int) -> None:
    """At random, with more of what fills the arena than hypothesis would choose."""
    machine.start(fast=rng.random() < 0.5)
    for turn in range(turns):
        name, other = rng.sample(NAMES, 2)
        if not machine.attached(name):
            machine.attach(name=name, active=rng.random() < 0.5)
            machine.all_is_right()
        act(machine, rng, name, other)
        machine.all_is_right()
        if turn % 10 == 9:
            machine.passes()


def act(machine: SharingMachine, rng: random.Random, name: str, other: str) -> None:
    flip, share, buffers = rng.random() < 0.5, rng.random(), rng.choice([1, 2])
    acts: list[tuple[int, Callable[[], Any]]] = [
        (4, lambda: machine.step(demand={each: rng.choice([0, 3, 10, 25, 60]) for each in NAMES})),
        (1, lambda: machine.quiet(name=name, times=rng.randint(3, 12))),
        (3, lambda: machine.lend(name=name, other=other, share=share, buffers=buffers, give=flip)),
        (2, lambda: machine.remap(name=name, share=share, buffers=buffers, kind=rng.choice(["uniform", "nested"]))),
        (3, lambda: machine.activate(name=name, alone=rng.random() < 0.3, partial=flip)),
        (2, lambda: machine.deactivate(name=name)),
        (2, lambda: machine.crowd(name=name, other=other, share=share, every=rng.randint(1, 4))),
        (3, lambda: machine.allocate(name=name, share=rng.choice([0.3, 0.8, 1.0]))),
        (3, lambda: machine.free(name=name, every=rng.choice([1, 2, 2, 3]), offset=rng.randint(0, 2))),
        (1, machine.passes),
        (1, lambda: machine.detach(name=name) if len(machine.worlds["strict"].engines) > 1 else None),
    ]
    rng.choices([each for _, each in acts], [weight for weight, _ in acts])[0]()


class UniformMachine(SharingMachine):
    """As in the paper: active tenants stream evenly spread layers, the last used donor gives first; the KV region is small."""

    config = remap.advanced.Knobs(
        policy="mru", selection="uniform", min_idle=0.0, dwell=2, reserve_blocks=0, hysteresis_blocks=0
    )


SharingMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=25, deadline=None)
UniformMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=25, deadline=None)
TestSharing = SharingMachine.TestCase
TestSharingUniformly = UniformMachine.TestCase


@pytest.mark.parametrize("kind", [SharingMachine, UniformMachine])
@pytest.mark.parametrize("seed", range(int(os.environ.get("REMAP_SHARING_SEEDS", "3"))))
def test_a_long_walk(kind: type[SharingMachine], seed: int) -> None:
    machine = kind()
    try:
        walk(machine, random.Random(f"{kind.__name__}{seed}"), 60)
    finally:
        machine.teardown()
