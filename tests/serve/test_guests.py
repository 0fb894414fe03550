"""Who computes beside the tenant whose turn it is, and what it gives: decisions by doubles, then the loop with an interrupt at
any line. Tokens of real models under epochs: test_sharing.py; real sessions: test_kv_swap.py, test_cold_engines.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from effort import some
from fakes import ContentPool
from test_engine_interrupts import BLOCK, Loop, Sweep

from remap_serve.cli.simulate import Options, prepare
from remap_serve.engine import sharing
from remap_serve.engine.guests import LATE_S, WAITS_S, Guests
from remap_serve.engine.request import Request, SamplingParams, Sequence
from remap_serve.engine.scheduler import Scheduler
from remap_serve.engine.sharing import SharedEngines
from remap_serve.sim.scheduling import PrefillFirst
from remap_serve.sim.serving import simulate


class Played:
    """An engine that has `running` blocks of requests that run, and gives them when asked."""

    def __init__(self, name: str, running: int = 0, waiting: int = 0, away: int = 0) -> None:
        kv = SimpleNamespace(spec=SimpleNamespace(block_bytes=8 if name == "d" else 4))
        self.tenant = SimpleNamespace(name=name, kv=kv, active=False, away_pages=away)
        self.running, self.waiting, self.paused = running, waiting, 0
        self.longest_wait_s = 2 * WAITS_S if waiting else 0.0
        self.scheduler = SimpleNamespace(closed=False, queued=lambda: range(self.waiting), arriving=())

    @property
    def unfinished(self) -> int:
        return self.running + self.waiting

    @property
    def computes(self) -> bool:
        return self.running > 0

    def release(self, blocks: int) -> int:
        given = min(self.running, blocks)
        self.running, self.waiting = self.running - given, self.waiting + given
        return given

    def pause(self) -> None:
        self.paused += 1


def world(*played: Played) -> tuple[Guests, dict[str, Any], list[str]]:
    engines: dict[str, Any] = {each.tenant.name: each for each in played}
    calls: list[str] = []

    def switched(active: bool) -> Callable[[str], Any]:
        def call(name: str) -> Any:
            calls.append(f"{'+' if active else '-'}{name}")
            engines[name].tenant.active = active
            return SimpleNamespace(activated=True)

        return call

    session = SimpleNamespace(activate=switched(True), deactivate=switched(False))
    reports: Any = SimpleNamespace(ask=lambda call: call())
    return Guests(session, engines, reports), engines, calls


def test_who_has_work_and_its_layers_is_a_guest_until_it_has_none() -> None:
    guests, engines, calls = world(Played("a", 3), Played("b", 5), Played("c", 5, away=7), Played("d"))
    guests.look("a", None)
    assert guests.names == ("b",) and calls == ["+b"]
    engines["c"].tenant.away_pages, engines["d"].waiting = 0, 1
    guests.look("a", None)
    assert guests.names == ("b", "c", "d") and calls == ["+b", "+c", "+d"]
    assert [guests.needs(name) for name in "bcd"] == [
        False,
        False,
        True,
    ]  # what d waits for a turn of its own may bring
    engines["b"].running = 0
    guests.look("a", None)
    assert guests.names == ("c", "d") and calls[-1] == "-b"
    guests.begin("c", "a")
    assert guests.names == ("d", "a") and guests.may_stay("a") and not guests.may_stay("b")


def test_whom_an_interrupt_left_active_is_no_guest_and_its_layers_may_go() -> None:
    guests, engines, calls = world(Played("a", 3), Played("b"), Played("c"))
    engines["b"].tenant.active = engines["c"].tenant.active = True
    guests.look("a", "c")  # c is expected: its layers come home for the next turn
    assert calls == ["-b"]


def test_a_tenant_whose_layers_are_loading_keeps_no_round_waiting() -> None:
    guests, engines, calls = world(Played("a", 3), Played("b", 5), Played("c"))
    engines["b"].tenant.active = True
    guests.look("a", None, "b")
    assert guests.names == () and not calls  # nor are its layers lent again
    guests.look("a", None)
    assert guests.names == ("b",)


@pytest.mark.parametrize("load_s", [0, 40, 400])
def test_a_prepared_tenant_computes_as_a_guest_once_its_layers_have_loaded(load_s: int) -> None:
    session, now = Switched(), iter(range(1 << 30))
    engines = {name: Member(name, ContentPool(200, 400, random.Random(1)), session) for name in "ab"}
    session.tenants.update({name: engine.tenant for name, engine in engines.items()})
    clock = SimpleNamespace(now=0.0)
    loaded = dict.fromkeys("ab", math.inf)

    def tick() -> float:
        clock.now = float(next(now))
        return clock.now

    def activate(name: str, **more: Any) -> Any:
        tenant, report = session.tenants[name], Switched.activate(session, name, **more)
        if tenant.away_pages:
            tenant.away_pages, loaded[name], report.restored = 0, clock.now + load_s, (0,)
        return report

    vars(session).update(activate=activate)
    engines["b"].tenant.away_pages = 5
    for name, engine in engines.items():
        engine.tenant.ready = lambda layer, name=name: clock.now >= loaded[name]
        engine.add_request(Request(name, (1, 2, 3), SamplingParams(max_tokens=200)))
    shared = SharedEngines(session, engines, quantum_s=300, clock=tick)
    shared._prepares, shared._page_s = True, 20.0  # as if host memory had room for KV; a load takes a hundred ticks
    while "b" not in shared.active:
        shared.step()
    began = clock.now
    if load_s == 400:  # its turn begins with layers that are still loading
        assert shared._active == "b" and 300 <= began <= 330
    else:
        assert shared._active == "a" and loaded["b"] <= began <= loaded["b"] + 20


def test_layers_that_stream_again_before_they_were_seen_at_home_are_awaited_no_more() -> None:
    """Their tenant was no guest until its own turn, and kept its pages."""
    session = Switched()
    engines = {name: Member(name, ContentPool(200, 400, random.Random(1)), session) for name in "ab"}
    session.tenants.update({name: engine.tenant for name, engine in engines.items()})
    shared = SharedEngines(session, engines, quantum_s=math.inf)
    for name, engine in engines.items():
        engine.add_request(Request(name, (1, 2, 3), SamplingParams(max_tokens=9)))
    shared._returning = sharing._Return("b", (0, 1), 5, 0.0)
    engines["b"].tenant.ready = lambda layer: layer != 1
    shared.step()
    assert shared.active == ("a",)
    engines["b"].tenant.streamed = (1,)
    shared.step()
    shared.step()
    assert shared.active == ("a", "b") and shared._page_s == math.inf


def test_the_guest_whose_turn_is_furthest_gives_and_lets_nobody_in_for_the_rest_of_the_turn() -> None:
    guests, engines, calls = world(Played("a", 1), Played("b", 9, 1), Played("c", 9), Played("d", 9))
    guests.look("b", None)
    assert guests.names == ("a", "c", "d")
    guests.give("b", 4)  # d and a come before it: behind b are c, d and a
    assert engines["a"].running == 0 and guests.names == ("c", "d") and calls[-1] == "-a"
    guests.give("b", 4)  # of d's blocks half as many, and two
    assert engines["d"].running == 9 - 4 and engines["d"].scheduler.closed and guests.names == ("c", "d")
    guests.look("b", None)
    assert "a" not in guests.names  # it would take back what it gave
    guests.begin("c", "b")
    assert not engines["d"].scheduler.closed
    guests.look("c", None)
    assert guests.names == ("d", "b", "a")


def test_a_guest_leaves_whole_where_a_request_is_late() -> None:
    guests, engines, calls = world(Played("a", 1, 1), Played("b", 9))
    guests.look("a", None)
    engines["a"].longest_wait_s = 2 * LATE_S
    guests.give("a", 2)
    assert guests.names == () and calls == ["+b", "-b"] and (engines["b"].running, engines["b"].paused) == (9, 1)


def test_nobody_gives_what_is_not_lacking_nor_before_a_request_has_waited() -> None:
    guests, engines, _ = world(Played("a", 1, 1), Played("b", 9))
    guests.look("a", None)
    guests.give("a", 0)
    engines["a"].longest_wait_s = WAITS_S / 2
    guests.give("a", 5)
    engines["a"].longest_wait_s, engines["b"].scheduler.arriving = 9.0, ("KV that is being copied in",)
    guests.give("a", 5)
    assert engines["b"].running == 9


@pytest.mark.parametrize("kind", [Scheduler, PrefillFirst])
def test_a_closed_scheduler_goes_on_with_those_who_run(kind: type[Scheduler]) -> None:
    pool = ContentPool(40, 0, random.Random(1))
    more = {"chunk_align": 4} if kind is Scheduler else {}
    scheduler = kind(block_tokens=BLOCK, max_num_seqs=4, max_batch_tokens=16, **more)
    for number, closed in enumerate((False, True, True, False)):
        scheduler.closed = closed
        request = Request(f"{number}", (1, 2, 3, 4), SamplingParams(max_tokens=9))
        scheduler.add(Sequence.of(request, number, 0.0))
        for chunk in scheduler.schedule(pool).chunks:
            scheduler.commit(chunk)
            chunk.sequence.append(7)
        assert len(scheduler.running) == (1, 1, 1, 4)[number]
    assert scheduler.running[0].generated >= 3


class Member(Loop):
    """Computes only while its tenant is active."""

    def __init__(self, name: str, pool: Any, session: Any) -> None:
        scheduler = Scheduler(block_tokens=BLOCK, max_num_seqs=4, max_batch_tokens=16, chunk_align=4, swap=True)
        pool.spec = SimpleNamespace(block_bytes=4)
        pool.offer = lambda blocks: None
        pool.host = SimpleNamespace(free_blocks=99)
        super().__init__(pool, scheduler, session)
        vars(self.tenant).update(name=name, active=False, away_pages=0, cold=(), reload_s=0.0, ready=lambda layer: True)
        self.tenant.streamed = ()

    def run(self, chunks: Any) -> Any:
        assert self.tenant.active
        return super().run(chunks)


class Switched:
    """A session whose pools stay as they are: what is lacking is unmet."""

    broker, one_at_a_time = "", False

    def __init__(self) -> None:
        self.tenants: dict[str, Any] = {}

    def _report(self, **more: Any) -> Any:
        return SimpleNamespace(
            **{"changed": False, "moved": {}, "wanted": {}, "preempt": {}, "restored": (), "unmet_blocks": {}, **more}
        )

    def step(self, demand: Any = None) -> Any:
        short = {name: wanted.blocks - self.tenants[name].kv.free_blocks for name, wanted in (demand or {}).items()}
        assert all(self.tenants[name].active for name in short)
        return self._report(unmet_blocks={name: blocks for name, blocks in short.items() if blocks > 0})

    def activate(self, name: str, *, alone: bool = False, partial: Any = False) -> Any:
        for other, tenant in self.tenants.items():
            tenant.active = other == name or (tenant.active and not alone)
        return self._report(activated=True, predicted_stall_s=0.0)

    def deactivate(self, name: str) -> None:
        self.tenants[name].active = False

    def snapshot(self) -> Any:
        return SimpleNamespace(tenants={name: SimpleNamespace(stall_s=0.0) for name in self.tenants})


def epochs(seed: int) -> Callable[[Sweep], None]:
    def play(sweep: Sweep) -> None:
        rng, session = random.Random(seed), Switched()
        engines = {name: Member(name, ContentPool(9, 40, rng), session) for name in "abc"}
        session.tenants.update({name: engine.tenant for name, engine in engines.items()})
        ticks = iter(range(1 << 30))
        shared = SharedEngines(session, engines, quantum_s=rng.choice([30, 90]), clock=lambda: float(next(ticks)))
        for name, engine in engines.items():
            for number in range(4):
                prompt = tuple(range(1, rng.randint(4, 12)))
                engine.add_request(Request(f"{name}{number}", prompt, SamplingParams(max_tokens=rng.randint(2, 9))))
        finished: list[str] = []
        most = 0
        for _ in range(400):
            done = sweep.act(shared.step)
            most = max(most, len(shared.active))
            finished += [output.id for step in done.values() for output in step.finished]
            for engine in engines.values():
                for ticket in list(engine.pool.flying):
                    engine.pool.join(ticket)
            if not shared.unfinished:
                break
        assert not shared.unfinished and not any(engine.pool.held for engine in engines.values())
        assert len(set(finished)) == len(finished) >= 10 and (most > 1 or sweep.where)

    return play


def test_whoever_runs_the_engines_next_finds_them_open() -> None:
    """A guest may have been closed when the last request ended, or when something ended the run."""
    session = Switched()
    engines = {name: Member(name, ContentPool(9, 40, random.Random(1)), session) for name in "ab"}
    session.tenants.update({name: engine.tenant for name, engine in engines.items()})
    ticks = iter(range(1 << 30))
    engines["b"].scheduler.closed = True
    shared = SharedEngines(session, engines, quantum_s=300, clock=lambda: float(next(ticks)))
    assert not engines["b"].scheduler.closed
    engines["a"].add_request(Request("r", (1, 2, 3), SamplingParams(max_tokens=9)))
    shared.step()
    engines["b"].scheduler.closed = True
    while shared.unfinished:
        shared.step()
    assert not engines["b"].scheduler.closed


def test_a_guest_that_had_to_give_blocks_asks_for_none() -> None:
    session, asked = Switched(), []
    engines = {name: Member(name, ContentPool(200, 400, random.Random(1)), session) for name in "ab"}
    session.tenants.update({name: engine.tenant for name, engine in engines.items()})
    vars(session).update(step=lambda demand: asked.append(set(demand)) or Switched.step(session, demand))
    shared = SharedEngines(session, engines, quantum_s=math.inf)
    for name, engine in engines.items():
        engine.add_request(Request(name, (1, 2, 3), SamplingParams(max_tokens=9)))
    for closed in (False, True, False):
        engines["b"].scheduler.closed = closed
        shared.step()
    assert asked == [{"a", "b"}, {"a"}, {"a", "b"}]


def test_where_one_model_is_awake_at_a_time_nobody_is_a_guest() -> None:
    session = Switched()
    session.one_at_a_time = True
    engines = {name: Member(name, ContentPool(9, 40, random.Random(1)), session) for name in "ab"}
    session.tenants.update({name: engine.tenant for name, engine in engines.items()})
    ticks = iter(range(1 << 30))
    shared = SharedEngines(session, engines, quantum_s=30, clock=lambda: float(next(ticks)))
    for name, engine in engines.items():
        engine.add_request(Request(name, (1, 2, 3), SamplingParams(max_tokens=9)))
    seen = set()
    while shared.unfinished:
        shared.step()
        seen.add(shared.active)
    assert seen == {("a",), ("b",)}


@pytest.mark.parametrize("seed", range(2))
def test_epochs_go_on_after_an_interrupt_at_any_line(seed: int) -> None:
    assert Sweep("remap_serve/engine/sharing.py", "remap_serve/engine/guests.py")(epochs(seed)) > some(60, 120)


@pytest.mark.parametrize("seed", [1, 7])
@pytest.mark.parametrize("policy", ["remap", "kv-pool+swap"])
def test_all_are_served_where_a_tenant_is_prepared_for_its_turn_and_becomes_a_guest(policy: str, seed: int) -> None:
    """Its preparation ended then as if it had nothing to do, and its next pass found it inactive."""
    inputs = prepare(Options("GH200-96GB", "C2", rate="3", requests=80, seed=seed, policies=policy))
    assert inputs.setup.sharing == "epochs"
    result = simulate(inputs.setup, inputs.items, policy)
    assert result.requests_finished == result.requests == 80
