"""Several ranks make the same change, or none does; what an engine holds keeps its bytes, and what is new to it is zero.

Sessions with one tenant each, as ranks of tensor parallelism have them, and an engine whose allocator is a set of ids. "remote"
engines hear of changes by reports, "local" ones from within the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from arena_worlds import PAGE, forward, make_backend, make_layers, make_spec, read_block, session_on, write_block
from hypothesis import given
from hypothesis import strategies as st
from sharing_worlds import set_times, times_of

import remap
from remap import _core
from remap.errors import InvalidState, OutOfMemory
from remap.internals import internals
from remap.ranks import Rank, RankGroup, RankReport, ids, runs

pytest.importorskip("torch")

LAYERS, FIRST = 8, 4  # layers of two pages; two blocks a page
CAPACITY = (2 * LAYERS + FIRST // 2) * PAGE
EAGER = remap.advanced.Knobs(
    slowdown=100.0, map_s=1e-9, contention=1.0, dwell=1, reserve_blocks=0, hysteresis_blocks=0, min_idle=0.0
)


class World:
    """`count` ranks and one engine. extra: pages that each rank has beyond the first one's."""

    def __init__(
        self, count: int, *, local: bool = False, mode: str = "aliased", extra: Sequence[int] = (), **config: Any
    ) -> None:
        self.faults, self.ranks, self.layers = [], [], make_layers([2] * LAYERS, 1)
        settings = remap.advanced.Knobs(**{**EAGER.__dict__, **config})
        for rank in range(count):
            more = extra[rank] if extra else 0
            capacity = CAPACITY + more * PAGE
            self.faults.append(_core.make_fault_backend(make_backend(capacity)))
            session = session_on(self.faults[-1], capacity, mode=mode, config=settings)
            kv = make_spec(LAYERS, min_blocks=FIRST + 2 * more)
            self.ranks.append(Rank(session, session.attach_bytes(self.layers, name="m", kv=kv), rank))
            set_times(self.ranks[-1], times_of(LAYERS, 1.0, 0.1))
        self.local, self.opened, self.used, self.leaving = local, set[int](), dict[int, int](), set[int]()
        self.group = RankGroup(self.ask, count)
        self.opened = ids(self.group.opened)
        self.ask("listen", self.heard if local else None)
        if not extra:
            self.use(FIRST)

    def ask(self, method: str, *args: Any) -> list[Any]:
        return [getattr(rank, method)(*args) for rank in self.ranks]

    def heard(self, report: RankReport) -> list[int]:
        """The engine's books. Returns what has left and is in no use."""
        wanted = ids(report.open)
        self.leaving = (self.leaving | self.opened) - wanted
        self.opened = wanted
        return self.gone()

    def gone(self) -> list[int]:
        found = sorted(self.leaving - set(self.used))
        self.leaving -= set(found)
        return found

    def take(self, report: RankReport | None) -> RankReport | None:
        if report is not None and not self.local:
            self.ask("returned", self.heard(report))
        return report

    def step(self, wanted: int, anyway: bool = False) -> RankReport | None:
        return self.take(self.group.step(wanted, len(self.free), anyway))

    @property
    def free(self) -> set[int]:
        return self.opened - set(self.used)

    def use(self, count: int) -> list[int]:
        """Blocks for requests: the highest, which are the first to leave. Zero until they are written."""
        chosen = sorted(self.free)[-count:]
        for block in chosen:
            for rank in self.ranks:
                assert read_block(rank.tenant, block) == {0}
                write_block(rank.tenant, block, block % 250 + 1)
            self.used[block] = block % 250 + 1
        return chosen

    def finish(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self.used[block]
            for rank in self.ranks:
                write_block(rank.tenant, block, 0)  # so that `use` sees zeroes in what the engine hands out again
        self.ask("returned", self.gone())

    def check(self) -> None:
        """All ranks have the engine's blocks with their contents, and the model's bytes."""
        for rank in self.ranks:
            remap.advanced.check(rank.session)
            assert self.opened <= set(internals(rank.tenant).kv.pool.open_ids())
            assert (
                (rank.tenant.remapped, internals(rank.tenant).buffers)
                == self.ranks[0].report().target
                == self.group.target
            )
            for block, value in self.used.items():
                assert read_block(rank.tenant, block) == {value}
            forward(rank.session, rank.tenant, self.layers)
        assert ids(self.ranks[0].report().open) == self.opened == ids(self.group.opened)

    def at_start(self) -> bool:
        return self.group.target == (0, 0) and len(self.opened) == FIRST

    def home(self) -> None:
        """All comes home; a remote engine has returned the last blocks only at the second time."""
        for _ in range(2):
            self.take(self.group.home())
        assert self.at_start()
        self.check()

    def pin(self, rank: int, layer: int) -> None:
        session = self.ranks[rank].session
        remap.advanced.declare_registered(session, remap.advanced.layer_address(session, "m", layer), 64)

    def close(self) -> None:
        for fault, rank in zip(self.faults, self.ranks):
            fault.disarm()
            rank.session.close()


@pytest.fixture
def worlds() -> Any:
    made: list[World] = []

    def make(*args: Any, **kwargs: Any) -> World:
        made.append(World(*args, **kwargs))
        return made[-1]

    yield make
    for world in made:
        world.close()


@given(st.sets(st.integers(0, 60)))
def test_runs_and_ids_are_inverse(found: set[int]) -> None:
    made = runs(sorted(found))
    assert ids(made) == found
    assert all(first < stop for first, stop in made)
    assert all(before < after for (_, before), (after, _) in zip(made, made[1:]))
    assert all(runs(range(*each)) == (each,) for each in made) and runs(range(0)) == ()


@pytest.mark.parametrize(("count", "local"), [(1, True), (1, False), (3, False)])
def test_all_grow_and_shrink_alike(worlds: Any, count: int, local: bool) -> None:
    world = worlds(count, local=local)
    grown = world.step(6)
    assert grown is not None and grown.target[0] >= 2 and len(world.free) >= 6
    world.check()
    used = world.use(6)
    world.check()
    world.finish(used)
    reports = [world.step(0) for _ in range(40)]
    # A layer that comes home moves no block and adds none: the engine hears of it all the same.
    assert [report for report in reports if report is not None]
    assert 0 < world.group.target[0] < grown.target[0]
    world.check()
    world.home()


def test_a_pass_without_requests_wakes_an_engine_that_sleeps_for_as_long(worlds: Any) -> None:
    """vLLM's dummy batch of an engine that slept ended in InvalidState, and with it the engine."""
    world = worlds(1)
    (rank,) = world.ranks
    world.finish(list(world.used))
    with rank.awake(0.0):
        forward(rank.session, rank.tenant, world.layers)  # awake already
    assert rank.tenant.active
    rank.sleep()
    rank._lost.add(3)  # another process had its page, and it is open again
    with rank.awake(0.0):
        forward(rank.session, rank.tenant, world.layers)
    assert not rank.tenant.active
    woken = rank.wake()
    assert woken is not None and ids(woken.lost) == {3}, "the engine hears of it when it wakes"
    rank.sleep()
    asked: list[int] = []
    rank.turn.may_begin = lambda: asked.append(1) or len(asked) > 3
    with rank.awake(60.0):  # those that wait for its pass would wait for ever if it ended
        assert rank.tenant.active and len(asked) == 4
    rank.turn.may_begin = lambda: False
    with pytest.raises(OutOfMemory, match="the pages of its layers") as caught, rank.awake(0.0):
        pass
    assert not rank.tenant.active and caught.value.fields["waited_s"] == 0.0


@pytest.mark.parametrize("asleep", [True, False])
def test_an_idle_engine_has_nothing_in_use(worlds: Any, asleep: bool) -> None:
    """`remap top` showed all of its blocks in use."""
    world = worlds(1)
    world.step(6)
    world.use(3)
    world.step(1)

    def shown() -> tuple[int, int]:
        seen = world.ranks[0].session.snapshot().tenants["m"]
        return seen.live_blocks, seen.usable_blocks - seen.free_blocks

    assert shown() == (FIRST + 3,) * 2
    world.finish(list(world.used))
    world.ask("sleep" if asleep else "home")
    assert shown() == (0, 0)


@pytest.mark.parametrize("local", [True, False])
def test_what_is_in_use_stays_and_keeps_its_bytes_when_it_is_needed_again(worlds: Any, local: bool) -> None:
    world = worlds(1, local=local)
    world.step(8)
    high = world.use(2)
    world.take(world.group.home())
    assert set(high) <= world.leaving  # withdrawn, and still with their requests
    assert world.group.target[0] > 0
    world.check()
    world.step(len(world.free) + 2)
    assert set(high) <= world.opened and not world.leaving
    world.check()  # not zeroed
    world.finish(high)
    world.home()


@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("busy", [1, 2])
def test_a_rank_that_refuses_leaves_all_as_they_were(worlds: Any, mode: str, busy: int) -> None:
    world = worlds(3, mode=mode)
    world.step(2)
    world.use(2)
    before = world.group.target, set(world.opened)
    assert before[0][0] > 0
    with world.ranks[busy].tenant.forward():  # it cannot change now
        world.step(8)
        for layer in range(LAYERS):
            world.ranks[busy].tenant.wait(layer)
            world.ranks[busy].tenant.done(layer)
    assert world.group.refusals == 1
    assert (world.group.target, world.opened) == before
    world.check()
    world.step(8)
    assert world.group.refusals == 1 and world.group.target[0] > before[0][0]
    world.check()


def test_a_rank_whose_driver_fails_leaves_all_as_they_were(worlds: Any) -> None:
    world = worlds(3, mode="strict")  # here growing makes calls that can fail
    world.faults[1].arm_any(1, True, _core.ErrorKind.driver)
    world.step(4)
    world.faults[1].disarm()
    assert world.group.refusals == 1
    assert world.at_start()
    world.check()
    world.step(4)
    assert world.group.target[0] > 0
    world.check()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("anyway", [False, True])
def test_rank_0_whose_driver_fails_serves_on(worlds: Any, caplog: Any, count: int, anyway: bool) -> None:
    world = worlds(count, mode="strict", local=count == 1)
    world.faults[0].arm_any(1, True, _core.ErrorKind.driver)
    for _ in range(2):
        assert world.step(4, anyway=anyway) is None
    world.faults[0].disarm()
    assert caplog.text.count("serving goes on with 0 layers") == 1  # and not at every step
    assert world.at_start()
    world.check()
    world.step(4)
    grown = world.group.target
    assert grown[0] > 0
    world.check()
    world.faults[0].arm_any(1, True, _core.ErrorKind.driver)
    world.take(world.group.home())
    world.faults[0].disarm()
    assert world.group.target == grown
    world.check()
    world.home()


def test_a_rank_cannot_have_what_rank_0_has(worlds: Any) -> None:
    """Rank 1 may stream fewer layers: there is no growing beyond that, and no block that only rank 0 has."""
    world = worlds(2)
    for layer in range(3, LAYERS):
        world.pin(1, layer)
    for _ in range(3):
        world.step(20)
        world.check()
    assert world.group.refusals > 0


def test_a_rank_whose_layers_lie_elsewhere_refuses(worlds: Any) -> None:
    """Rank 1 can give as many layers, but not the same ones: its blocks would be others than the engine hands out."""
    world = worlds(2)
    world.pin(1, remap.schedule.nested(LAYERS)[0])
    world.step(3)
    assert world.group.refusals == 1
    assert world.at_start()
    world.check()


def test_ranks_start_alike(worlds: Any) -> None:
    with pytest.raises(InvalidState) as caught:
        worlds(2, extra=[0, 1])
    assert caught.value.fields["ranks"] == 2
    world = worlds(2)
    with pytest.raises(InvalidState) as caught:
        RankGroup(lambda method, *args: [getattr(world.ranks[0], method)(*args)], 2)
    assert caught.value.fields["answers"] == 1


def test_the_only_request_gets_what_it_takes(worlds: Any) -> None:
    """Its engine was started with the promise of all that there could be: no slowdown is a reason to let it wait for ever."""
    world = worlds(2, slowdown=0.0)
    set_times(world.ranks[0], times_of(LAYERS, 0.1, 10.0))
    world.step(12)
    assert len(world.free) < 12
    world.check()
    world.step(12, anyway=True)
    assert len(world.free) >= 12
    world.check()
    report = world.step(10_000, anyway=True)
    assert report is not None and report.unmet > 0
    assert world.group.target[0] == LAYERS - 1
    world.check()
