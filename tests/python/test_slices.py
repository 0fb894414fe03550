"""Slices: plans against the obvious, carried out on dictionaries; then sessions in which every pass compares every byte."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remap
from remap.errors import InvalidArgument
from remap.memory.plan import Plan, Point, SetOwner, TenantPages, plan_free_pages
from remap.memory.slice_plan import alpha_of, copies_of, giving_order, plan_layers, plan_slices, tail_for

TENANT, RING = 7, 99


def pages_of(sizes: Sequence[int], preference: tuple[int, ...] = (0, 1)) -> TenantPages:
    homes, first = [], 100
    for size in sizes:
        homes.append(tuple(range(first, first + size)))
        first += size
    return TenantPages(
        TENANT, tuple(homes), tuple(range(10, 10 + len(sizes))), RING, ring_preference=preference[: len(sizes)]
    )


class Model:
    """Owners, what regions show, and which home bytes are loaded, from the words of the docstrings alone."""

    def __init__(self, now: TenantPages) -> None:
        self.pages = now
        self.owner = {page: "params" for home in now.homes for page in home}
        self.shown = {region: list(home) for region, home in zip(now.layer_regions, now.homes)}
        self.ring: dict[int, int] = {}
        self.loaded = dict.fromkeys(self.owner, True)

    def carry_out(self, plan: Plan) -> None:
        changed: set[int] = set()
        size = self.pages.buffer_pages
        in_use = {
            b * size + size - len(buffer) + at: page
            for b, buffer in enumerate(self.pages.ring)
            for at, page in enumerate(buffer)
        }
        for step in plan.steps:
            if isinstance(step, SetOwner):
                assert step.tenant == TENANT and step.pages and step.from_owner != step.to_owner
                for page in step.pages:
                    assert page not in changed, "a page changes hands twice"
                    changed.add(page)
                    assert self.owner[page] == step.from_owner
                    self.owner[page] = step.to_owner
                    self.loaded[page] = False  # whoever has it writes there, or it holds what somebody wrote
            elif step.layer is None:
                assert step.region == RING and not step.deferred
                for index, page in enumerate(step.pages):
                    assert in_use.get(step.first_slot + index) != page, "shown already"
                    self.ring[step.first_slot + index] = page
            else:
                region = self.pages.layer_regions[step.layer]
                assert (step.region, step.first_slot, step.deferred) == (region, 0, True)
                assert self.shown[region] != list(step.pages), "re-pointed to what it shows"
                assert all(self.owner[page] not in ("kv", "free") for page in step.pages)
                self.shown[region] = list(step.pages)
        for layer, first, count in plan.reload_parts:
            for page in self.pages.homes[layer][first : first + count]:
                assert not self.loaded[page], "reloaded though it had not been away"
                self.loaded[page] = True
        self.pages = replace(
            self.pages, streamed=plan.streamed, ring=plan.ring, tail_pages=plan.tail_pages, lent=plan.lent
        )

    def check(self, layers: tuple[int, ...], k: int, buffers: int) -> None:
        pages, size = self.pages, self.pages.buffer_pages
        target = layers if k else ()
        assert (pages.streamed, pages.tail_pages) == (target, k)
        tails = {page for layer in target for page in pages.homes[layer][-k:]}
        ring = [page for buffer in pages.ring for page in buffer]
        assert len(ring) == len(set(ring)) == (buffers * k if target else 0)
        assert tails.issuperset(ring)
        for layer, home in enumerate(pages.homes):
            shows = self.shown[pages.layer_regions[layer]]
            for index, page in enumerate(home):
                tail = layer in target and index >= len(home) - k
                away = "free" if page in pages.lent else "kv"
                assert self.owner[page] == ("params" if not tail else "ring" if page in ring else away)
                assert tail or self.loaded[page]
                if not tail:
                    assert shows[index] == page
                else:  # the same bytes as the slot of the ring's region that the layer's copy is brought to
                    buffer = target.index(layer) % buffers
                    assert shows[index] == self.ring[buffer * size + size - len(home) + index] in pages.ring[buffer]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[tuple[tuple[int, ...], int, int]]]:
    count = draw(st.integers(2, 7))
    equal = draw(st.booleans())
    size = st.integers(1, 6)
    sizes = [draw(size)] * count if equal else draw(st.lists(size, min_size=count, max_size=count))
    changes = []
    for _ in range(draw(st.integers(1, 7))):
        layers = range(count) if draw(st.integers(0, 3)) else draw(st.sets(st.integers(0, count - 1), min_size=2))
        changes.append((tuple(sorted(layers)), draw(st.integers(0, 6)), draw(st.integers(1, 2))))
    return sizes, changes


@settings(deadline=None, max_examples=300)
@given(histories())
def test_a_sequence_of_slices_ends_where_each_plan_says(
    history: tuple[list[int], list[tuple[tuple[int, ...], int, int]]],
) -> None:
    sizes, changes = history
    model = Model(pages_of(sizes))
    for epoch, (layers, k, buffers) in enumerate(changes):
        now, owners, loaded = model.pages, dict(model.owner), dict(model.loaded)
        chosen = [sizes[layer] for layer in layers]
        if k and (buffers >= len(layers) or k > max(chosen) or sum(min(k, s) for s in chosen) < buffers * k):
            with pytest.raises(InvalidArgument):
                plan_slices(now, epoch, layers, k, buffers)
            continue
        plan = plan_slices(now, epoch, layers[::-1], k, buffers, predicted_stall_s=0.5, reason="because")
        assert (plan.epoch, plan.predicted_stall_s, plan.reason) == (epoch, 0.5, "because")
        shown = {region: list(pages) for region, pages in model.shown.items()}
        model.carry_out(plan)
        model.check(layers, k, buffers)
        # Conservation, and only differences.
        moved = {page for step in plan.steps if isinstance(step, SetOwner) for page in step.pages}
        assert moved == {page for page in owners if owners[page] != model.owner[page]}
        assert sorted(plan.gained) == sorted(p for p in owners if model.owner[p] == "kv" != owners[p])
        assert sorted(plan.lost) == sorted(p for p in owners if owners[p] == "kv" != model.owner[p])
        assert set(plan.held) == {
            layer for layer, region in enumerate(now.layer_regions) if shown[region] != model.shown[region]
        }
        # Loaded is exactly what was away and is at home now.
        home = {page for page in owners if model.owner[page] == "params"}
        parts = [page for layer, first, n in plan.reload_parts for page in now.homes[layer][first : first + n]]
        assert sorted(parts) == sorted(home - {page for page in owners if owners[page] == "params"})
        assert all(n > 0 for _, _, n in plan.reload_parts) and not plan.reload
        same = now.tail_pages and k and now.streamed == layers
        if k >= now.tail_pages and (not now.streamed or same):
            assert not plan.reload_parts
            if len(now.ring) in (0, buffers) or buffers > len(now.ring):
                # Growing: the ring keeps its pages at their places, and takes from KV only what nothing else could give.
                assert not plan.ring_moves
                assert all(old == new[len(new) - len(old) :] for old, new in zip(now.ring, plan.ring))
                spare = sum(min(k, s) - min(now.tail_pages, s) for s in chosen)
                assert len(plan.lost) == max(0, (buffers * k - now.tail_pages * len(now.ring)) - spare)
                if len(set(chosen)) == 1 and len(now.ring) in (0, buffers):
                    assert not plan.lost
        if not plan.steps:
            assert (now.streamed, now.tail_pages, now.ring) == (plan.streamed, plan.tail_pages, plan.ring)
        assert loaded == model.loaded or plan.steps
        if k and sum(min(k, s) for s in chosen) > buffers * k:
            given = sum(model.owner[page] == "kv" for page in owners)
            assert given == round(alpha_of([now.homes[i] for i in layers], k, buffers) * max(chosen))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=3, max_size=7), st.data())
def test_lent_pages_stay_lent_until_they_are_reclaimed(sizes: list[int], data: st.DataObject) -> None:
    layers = tuple(range(len(sizes)))
    possible = [k for k in range(1, max(sizes) + 1) if sum(min(k, s) for s in sizes) >= k]
    first, then = data.draw(st.sampled_from(possible)), data.draw(st.sampled_from([0, *possible]))
    model = Model(pages_of(sizes))
    plan = plan_slices(model.pages, 1, layers, first, 1, to="free")
    model.carry_out(plan)
    model.check(layers, first, 1)
    assert not plan.gained
    assert plan.lent == {page for page, owner in model.owner.items() if owner == "free"}
    # What would be lost of it, were it KV.
    needed = set(plan_slices(replace(model.pages, lent=frozenset()), 2, layers, then, 1).lost)
    assert needed <= model.pages.lent
    if needed:
        with pytest.raises(InvalidArgument) as refused:
            plan_slices(model.pages, 2, layers, then, 1)
        assert refused.value.fields["pages"] == len(needed)
    for page in needed:
        model.owner[page] = "kv"
    model.pages = replace(model.pages, lent=model.pages.lent - needed)
    plan = plan_slices(model.pages, 3, layers, then, 1, to="free")
    assert set(plan.lost) == needed
    model.carry_out(plan)
    model.check(layers, then, 1)


def test_growth_by_a_page_touches_one_page_a_layer() -> None:
    model = Model(pages_of([8] * 6))
    model.carry_out(plan_slices(model.pages, 1, range(6), 3, 2))
    shown = {region: list(pages) for region, pages in model.shown.items()}
    plan = plan_slices(model.pages, 2, range(6), 4, 2)
    assert plan.gained == tuple(home[-4] for home in model.pages.homes[2:])
    rings = [step for step in plan.steps if isinstance(step, Point) and step.layer is None]
    # The ring's region shows these pages at these slots from the start: aliased mode has nothing to do.
    assert [(step.first_slot, step.pages) for step in rings] == [(4, (104,)), (12, (112,))]
    model.carry_out(plan)
    for layer, region in enumerate(model.pages.layer_regions):
        differ = [slot for slot in range(8) if model.shown[region][slot] != shown[region][slot]]
        assert differ == ([] if layer < 2 else [4])  # the ring's own layers show their own pages all the time


def test_whole_layers_and_slices_meet_only_where_all_is_resident() -> None:
    model = Model(pages_of([3] * 5))
    whole = replace(model.pages, streamed=(0, 1), ring=(model.pages.homes[0],))
    with pytest.raises(InvalidArgument, match="resident") as refused:
        plan_slices(whole, 1, range(5), 1, 1)
    assert refused.value.fields["streamed"] == 2
    assert plan_slices(whole, 1, range(5), 0, 1) == plan_layers(whole, 1, (), 1)
    model.carry_out(plan_slices(model.pages, 1, range(5), 2, 1))
    with pytest.raises(InvalidArgument, match="resident") as refused:
        plan_layers(model.pages, 2, (0, 1, 2), 1)
    assert refused.value.fields["tail_pages"] == 2
    assert model.pages.kv_from_homes == {page for page, owner in model.owner.items() if owner == "kv"}
    free = plan_free_pages(model.pages, 2, (500,), give=True)
    assert (free.tail_pages, free.streamed, free.ring) == (2, model.pages.streamed, model.pages.ring)
    back = plan_layers(model.pages, 2, (), 1)
    model.carry_out(back)
    model.check((), 0, 0)
    assert set(model.owner.values()) == {"params"} and all(model.loaded.values())


@pytest.mark.parametrize(
    ("layers", "k", "buffers", "field"),
    [
        ((0, 0, 1), 1, 1, "layers"),
        ((0, 5), 1, 1, "layers"),
        ((-1, 0), 1, 1, "layers"),
        ((0, 1, 2), -1, 1, "maximum"),
        ((0, 1, 2), 5, 1, "maximum"),
        ((0, 1), 1, 2, "streamed"),
        ((0, 1), 1, 0, "streamed"),
        ((0, 1, 2), 4, 2, "available_pages"),
    ],
)
def test_what_cannot_be_planned(layers: tuple[int, ...], k: int, buffers: int, field: str) -> None:
    with pytest.raises(InvalidArgument, match="nothing was planned") as refused:
        plan_slices(pages_of([4, 1, 1, 4]), 1, layers, k, buffers)
    assert field in refused.value.fields


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 3), st.floats(0, 9))
def test_tail_for_is_the_smallest_that_is_enough(sizes: list[int], buffers: int, alpha: float) -> None:
    homes = pages_of(sizes).homes
    enough = [k for k in range(max(sizes) + 1) if alpha_of(homes, k, buffers) * max(sizes) >= alpha * max(sizes) - 1e-9]
    if enough:
        assert tail_for(homes, alpha, buffers) == enough[0]
        return
    with pytest.raises(InvalidArgument) as refused:
        tail_for(homes, alpha, buffers)
    best = max(alpha_of(homes, k, buffers) for k in range(max(sizes) + 1))
    assert refused.value.fields["maximum"] == pytest.approx(best)


@pytest.mark.parametrize("alpha", [-0.5, float("nan"), float("inf")])
def test_alpha_must_be_a_number(alpha: float) -> None:
    with pytest.raises(InvalidArgument):
        tail_for(pages_of([4] * 4).homes, alpha, 1)


@given(st.lists(st.integers(1, 6), min_size=3, max_size=7), st.integers(1, 2), st.data())
def test_in_giving_order_what_slices_give_stands_together(sizes: list[int], buffers: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    order = sorted(order, key=lambda layer: -sizes[layer])  # the ring's layers are the largest
    now = pages_of(sizes, tuple(order[:buffers]))
    giving = giving_order(now.homes, order, buffers)
    assert sorted(giving) == sorted(page for home in now.homes for page in home)
    k = data.draw(st.integers(1, min(sizes[layer] for layer in order[:buffers])))
    if sum(min(k, size) for size in sizes) < buffers * k or sizes[order[buffers - 1]] < max(sizes):
        return
    plan = plan_slices(now, 1, range(len(sizes)), k, buffers)
    assert set(giving[: len(plan.gained)]) == set(plan.gained)


def test_copies_in_bytes() -> None:
    now = pages_of([4, 2, 4])
    plan = plan_slices(now, 1, range(3), 3, 1)
    copies = copies_of(now, plan, (390, 150, 400), 100)
    assert copies.offsets == (100, 0, 100)
    assert copies.places == (100, 200, 100)  # tails are aligned to the end of the buffer's four slots
    assert copies.parts == ()
    there = replace(now, streamed=plan.streamed, ring=plan.ring, tail_pages=3)
    assert copies_of(there, plan_slices(there, 2, range(3), 1, 1), (390, 150, 400), 100).parts == (
        (0, 100, 200),
        (1, 0, 100),
        (2, 100, 200),
    )
    back = copies_of(there, plan_slices(there, 2, (), 0, 1), (390, 150, 400), 100)
    assert back.parts == ((0, 100, 290), (1, 0, 150), (2, 100, 300)) and not back.offsets


# -- sessions ------------------------------------------------------------------------------------------------------------

MODES = ("aliased", "strict")


class World:
    """One tenant over plain bytes; with eight layers a KV block is one page. `values` are what its live blocks hold."""

    def __init__(self, sizes: Sequence[int], mode: str, *, session: object = None, spare: int = 2) -> None:
        import arena_worlds as worlds

        import remap
        from remap.memory.restream import reslice

        self.worlds, self.reslice = worlds, reslice
        self.layers = worlds.make_layers(sizes)
        capacity = (sum(sizes) + 4 + spare) * worlds.PAGE
        self.session = session or remap.Session(capacity, page_bytes=worlds.PAGE, mode=mode)
        per_block = worlds.PAGE // (2 * len(sizes) * 4 * 32)
        spec = remap.KVSpec(
            layers=len(sizes), kv_heads=1, head_dim=32, block_tokens=per_block, dtype="float32",
            min_blocks=4, max_blocks=sum(sizes) + 8,
        )  # fmt: skip
        self.tenant = self.session.attach_bytes(self.layers, name="m", kv=spec)
        self.values: dict[int, int] = {}

    def change(self, k: int, buffers: int) -> None:
        moved = self.reslice(self.session._changes, self.tenant._state, k, buffers)
        self.values = {moved.get(block, block): value for block, value in self.values.items()}
        self.check()

    def check(self) -> None:
        remap.advanced.check(self.session)
        live = set(self.tenant.kv.pool.live_ids())
        assert live == set(self.values)
        for block in self.tenant.kv.pool.open_ids():
            if block not in live:
                self.worlds.write_block(self.tenant, block, 0xDF)  # weights read from here by mistake show
        for block, value in self.values.items():
            assert self.worlds.read_block(self.tenant, block) == {value}

    def forward(self) -> None:
        self.worlds.forward(self.session, self.tenant, self.layers)

    def use_blocks(self, rng: random.Random) -> None:
        kv = self.tenant.kv
        for block in kv.allocate(rng.randint(0, kv.free_blocks)):
            self.values[block] = rng.randint(1, 200)
            self.worlds.write_block(self.tenant, block, self.values[block])
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
    import remap

    rng = random.Random(f"{mode}{sizes}{seed}")
    world = World(sizes, mode)
    pages = world.tenant._state.pages
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
                assert world.tenant._state.pages.tail_pages == k
                given = alpha_of(pages.homes, k, buffers) * max(sizes)
                assert world.session.snapshot().tenants["m"].kv_bytes == (4 + round(given)) * world.worlds.PAGE
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
    page = world.worlds.PAGE
    with world.session:
        world.change(2, 1)
        for _ in range(3):
            world.forward()
        before = world.session.snapshot().tenants["m"]
        world.forward()
        after = world.session.snapshot().tenants["m"]
        short = world.worlds.SHORT  # the last page is not full
        assert after.copied_bytes - before.copied_bytes == 8 * (2 * page - short)
        world.change(1, 1)
        remap.advanced.settle(world.session)
        world.tenant._state.prefetcher.drain()
        loaded = world.session.snapshot().tenants["m"]
        # One page of each layer, and the first tail into the ring.
        assert loaded.copied_bytes - after.copied_bytes == 8 * page + page - short
        assert world.tenant._state.prefetcher.loading()
        world.forward()
        assert not world.tenant._state.prefetcher.loading()
        assert all(not world.tenant._state.prefetcher.ready(layer) for layer in range(8))
        world.change(0, 1)
        world.forward()
        assert all(world.tenant._state.prefetcher.ready(layer) for layer in range(8))


def test_growing_makes_no_call_before_the_blocks_are_usable() -> None:
    """Aliased mode: nothing is mapped or unmapped for the ring, whose region shows its pages from the start."""
    import remap
    from remap import _core

    page = 64 << 10
    backend = _core.make_trace_backend(_core.make_host_backend(38 * page, page))
    world = World(
        [4] * 8,
        "aliased",
        session=remap.Session(38 * page, page_bytes=page, platform=remap.advanced.Platform(backend=backend)),
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
    import arena_worlds as worlds

    import remap
    from remap import _core

    backend = _core.make_fault_backend(_core.make_host_backend(38 * worlds.PAGE, worlds.PAGE))
    session = remap.Session(
        38 * worlds.PAGE, page_bytes=worlds.PAGE, mode="strict", platform=remap.advanced.Platform(backend=backend)
    )
    world = World([4] * 8, "strict", session=session)
    with world.session:
        world.change(3, 1)
        rng = random.Random(1)
        for block in world.tenant.kv.allocate(9):
            world.values[block] = rng.randint(1, 200)
            worlds.write_block(world.tenant, block, world.values[block])
        failed = 0
        for nth in range(1, 60):
            before = worlds.visible(session)
            backend.arm(_core.Call.map, nth)
            try:
                world.reslice(session._changes, world.tenant._state, 1 if nth % 2 else 2, 1)
            except remap.DriverError:
                failed += 1
                assert worlds.visible(session) == before
            backend.disarm()
            if worlds.visible(session) != before:
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

    from remap.memory.restream import reslice

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
            reslice(rig.session._changes, rig.tenant._state, k, buffers)
            rig.check()
            for _ in range(2):
                assert torch.equal(models.logits_of(model, ids), expected), (k, buffers)
            rig.check()
        got, rows = models.generate(model, ids)
        assert torch.equal(got, tokens)
        assert torch.equal(rows, scores)
    assert torch.equal(models.logits_of(model, ids), expected)
