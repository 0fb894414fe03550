"""What one session.step costs with three tenants of 40 layers: when it decides nothing, and when it plans between tenants.

Targets: 100 us for a step that decides nothing (also with pages lent, which it then looks after), 1 ms for one that plans: that
takes layers of an inactive or an active tenant, or brings one home. "Nobody can give" is the step of an overloaded machine:
demand is unmet, and every step asks all donors again.

Pages are small, and as many as of a small model ("7 pages" a layer) or of one of 13 billion parameters ("300 pages"). The rate
of copies is set as if layers were as large as theirs, so that a pass hides some copies and not all.
"""

from __future__ import annotations

import time

import pytest
from measure import median, record, seconds_of
from shared_tenants import SharedTenants

import remap
from remap.internals import internals
from remap.memory.restream import take_free_pages

LAYERS = 40
SIZES = {"7 pages": (7, 64 << 10), "300 pages": (300, 4 << 10)}
ITERATIONS = 20
NEVER = 10**9
COMPUTE_S = 0.0002
# No reserve, so that the demand alone says what moves; nothing comes home by itself, unless a test is about that.
STILL = remap.advanced.Knobs(reserve_blocks=0, hysteresis_blocks=0, dwell=NEVER, min_idle=0.0)
KEEPS = remap.advanced.Knobs(reserve_blocks=0, hysteresis_blocks=0, dwell=NEVER, min_idle=0.0, lends=False)


def _world(size: str, **more) -> SharedTenants:
    pages, page = SIZES[size]
    world = SharedTenants(("one", "two", "three"), LAYERS, pages, page, **{"config": STILL, **more})
    world.warm(COMPUTE_S)
    for tenant in world.tenants.values():
        # A copy takes four layers' computation: about a quarter of the layers can be hidden.
        internals(tenant).calibrate_link(world.layer_bytes / (4 * COMPUTE_S))
        internals(tenant)._state.timing.prepare()
    return world


def _measure_idle(benchmark, world: SharedTenants, name: str, demand: dict[str, int], **more) -> None:
    step, wanted = world.session.step, {key: remap.Demand(blocks=blocks) for key, blocks in demand.items()}
    for _ in range(3):
        step(wanted)
    epoch = world.session.snapshot().epoch

    def steps() -> None:
        for _ in range(ITERATIONS):
            step(wanted)

    benchmark.pedantic(steps, rounds=200, warmup_rounds=5)
    assert world.session.snapshot().epoch == epoch
    each = [seconds / ITERATIONS for seconds in seconds_of(benchmark)]
    record(benchmark, name, median(each) * 1e6, "us", each, **more)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lent", [0, 4])
def test_step_that_decides_nothing(benchmark, size, lent):
    with _world(size, inactive=("three",)) as world:
        if lent:
            remap.advanced.lend(world.session, "three", lent, to="one")
            world.fill("one")
        title = f"step of 3 tenants that decides nothing, {lent} layers lent, {size}"
        _measure_idle(benchmark, world, title, {"one": 0, "two": 0}, target=100.0)
        world.verify()


@pytest.mark.parametrize("size", SIZES)
def test_step_while_a_return_is_paid_for(benchmark, size):
    """The holder could spare its blocks: the rent accrues in every step, and the reload is not paid for yet."""
    with _world(size, inactive=("three",)) as world:
        remap.advanced.lend(world.session, "three", 4, to="one")
        title = f"step of 3 tenants that accrues rent, 4 layers lent, {size}"
        _measure_idle(benchmark, world, title, {"one": 0, "two": 0}, target=100.0)
        assert world.session._tenants["three"].controller.credit > 0
        world.verify()


@pytest.mark.parametrize("size", SIZES)
def test_step_where_nobody_can_give(benchmark, size):
    config = remap.advanced.Knobs(reserve_blocks=0, hysteresis_blocks=0, dwell=NEVER, min_idle=0.0, max_layers=2)
    with _world(size, config=config, inactive=("three",)) as world:
        for _ in range(8):
            world.step(one=10_000, two=0)
        world.fill("one")
        title = f"step of 3 tenants with demand that nobody can meet, {size}"
        _measure_idle(benchmark, world, title, {"one": 10_000, "two": 0}, target=1000.0)
        world.verify()


def _measure_plan(benchmark, world: SharedTenants, name: str, reset, plan, check, rounds: int = 40) -> None:
    samples: list[float] = []

    def timed() -> None:
        begun = time.perf_counter()
        report = plan()
        samples.append(time.perf_counter() - begun)
        check(report)
        world.follow(report.moved)

    for _ in range(3):
        reset()
        timed()
    samples.clear()
    benchmark.pedantic(timed, setup=reset, rounds=rounds)
    world.quiet()
    world.verify()
    # The least is what it costs by itself: wherever a copying thread shares the core, it runs in between.
    record(benchmark, name, median(samples) * 1e6, "us", samples, target=1000.0, least_us=min(samples) * 1e6)


@pytest.mark.parametrize("donor", ["inactive", "active"])
@pytest.mark.parametrize("size", SIZES)
def test_growth_by_layers_of_others(benchmark, size, donor):
    """Two layers' worth of blocks, which one other tenant gives."""
    # A second active neighbour would have to be spared too: the link hides less beside it. So the third one lies idle and keeps.
    inactive = ("two", "three") if donor == "inactive" else ("three",)
    # Its own layers would do as well; that they stay makes the donor's the only ones.
    cap = remap.advanced.Knobs(reserve_blocks=0, hysteresis_blocks=0, dwell=NEVER, min_idle=0.0, max_layers=0)
    kept = {} if donor == "inactive" else {"three": KEEPS}
    with _world(size, inactive=inactive, controllers={"one": cap, **kept}) as world:
        one, others = world.tenants["one"], [world.tenants["two"], world.tenants["three"]]
        wanted = int(2 * internals(one)._state.blocks_per_layer) - 1
        demand = {name: remap.Demand(blocks=0) for name, tenant in world.tenants.items() if tenant.active}
        demand["one"] = remap.Demand(blocks=wanted)

        def reset() -> None:
            world.free("one")
            for name, tenant in world.tenants.items():
                if tenant.remapped:
                    world.follow(remap.advanced.lend(world.session, name, 0).moved)
            _give_back_idle(world)
            world.quiet()
            world.fill("one")
            assert one.kv.free_blocks == 0
            assert all(not tenant.remapped for tenant in others)
            assert world.session.snapshot().pages.free == 0

        def check(report: remap.StepReport) -> None:
            assert not report.unmet_blocks
            assert sum(tenant.remapped for tenant in others) >= 2
            assert one.kv.free_blocks >= wanted

        title = f"step that takes 2 layers of an {donor} tenant, {size}"
        _measure_plan(benchmark, world, title, reset, lambda: world.session.step(demand), check)


@pytest.mark.parametrize("size", SIZES)
def test_growth_by_unused_kv_of_others(benchmark, size):
    """Another active tenant has more blocks than it uses: pages change hands, no layer moves."""
    with _world(size, inactive=("three",), controllers={"one": KEEPS}) as world:
        session, (one, two, _) = world.session, world.tenants.values()
        remap.advanced.lend(session, "three", 4, to="two")
        wanted = int(2 * internals(one)._state.blocks_per_layer) - 1
        demand = {"one": remap.Demand(blocks=wanted), "two": remap.Demand(blocks=0)}

        def reset() -> None:
            world.free("one")
            spare = one.kv.usable_blocks - one.kv.spec.min_blocks
            if spare > 0:
                session._lending.give_idle(internals(one)._state, spare, internals(two)._state, spare)
            take_free_pages(session._changes, internals(two)._state, 10**6)
            world.quiet()
            world.fill("one")

        def check(report: remap.StepReport) -> None:
            assert not report.unmet_blocks
            assert world.tenants["three"].remapped == 4
            assert one.kv.free_blocks >= wanted

        title = f"step that takes unused KV of an active tenant, {size}"
        _measure_plan(benchmark, world, title, reset, lambda: session.step(demand), check)


def _give_back_idle(world: SharedTenants) -> None:
    """Free pages go to who can hold them, so that the next growth finds none."""
    session = world.session
    for name, tenant in world.tenants.items():
        free = session.snapshot().pages.free
        if free and tenant.active:
            blocks = int(free * internals(tenant)._state.blocks_per_page) + 1
            take_free_pages(session._changes, internals(tenant)._state, blocks)
            world.fill(name)


@pytest.mark.parametrize("size", SIZES)
def test_a_lent_layer_comes_home(benchmark, size):
    """The holder's blocks are free: one layer of the inactive tenant is paid for in this step."""
    soon = remap.advanced.Knobs(reserve_blocks=0, hysteresis_blocks=0, dwell=1, contention=1e6, min_idle=0.0)
    with _world(size, inactive=("two", "three"), controllers={"three": soon}) as world:
        three = world.tenants["three"]
        demand = {"one": remap.Demand(blocks=0)}

        def reset() -> None:
            world.free("one")
            remap.advanced.lend(world.session, "three", 0)
            remap.advanced.lend(world.session, "three", 4, to="one")
            world.quiet()

        def check(report: remap.StepReport) -> None:
            assert three.remapped == 3

        title = f"step in which 1 of 4 lent layers comes home, {size}"
        _measure_plan(benchmark, world, title, reset, lambda: world.session.step(demand), check)


@pytest.mark.parametrize("size", SIZES)
def test_an_own_layer_comes_home(benchmark, size):
    soon = remap.advanced.Knobs(reserve_blocks=0, hysteresis_blocks=0, dwell=1, contention=1e6, min_idle=0.0)
    with _world(size, inactive=("two", "three"), controllers={"one": soon}) as world:
        one = world.tenants["one"]
        demand = {"one": remap.Demand(blocks=0)}

        def reset() -> None:
            world.free("one")
            remap.advanced.remap(world.session, "one", 4, 2, "nested")
            world.quiet()

        def check(report: remap.StepReport) -> None:
            assert one.remapped == 3

        title = f"step in which 1 of 4 own layers comes home, {size}"
        _measure_plan(benchmark, world, title, reset, lambda: world.session.step(demand), check)
