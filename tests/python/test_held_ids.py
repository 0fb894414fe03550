"""Ids between a tenant's pool and an engine's own allocator: against the pool itself, with an engine that does as it likes."""

from __future__ import annotations

from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pools import OwnPool

from remap.adapters.held_ids import HeldIds
from remap.kv.pool import KVGeometry, KVSpec

PAGES = 6


def test_what_is_withdrawn_around_a_hole_is_told_without_the_hole() -> None:
    """Layers first: blocks 2 and 3 are closed already, in the keys' page; then all other pages go at once."""
    shape = {"layers": 1, "kv_heads": 1, "head_dim": 4, "block_tokens": 4, "dtype": "float32", "layout": "layer_major"}
    pool = OwnPool(KVGeometry(KVSpec(**shape, min_blocks=0, max_blocks=6), 128))  # two blocks a page
    pool.add_pages(range(6))
    assert list(pool.drain([1])) == [2, 3]
    assert list(pool.drain([0, 2, 3, 4, 5])) == [0, 1, 4, 5]


class AnEngineWithAFreeList(RuleBasedStateMachine):
    """An allocator with a free list over a real pool whose pages come and go. One block a page; block 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        spec = KVSpec(layers=1, kv_heads=1, head_dim=4, block_tokens=4, dtype="float32", min_blocks=0, max_blocks=PAGES)
        self.pool = OwnPool(KVGeometry(spec, spec.block_bytes))
        self.held = HeldIds(reserved=[0], limit=PAGES - 1)
        self.free: list[int] = []
        self.used: list[int] = []
        self.given = {0}
        self.pool.add_pages([0])
        self.pool.subscribe(self.listen, external=True)

    def listen(self, added, withdrawn) -> None:
        self.free += self.held.changed(added, withdrawn)
        declined = self.held.declined()
        if declined:
            self.pool.returned(declined)
        self.sweep()

    def sweep(self) -> None:
        gone = self.held.leave(self.free)
        self.free = [block for block in self.free if block not in gone]
        if gone:
            self.pool.returned(gone)

    @rule(page=st.integers(1, PAGES - 1))
    def page_comes_or_goes(self, page: int) -> None:
        if page not in self.given:
            self.pool.add_pages([page])
            self.given.add(page)
        elif page in self.pool.open_ids():
            self.pool.drain([page])
        elif not self.pool.pending([page]):
            self.pool.remove_pages([page])
            self.given.discard(page)

    @rule(page=st.integers(1, PAGES - 1))
    def withdrawal_is_undone(self, page: int) -> None:
        if page in self.given and page not in self.pool.open_ids():
            self.pool.cancel_drain([page])

    @rule(count=st.integers(1, 3))
    def use(self, count: int) -> None:
        self.used += self.free[:count]
        self.free = self.free[count:]

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.used:
            self.free.append(self.used.pop(data.draw(st.integers(0, len(self.used) - 1))))

    @rule()
    def look(self) -> None:
        self.sweep()

    @rule()
    def clear(self) -> None:
        self.used = []
        self.free = self.held.restart(self.pool.open_ids(), self.pool.returned)

    @invariant()
    def every_id_is_in_one_place(self) -> None:
        ours = [*self.free, *self.used]
        assert len(set(ours)) == len(ours) == self.held.held
        open_ids = {block for block in self.pool.open_ids() if 0 < block < PAGES - 1}
        assert set(ours) == open_ids | self.held.leaving  # nothing usable is lost, nothing else is used
        assert not open_ids & self.held.leaving
        self.pool.check()


TestAnEngineWithAFreeList = AnEngineWithAFreeList.TestCase
TestAnEngineWithAFreeList.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
