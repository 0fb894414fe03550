"""Sessions against a dictionary model: two tenants, random changes, passes and blocks; in both modes at once.

An aliased and a strict session do the same; what can be seen of them must be equal at every step and equal to the model.
Usable blocks that are free are poisoned, so that a layer which still shows them, or a block whose bytes were lost, is
found by the next read.
"""

from __future__ import annotations

import os
from typing import Any

from arena_worlds import (
    PAGE,
    forward,
    make_backend,
    make_layers,
    make_spec,
    read_block,
    session_on,
    set_times,
    times_of,
    write_block,
)
from effort import some
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import remap
from reference.arena_model import ArenaModel, TenantModel
from remap.errors import InvalidArgument, OutOfBlocks
from remap.internals import internals
from remap.kv.spec import KVGeometry

POISON = 0xDF
TOTAL = 40
NAMES = ("a", "b")
SHAPES = {"a": (6, 2), "b": (4, 1)}  # layers, pages of each
MODES = ("aliased", "strict")
EXAMPLES = int(os.environ.get("REMAP_ARENA_EXAMPLES") or some(12, 30))


def seen_of(report: Any) -> dict[str, Any]:
    return {
        "moved": {name: dict(moved) for name, moved in report.moved.items()},
        "added": dict(report.added_blocks),
        "remapped": dict(report.remapped),
    }


class ArenaMachine(RuleBasedStateMachine):
    @initialize(second=st.booleans(), layout=st.sampled_from(("block_major", "layer_major")))
    def start(self, second: bool, layout: str) -> None:
        self.layout = layout
        self.backends = {mode: make_backend(TOTAL * PAGE) for mode in MODES}
        # Each tenant for itself: what goes from one to another is test_lending.py's and the fuzzer's.
        config = remap.advanced.Knobs(lends=False, selection="nested")
        self.sessions = {
            mode: session_on(backend, TOTAL * PAGE, mode=mode, config=config) for mode, backend in self.backends.items()
        }
        self.model = ArenaModel(TOTAL)
        self.tenants: dict[str, dict[str, Any]] = {}
        self.tag = 0
        self.addresses: dict[tuple[str, str], list[int]] = {}
        self.attach("a")
        if second:
            self.attach("b")

    def fits(self, name: str) -> bool:
        count, pages = SHAPES[name]
        first = KVGeometry(make_spec(count, max_blocks=400, layout=self.layout), PAGE).pages_for_blocks(4)
        return self.model.free_pages >= count * pages + first

    def attach(self, name: str) -> None:
        count, pages = SHAPES[name]
        self.tag += 1
        layers = make_layers([pages] * count, self.tag)
        for mode, session in self.sessions.items():
            tenant = session.attach_bytes(layers, name=name, kv=make_spec(count, max_blocks=400, layout=self.layout))
            self.tenants.setdefault(name, {})[mode] = tenant
            self.addresses[name, mode] = self.addresses_of(mode, name)
            set_times(tenant, times_of(count, 1.0, 0.4))  # both decide alike
            for block in self.free_of(tenant):
                # Promise 6: what another tenant left there is gone. (Its first reader sees zeroes.)
                assert read_block(tenant, block) == {0}
        base = self.sessions["strict"].snapshot().tenants[name].pages.kv
        self.model.tenants[name] = TenantModel(pages, layers, base)
        self.poison()

    def addresses_of(self, mode: str, name: str) -> list[int]:
        tenant, session = self.tenants[name][mode], self.sessions[mode]
        return [
            *(remap.advanced.layer_address(session, name, i) for i in range(tenant.layers)),
            internals(tenant).kv.address,
        ]

    def free_of(self, tenant: Any) -> list[int]:
        ids = tenant.kv.allocate(tenant.kv.free_blocks)
        tenant.kv.free(ids)
        return list(ids)

    def poison(self) -> None:
        for by_mode in self.tenants.values():
            for tenant in by_mode.values():
                for block in self.free_of(tenant):
                    write_block(tenant, block, POISON)

    def both(self, call: Any) -> Any:
        """The same in both modes: the same result or the same kind of error."""
        results = []
        for mode in MODES:
            try:
                results.append((call(mode), None))
            except remap.Error as error:
                results.append((None, error))
        (one, first), (other, second) = results
        assert type(first) is type(second), (first, second)
        if first is not None:
            assert first.fields == second.fields
            raise first
        assert one == other
        return one

    # -- rules -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.tenants) < len(NAMES))
    @rule()
    def attach_the_other(self) -> None:
        for name in NAMES:
            if name not in self.tenants and self.fits(name):
                self.attach(name)

    @precondition(lambda self: "b" in self.tenants)
    @rule()
    def detach_second(self) -> None:
        for session in self.sessions.values():
            session.detach("b")
        del self.tenants["b"], self.model.tenants["b"]

    @rule(
        name=st.sampled_from(NAMES),
        layers=st.integers(0, 6),
        buffers=st.integers(1, 2),
        selection=st.sampled_from(("uniform", "nested")),
    )
    def remap(self, name: str, layers: int, buffers: int, selection: str) -> None:
        if name not in self.tenants:
            return
        model = self.model.tenants[name]
        try:
            report = self.both(
                lambda mode: seen_of(remap.advanced.remap(self.sessions[mode], name, layers, buffers, selection))
            )
        except InvalidArgument:
            assert layers and layers + buffers > len(model.layers)
            return
        except OutOfBlocks:
            assert model.blocks
            return
        model.remap(layers, buffers, report["moved"].get(name, {}))
        self.poison()

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 12))
    def allocate(self, name: str, count: int) -> None:
        if name not in self.tenants:
            return
        tenants = self.tenants[name]
        try:
            ids = self.both(lambda mode: tenants[mode].kv.allocate(count))
        except OutOfBlocks:
            return
        for block in ids:
            value = 1 + (block * 7 + self.tag * 13 + count) % 200
            self.model.tenants[name].blocks[block] = value
            for tenant in tenants.values():
                write_block(tenant, block, value)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def free(self, name: str, data: st.DataObject) -> None:
        if name not in self.tenants or not self.model.tenants[name].blocks:
            return
        blocks = self.model.tenants[name].blocks
        ids = data.draw(st.lists(st.sampled_from(sorted(blocks)), unique=True, min_size=1))
        for block in ids:
            del blocks[block]
        for tenant in self.tenants[name].values():
            tenant.kv.free(ids)
            for block in ids:
                write_block(tenant, block, POISON)

    @rule(name=st.sampled_from(NAMES), passes=st.integers(1, 2))
    def forward(self, name: str, passes: int) -> None:
        if name not in self.tenants:
            return
        for _ in range(passes):
            for mode, tenant in self.tenants[name].items():
                forward(self.sessions[mode], tenant, self.model.tenants[name].layers)

    @rule(name=st.sampled_from(NAMES), blocks=st.integers(0, 60))
    def step(self, name: str, blocks: int) -> None:
        """The controller's decision: how much of it are layers is seen, everything else follows."""
        if name not in self.tenants:
            return
        report = self.both(lambda mode: seen_of(self.sessions[mode].step({name: remap.Demand(blocks=blocks)})))
        model, seen = self.model.tenants[name], self.sessions["strict"].snapshot().tenants[name]
        model.remap(seen.remapped, seen.buffers, report["moved"].get(name, {}))
        model.base_kv_pages = seen.pages.kv - seen.remapped * model.layer_pages
        self.poison()

    @rule()
    def settle(self) -> None:
        for session in self.sessions.values():
            remap.advanced.settle(session)

    # -- what must hold after every step -----------------------------------------------------------------------------

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "sessions"):
            return
        expected = self.model.pages()
        seen = {}
        for mode, session in self.sessions.items():
            remap.advanced.check(session)
            snapshot = session.snapshot()
            assert vars(snapshot.pages) == expected, mode
            seen[mode] = {
                name: (t.remapped, t.buffers, t.streamed, t.pages, t.usable_blocks, t.free_blocks, t.live_blocks)
                for name, t in snapshot.tenants.items()
            }
            assert self.backends[mode].usage()["page_bytes"] == TOTAL * PAGE
        assert seen["aliased"] == seen["strict"]
        assert self.sessions["aliased"]._arena.owners() == self.sessions["strict"]._arena.owners()

    @invariant()
    def blocks_and_addresses_are_right(self) -> None:
        if not hasattr(self, "sessions"):
            return
        for name, by_mode in self.tenants.items():
            model = self.model.tenants[name]
            for mode, tenant in by_mode.items():
                assert internals(tenant).kv.pool.live_ids() == tuple(sorted(model.blocks))
                for block, value in model.blocks.items():
                    assert read_block(tenant, block) == {value}, f"{mode}: block {block} of {name}"
                assert self.addresses_of(mode, name) == self.addresses[name, mode]

    def teardown(self) -> None:
        for mode, session in getattr(self, "sessions", {}).items():
            session.close()
            self.tenants.clear()
            usage = self.backends[mode].usage()
            assert usage["page_bytes"] == usage["reserved_bytes"] == usage["mapped_bytes"] == 0


ArenaMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=20, deadline=None)
TestArena = ArenaMachine.TestCase
