"""The block pool against dictionaries, under random sequences of every call, in both layouts."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from reference.kv_model import KVModel
from remap.errors import InvalidArgument, InvalidState, OutOfBlocks
from remap.kv.pool import BlockPool
from remap.kv.spec import KVGeometry, KVSpec


class PoolMachine(RuleBasedStateMachine):
    layout = "block_major"

    @initialize(
        layers=st.integers(1, 2),
        tokens=st.integers(1, 7),
        page_bytes=st.integers(1, 30),
        max_blocks=st.integers(1, 24),
        external=st.booleans(),
    )
    def start(self, layers: int, tokens: int, page_bytes: int, max_blocks: int, external: bool) -> None:
        spec = KVSpec(
            layers=layers,
            kv_heads=1,
            head_dim=1,
            block_tokens=tokens,
            dtype="int8",
            min_blocks=0,
            max_blocks=max_blocks,
            layout=self.layout,
        )
        self.pool = BlockPool(KVGeometry(spec, page_bytes))
        self.model = KVModel(spec, page_bytes)
        self.external = external
        self.mirror: set[int] = set()
        self.pool.subscribe(self.listen, external=external)

    def listen(self, added: list[int], withdrawn: list[int]) -> None:
        assert not self.mirror & set(added)
        assert self.mirror >= set(withdrawn)
        self.mirror.difference_update(withdrawn)
        self.mirror.update(added)

    def pick(self, data: st.DataObject, slots: set[int]) -> list[int]:
        """A subset in any order: often an interval, as donors give them, or several."""
        ordered = sorted(slots)
        if not ordered:
            return []
        if data.draw(st.booleans()):
            first = data.draw(st.integers(0, len(ordered) - 1))
            return ordered[first : first + data.draw(st.integers(1, len(ordered)))]
        return data.draw(st.lists(st.sampled_from(ordered), unique=True))

    @invariant()
    def whatever_changes_is_counted(self) -> None:
        """Callers keep answers as long as `changes` stays."""
        if not hasattr(self, "pool"):
            return
        now = (self.pool.live_ids(), self.pool.open_ids(), self.pool.owned_slots(), self.pool.usable_blocks)
        before, count = getattr(self, "seen", (now, -1))
        assert now == before or self.pool.changes > count
        self.seen = (now, self.pool.changes)

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        slots = self.pick(data, set(range(self.pool.geometry.region_pages)) - self.model.owned)
        added = self.model.add_pages(slots)
        assert list(self.pool.add_pages(slots)) == added
        self.hold(added)

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        slots = self.pick(data, self.model.owned - self.model.withdrawn)
        assert list(self.pool.drain(slots)) == self.model.drain(slots)

    @rule(data=st.data())
    def cancel_drain(self, data: st.DataObject) -> None:
        slots = self.pick(data, self.model.withdrawn)
        added = self.model.cancel_drain(slots)
        assert list(self.pool.cancel_drain(slots)) == added
        self.hold(added)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        slots = self.pick(data, self.model.withdrawn)
        live = self.model.pending(slots)
        assert list(self.pool.pending(slots)) == live
        if live:
            with pytest.raises(InvalidState) as caught:
                self.pool.remove_pages(slots)
            assert caught.value.live == len(live)
        else:
            self.pool.remove_pages(slots)
            self.model.remove_pages(slots)

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        if self.external:
            with pytest.raises(InvalidState):
                self.pool.allocate(count)
        elif count > len(self.model.free()):
            with pytest.raises(OutOfBlocks) as caught:
                self.pool.allocate(count)
            assert (caught.value.requested, caught.value.free) == (count, len(self.model.free()))
            assert caught.value.usable == len(self.model.usable())
        else:
            assert self.pool.allocate(count) == self.model.allocate(count)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        allowed = self.model.live & set(self.model.closed()) if self.external else self.model.live
        ids = self.pick(data, allowed)
        (self.pool.returned if self.external else self.pool.free)(ids)
        self.model.live -= set(ids)

    @rule(block=st.integers(-2, 30))
    def free_what_is_not_live(self, block: int) -> None:
        if block not in self.model.live:
            with pytest.raises(InvalidArgument):
                (self.pool.returned if self.external else self.pool.free)([*sorted(self.model.live), block])

    @rule(data=st.data(), commit=st.booleans())
    def compact(self, data: st.DataObject, commit: bool) -> None:
        slots = self.pick(data, self.model.withdrawn)
        moves = self.pool.plan_moves(slots)
        assert moves == self.model.moves(slots)
        assert not {old for old, _ in moves} & {new for _, new in moves}
        if commit and not self.external:
            self.pool.commit_moves(moves)
            self.model.live -= {old for old, _ in moves}
            self.model.live |= {new for _, new in moves}

    def hold(self, added: list[int]) -> None:
        if self.external:
            self.model.live |= set(added)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, model = self.pool, self.model
        pool.check()
        assert pool.usable_blocks == len(model.usable())
        assert pool.free_blocks == len(model.free())
        assert pool.live_ids() == tuple(sorted(model.live))
        assert pool.live_blocks == len(model.live)
        assert pool.withdrawn_blocks == len(model.closed())
        assert set(pool.live_ids()) - set(pool.open_ids()) == model.live & set(model.closed())
        assert list(pool.open_ids()) == model.open()
        assert pool.owned_slots() == tuple(sorted(model.owned))
        assert self.mirror == set(model.open())


class LayerMajorMachine(PoolMachine):
    layout = "layer_major"


TestBlockMajor = PoolMachine.TestCase
TestLayerMajor = LayerMajorMachine.TestCase
TestBlockMajor.settings = TestLayerMajor.settings = settings(
    max_examples=examples(120), stateful_step_count=30, deadline=None
)
