"""Slices: how many pages they are, and sessions in which every pass compares every byte (test_planner.py has the plans)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from arena_worlds import PAGE, SHORT, forward, make_layers, make_spec, read_block, session_on, visible, write_block
from hypothesis import given, settings
from hypothesis import strategies as st

import remap
from remap import _core
from remap.errors import InvalidArgument
from remap.memory.attach import level_by_level
from remap.memory.plan import MAX_BUFFERS, Streaming, TenantPages, plan_streaming
from remap.memory.restream import restream
from remap.policy.slices import slices_alpha, slices_freed, tail_for


def pages_of(sizes: Sequence[int], preference: Sequence[int]) -> TenantPages:
    homes, first = [], 100
    for size in sizes:
        homes.append(tuple(range(first, first + size)))
        first += size
    regions = tuple(range(10, 10 + len(sizes)))
    return TenantPages(7, tuple(homes), regions, 99, (0,) * len(sizes), ring_preference=tuple(preference))


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 3), st.floats(0, 9))
def test_tail_for_is_the_smallest_that_is_enough(sizes: list[int], buffers: int, alpha: float) -> None:
    enough = [k for k in range(max(sizes) + 1) if slices_freed(k, sizes, buffers) >= alpha * max(sizes) - 1e-9]
    if enough:
        assert tail_for(sizes, alpha, buffers) == enough[0]
        return
    with pytest.raises(InvalidArgument) as refused:
        tail_for(sizes, alpha, buffers)
    best = max(slices_alpha(k, sizes, buffers) for k in range(max(sizes) + 1))
    assert refused.value.fields["maximum"] == pytest.approx(best)


@pytest.mark.parametrize("alpha", [-0.5, float("nan"), float("inf")])
def test_alpha_must_be_a_number(alpha: float) -> None:
    with pytest.raises(InvalidArgument):
        tail_for([4] * 4, alpha, 1)


@given(st.lists(st.integers(1, 6), min_size=3, max_size=7), st.data())
def test_in_giving_order_what_slices_give_stands_together(sizes: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    order = sorted(order, key=lambda layer: -sizes[layer])  # the ring's layers are the largest
    now = pages_of(sizes, order[:MAX_BUFFERS])
    giving = level_by_level(now.homes, order)
    assert sorted(giving) == sorted(page for home in now.homes for page in home)
    k = data.draw(st.integers(1, min(sizes[layer] for layer in order[:MAX_BUFFERS])))
    if sum(min(k, size) for size in sizes) < MAX_BUFFERS * k or sizes[order[MAX_BUFFERS - 1]] < max(sizes):
        return
    plan = plan_streaming(now, Streaming.of(sizes, order, MAX_BUFFERS, k))
    assert set(giving[: len(plan.gained)]) == set(plan.gained)


# -- sessions ------------------------------------------------------------------------------------------------------------

MODES = ("aliased", "strict")


class World:
    """One tenant over plain bytes; with eight layers a KV block is one page. `values` are what its live blocks hold."""

    def __init__(self, sizes: Sequence[int], mode: str, *, session: object = None, spare: int = 2) -> None:
        self.layers = make_layers(sizes)
        self.session = session or remap.Session((sum(sizes) + 4 + spare) * PAGE, page_bytes=PAGE, mode=mode)
        tokens = PAGE // (2 * len(sizes) * 4 * 32)
        spec = make_spec(len(sizes), tokens=tokens, max_blocks=sum(sizes) + 8)
        self.tenant = self.session.attach_bytes(self.layers, name="m", kv=spec)
        self.values: dict[int, int] = {}

    def reslice(self, k: int, buffers: int) -> dict[int, int]:
        return restream(self.session._changes, self.tenant._state, k, buffers, "slices")

    def change(self, k: int, buffers: int) -> None:
        moved = self.reslice(k, buffers)
        self.values = {moved.get(block, block): value for block, value in self.values.items()}
        self.check()

    def check(self) -> None:
        remap.advanced.check(self.session)
        live = set(self.tenant.kv.pool.live_ids())
        assert live == set(self.values)
        for block in self.tenant.kv.pool.open_ids():
            if block not in live:
                write_block(self.tenant, block, 0xDF)  # weights read from here by mistake show
        for block, value in self.values.items():
            assert read_block(self.tenant, block) == {value}

    def forward(self) -> None:
        forward(self.session, self.tenant, self.layers)

    def use_blocks(self, rng: random.Random) -> None:
        kv = self.tenant.kv
        for block in kv.allocate(rng.randint(0, kv.free_blocks)):
            self.values[block] = rng.randint(1, 200)
            write_block(self.tenant, block, self.values[block])
        gone = rng.sample(sorted(self.values), rng.randint(0, len(self.values)))
        kv.free(gone)
        for block in gone:
            del self.values[block]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "sizes", [[4] * 8, [3, 6, 1, 5, 6, 2, 4, 6], [4] * 6], ids=["equal", "different", "blocks across pages"]
)
@pytest.mark.parametrize("seed", range(3))
def test_bytes_are_right_in_every_pass_over_random_changes(mode: str, sizes: list[int], seed: int) -> None:
    rng = random.Random(f"{mode}{sizes}{seed}")
    world = World(sizes, mode)
    refused = moved = 0
    with world.session:
        for _ in range(40):
            k, buffers = rng.randint(0, max(sizes)), rng.randint(1, 2)
            before = world.session.snapshot()
            state = (world.tenant._state.pages, world.tenant.kv.pool.owned_slots())
            try:
                world.change(k, buffers)
            except (remap.OutOfBlocks, InvalidArgument):
                refused += 1
                assert (world.tenant._state.pages, world.tenant.kv.pool.owned_slots()) == state
                assert world.session.snapshot().pages == before.pages
            else:
                moved += 1
                assert world.tenant._state.pages.depth == k
                given = slices_freed(k, sizes, buffers)
                assert world.session.snapshot().tenants["m"].kv_bytes == (4 + given) * PAGE
            for _ in range(rng.choice([0, 0, 1, 2])):
                world.forward()
                world.use_blocks(rng)
                world.check()
            world.forward()
        world.tenant.kv.free(list(world.values))
        world.values.clear()
        remap.advanced.remap(world.session, "m", 0)  # from slices, too
        remap.advanced.settle(world.session)
        world.forward()
        assert world.tenant.streamed == ()
    assert moved > 10


def test_a_pass_copies_the_tails_only_and_changes_load_what_comes_home() -> None:
    world = World([4] * 8, "aliased")
    with world.session:
        world.change(2, 1)
        for _ in range(3):
            world.forward()
        before = world.session.snapshot().tenants["m"]
        world.forward()
        after = world.session.snapshot().tenants["m"]
        assert after.copied_bytes - before.copied_bytes == 8 * (2 * PAGE - SHORT)  # the last page is not full
        world.change(1, 1)
        remap.advanced.settle(world.session)
        world.tenant._state.prefetcher.drain()
        loaded = world.session.snapshot().tenants["m"]
        # One page of each layer, and the first tail into the ring.
        assert loaded.copied_bytes - after.copied_bytes == 8 * PAGE + PAGE - SHORT
        assert world.tenant._state.prefetcher.loading()
        world.forward()
        assert not world.tenant._state.prefetcher.loading()
        assert all(not world.tenant._state.prefetcher.ready(layer) for layer in range(8))
        world.change(0, 1)
        world.forward()
        assert all(world.tenant._state.prefetcher.ready(layer) for layer in range(8))


def test_growing_makes_no_call_before_the_blocks_are_usable() -> None:
    """Aliased mode: nothing is mapped or unmapped for the ring, whose region shows its pages from the start."""
    backend = _core.make_trace_backend(_core.make_host_backend(38 * PAGE, PAGE))
    world = World(
        [4] * 8,
        "aliased",
        session=session_on(backend, 38 * PAGE, page_bytes=PAGE),
    )
    with world.session:
        maps = lambda: sum(backend.count(getattr(_core.Call, name)) for name in ("map", "unmap", "exchange", "reserve"))  # noqa: E731
        heard = []
        world.tenant.kv.subscribe(lambda added, withdrawn: heard.append((len(added), maps())))
        for k in (1, 2, 3):
            remap.advanced.settle(world.session)
            heard.clear()
            before = maps()
            world.change(k, 2)
            assert heard == [(6, before)]
            world.forward()


def test_a_layer_that_was_written_is_pinned_first() -> None:
    world = World([4] * 8, "aliased")
    with world.session:
        world.tenant._state.source = replace(
            world.tenant._state.source, watch=lambda layers: {2: ["w"]} if 2 in layers else {}
        )
        world.change(2, 1)
        assert world.tenant.streamed == (0, 1, 3, 4, 5, 6, 7)
        assert world.tenant.pinned == (2,)
        world.forward()


def test_an_error_while_applying_leaves_everything_as_it_was() -> None:
    backend = _core.make_fault_backend(_core.make_host_backend(38 * PAGE, PAGE))
    session = session_on(backend, 38 * PAGE, page_bytes=PAGE, mode="strict")
    world = World([4] * 8, "strict", session=session)
    with world.session:
        world.change(3, 1)
        rng = random.Random(1)
        for block in world.tenant.kv.allocate(9):
            world.values[block] = rng.randint(1, 200)
            write_block(world.tenant, block, world.values[block])
        failed = 0
        for nth in range(1, 60):
            before = visible(session)
            backend.arm(_core.Call.map, nth)
            try:
                world.reslice(1 if nth % 2 else 2, 1)
            except remap.DriverError:
                failed += 1
                assert visible(session) == before
            backend.disarm()
            if visible(session) != before:
                break
            world.check()
            world.forward()
        assert failed > 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "llama-odd", "opt"])
def test_a_model_computes_the_same_bits(kind: str, mode: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import models

    rng = random.Random(f"{kind}{mode}")
    model = models.make(kind)
    ids = models.ids_for(2, 9)
    expected = models.logits_of(model, ids)
    tokens, scores = models.generate(model, ids)
    with models.Rig(model, mode=mode, page_bytes=16384, spare=1) as rig:
        homes = rig.tenant._state.pages.homes
        most = max(map(len, homes))
        for k, buffers in [
            (1, 1),
            (2, 1),
            (most, 1),
            (most, 2),
            (1, 2),
            (0, 1),
            *((rng.randint(0, most), 1) for _ in range(6)),
        ]:
            restream(rig.session._changes, rig.tenant._state, k, buffers, "slices")
            rig.check()
            for _ in range(2):
                assert torch.equal(models.logits_of(model, ids), expected), (k, buffers)
            rig.check()
        got, rows = models.generate(model, ids)
        assert torch.equal(got, tokens)
        assert torch.equal(rows, scores)
    assert torch.equal(models.logits_of(model, ids), expected)
