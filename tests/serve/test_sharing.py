"""Several engines on one arena: turns, rounds, one session call a step, preemption for an activation, and the same tokens."""

from __future__ import annotations

import itertools
import math
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remap.internals import internals

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fakes import CountingPool, FakeKV, FakeTenant  # noqa: E402
from near_tokens import near_tokens  # noqa: E402
from test_engine_runner import LAYERS, VOCAB, make_model  # noqa: E402

from remap.errors import InvalidArgument, InvalidState, OutOfBlocks  # noqa: E402
from remap.policy.turns import Turns  # noqa: E402
from remap_serve.cli.shared_world import SMALL, build  # noqa: E402
from remap_serve.engine import LLMEngine, Request, SamplingParams, Scheduler, SharedEngines  # noqa: E402
from remap_serve.engine.request import RequestState, Sequence  # noqa: E402

KINDS = {"a": "llama", "b": "qwen3", "c": "opt"}


class Pages(FakeKV):
    """A pool that gives free blocks back to whoever owns the memory."""

    def shrink(self, n: int) -> int:
        """Take up to `n` free blocks away; how many."""
        gone, self.free_ids = self.free_ids[:n], self.free_ids[n:]
        self.hidden_ids += gone
        return len(gone)


class SwitchedTenant(FakeTenant):
    """Runs passes while it is active only."""

    away_pages, reload_s, cold, targets, streamed = 0, 0.0, (), (None, None), ()

    def __init__(self, name: str, kv: Pages) -> None:
        super().__init__(LAYERS, kv, name)
        self.active = True

    @contextmanager
    def forward(self, phase: str = "decode", tokens: int = 0, streamed: object = ()):
        if not self.active:
            raise InvalidState(f"{self.name} is inactive")
        with super().forward(phase, tokens):
            yield


@dataclass
class Report:
    changed: bool = False
    moved: dict = field(default_factory=dict)
    activated: bool = True
    preempt: dict = field(default_factory=dict)
    predicted_stall_s: float = 0.25
    restored: tuple = (1, 2)
    streamed: tuple = (0,)
    reason: str = "live blocks of others stand in the way"
    wanted: dict = field(default_factory=dict)
    unmet_blocks: dict = field(default_factory=dict)


class ArenaDouble:
    """One pot of blocks. An inactive tenant's weights are worth `weights` blocks of anybody; its activation takes them back,
    from the pot, from free blocks of others, and in the end by naming blocks that others must free first. Any call may move
    anybody's blocks, and `move` says how often.
    """

    broker = ""

    def __init__(self, tenants, *, weights=0, pot=0, move=0.0, seed=0):
        self.tenants = tenants
        self.weights = weights
        self.pot = pot
        self.move = move
        self.rng = random.Random(seed)
        self.demands = []
        self.asked_to_preempt = 0
        self.never = ()  # cannot be activated

    def step(self, demands):
        assert all(self.tenants[name].active for name in demands)
        self.demands.append({name: demand.blocks for name, demand in demands.items()})
        for name, demand in demands.items():
            kv = self.tenants[name].kv
            self.pot -= self._grow(kv, min(demand.blocks - kv.free_blocks, self.pot))
        return Report(moved=self._moves())

    def activate(self, name, *, alone=False, partial=False):
        asleep = [one for other, one in self.tenants.items() if alone and other != name and one.active]
        for one in asleep:
            one.active = False
        try:
            if self.tenants[name].active:
                return Report(moved=self._moves())
            others = [one for other, one in self.tenants.items() if other != name]
            for one in others:
                self.pot += one.kv.shrink(max(0, self.weights - self.pot))
            preempt, missing = {}, self.weights - self.pot
            for one in others:
                ids = sorted(one.kv.held)[: max(0, missing)]
                missing -= len(ids)
                if ids:
                    preempt[one.name] = tuple(ids)
            if name in self.never:
                return Report(activated=False)
            if self.pot < self.weights and not partial:
                self.asked_to_preempt += 1
                return Report(activated=False, preempt=preempt, moved=self._moves(set(preempt)))
            self.pot = max(0, self.pot - self.weights)
            self.tenants[name].active = True
            return Report(moved=self._moves())
        finally:  # what those who were just made inactive have is for later calls
            self.pot += self.weights * len(asleep)

    def deactivate(self, name):
        self.pot += self.weights * self.tenants[name].active
        self.tenants[name].active = False

    def snapshot(self):
        return SimpleNamespace(
            tenants={name: SimpleNamespace(stall_s=0.5, active=one.active) for name, one in self.tenants.items()}
        )

    def _grow(self, kv, n):
        before = kv.free_blocks
        kv.grow(max(0, n))
        return kv.free_blocks - before

    def _moves(self, but=frozenset()):
        if self.rng.random() >= self.move:
            return {}
        return {name: tenant.kv.shuffle() for name, tenant in self.tenants.items() if name not in but}


def pool_for(kind, blocks, max_blocks=0):
    config = make_model(kind).config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Pages(layers=LAYERS, kv_heads=heads, head_dim=head_dim, blocks=blocks, max_blocks=max_blocks)


def tenants_for(blocks, max_blocks=0, names="abc"):
    return {name: SwitchedTenant(name, pool_for(KINDS[name], blocks, max_blocks)) for name in names}


def engines_for(tenants, session=None, **more):
    given = {"max_num_seqs": 5, "max_batch_tokens": 60, **more}
    return {
        name: LLMEngine(make_model(KINDS[name]), tenant, session=session, **given) for name, tenant in tenants.items()
    }


def requests_for(seed, count=5, names="abc", spread=0.0):
    rng = random.Random(seed)
    made = {}
    for name in names:
        made[name] = [
            Request(
                f"r{index}",  # the same ids at every tenant: they are names of their own
                tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(4, 20))),
                SamplingParams(max_tokens=rng.randint(2, 12)),
                arrival_s=rng.uniform(0, spread),
            )
            for index in range(count)
        ]
    return made


def alone(requests):
    """Each tenant's requests on an engine of its own with memory for all: what every run must generate."""
    expected = {}
    for name, mine in requests.items():
        model = make_model(KINDS[name])
        engine = LLMEngine(model, SwitchedTenant(name, pool_for(KINDS[name], 200)), max_num_seqs=4)
        expected[name] = near_tokens(model, mine, engine.run(mine).outputs)
    return expected


class Clock:
    """Every look costs a millisecond."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(("link_s", "seen_s"), [(0.0, 0.04), (0.0, 0.08), (0.07, 0.03)])
def test_a_turn_is_prepared_so_long_before_as_its_layers_need(link_s, seen_s):
    """As it took before; as the link says before anything was seen."""
    clock, tenants, activations = Clock(), tenants_for(60, names="ab"), []
    session = ArenaDouble(tenants)
    there = dict.fromkeys("ab", 0.0)
    for name, tenant in tenants.items():
        tenant.ready = lambda layer, name=name: clock.now >= there[name]
        internals(tenant).away_pages, tenant.reload_s = 10, link_s

    def activate(name, *, alone=False, partial=False):
        clock.now += 1e-9
        activations.append((clock.now, name, alone))
        for other, tenant in tenants.items():
            if other == name and internals(tenant).away_pages:
                internals(tenant).away_pages, there[name] = 0, clock.now + seen_s
            elif other != name and alone:
                tenant.away_pages = 10
        return ArenaDouble.activate(session, name, alone=alone, partial=partial)

    session.activate = activate
    engines = engines_for(tenants, session, clock=clock)
    shared = SharedEngines(session, engines, "temporal", quantum_s=0.2, clock=clock, sleep=clock.sleep)
    shared._prepares = True  # as if host memory had room for KV
    shared.run({name: [Request("r", (1, 2, 3), SamplingParams(max_tokens=100))] for name in "ab"})
    turns = [(time_s, name) for time_s, name, alone in activations if alone]
    assert len(turns) >= 6
    for (began, _), (ended, name) in list(zip(turns, turns[1:], strict=False))[1:4]:
        prepared = [time_s for time_s, other, alone in activations if not alone and began < time_s < ended]
        assert [other for time_s, other, alone in activations if time_s in prepared] == [name]
        step_s = 0.01  # at most, of this clock
        assert began + 0.2 - seen_s - step_s <= prepared[0] <= began + 0.2 - seen_s + step_s


@pytest.mark.parametrize("mode", ["epochs", "temporal", "spatial"])
@pytest.mark.parametrize("blocks", [9, 100])
def test_baseline_generates_what_each_engine_does_alone(mode, blocks):
    requests = requests_for(1)
    tenants = tenants_for(blocks)
    result = SharedEngines(None, engines_for(tenants), mode, quantum_s=0.0).run(requests)
    assert result.different(alone(requests)) == []
    assert all(not tenant.kv.held for tenant in tenants.values())
    summary = result.summary()
    assert summary["requests"] == 15
    assert (summary["preemptions"] > 0) == (blocks == 9)
    assert summary["preemptions"] == sum(one["preemptions"] for one in summary["tenants"].values())
    assert summary["generated_tokens"] == sum(len(ids) for mine in result.tokens().values() for ids in mine.values())


def test_turns_of_no_end_drain():
    """A turn ends when its model is out of work, however long that is: as many turns as models, where all is there at once."""
    requests = requests_for(1)
    ran = []
    shared = SharedEngines(None, engines_for(tenants_for(100)), "temporal", quantum_s=math.inf)
    result = shared.run(requests, on_step=lambda _, done: ran.extend(done))
    assert result.different(alone(requests)) == []
    assert (
        [name for name, _ in itertools.groupby(ran)] == list(requests) == [turn.tenant for turn in result.activations]
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["epochs", "temporal", "spatial"])
def test_tokens_are_the_same_whatever_is_lent_moved_and_preempted(mode, seed):
    requests = requests_for(seed, spread=0.05)
    tenants = tenants_for(9, max_blocks=80)
    session = ArenaDouble(tenants, weights=8, pot=0, move=0.3, seed=seed)
    if mode == "spatial":
        tenants["c"].active = False  # attached inactive: a round activates it
        session.pot = 8
    shared = SharedEngines(session, engines_for(tenants, session), mode, quantum_s=0.004, partial=seed % 2 == 0)
    result = shared.run(requests)
    assert result.different(alone(requests)) == []
    assert all(not tenant.kv.held for tenant in tenants.values())
    if mode == "temporal":
        assert sum(tenant.active for tenant in tenants.values()) == 1
        assert len(result.activations) > 2
    elif mode == "epochs":
        assert any(len(sample.active) > 1 for sample in result.timeline)
    else:
        assert all(tenant.active for tenant in tenants.values())
    assert result.stall_s == {"a": 0.0, "b": 0.0, "c": 0.0}  # the double's stalls do not grow


def test_requests_that_come_at_one_time_are_served_in_the_order_given():
    shared = SharedEngines(None, engines_for(tenants_for(80, names="a"), max_num_seqs=1), "spatial")
    finished = []
    shared.run(
        requests_for(1, names="a", spread=0.0),
        on_step=lambda _, done: finished.extend(out.id for step in done.values() for out in step.finished),
    )
    assert finished == ["r0", "r1", "r2", "r3", "r4"]


def test_an_activation_preempts_exactly_those_who_hold_what_it_needs():
    requests = requests_for(3, count=4, names="ab")
    tenants = tenants_for(9, max_blocks=80, names="ab")
    session = ArenaDouble(tenants, weights=20, pot=0)
    shared = SharedEngines(session, engines_for(tenants, session), "temporal", quantum_s=0.0, partial=False)
    result = shared.run(requests)
    assert session.asked_to_preempt > 0
    assert result.different(alone(requests)) == []
    asked = sum(one.preempted_requests for one in result.activations)
    assert 0 < asked <= result.summary()["preemptions"]
    assert result.summary()["recomputed_tokens"] > 0
    seen = {(one.restored_layers, one.predicted_stall_s) for one in result.activations}
    assert seen == {(2, 0.25)}
    partial = ArenaDouble(tenants_for(9, max_blocks=80, names="ab"), weights=20)
    shared = SharedEngines(partial, engines_for(partial.tenants, partial), "temporal", quantum_s=0.0)
    result = shared.run(requests)
    assert partial.asked_to_preempt == 0
    assert result.different(alone(requests)) == []
    assert not any(one.preempted_requests for one in result.activations)


def test_a_step_asks_the_session_once_for_everybody_who_is_active():
    for mode in ("epochs", "temporal", "spatial"):
        requests = requests_for(5, count=3)
        tenants = tenants_for(60)
        session = ArenaDouble(tenants)
        shared = SharedEngines(session, engines_for(tenants, session), mode, quantum_s=0.003)
        result = shared.run(requests)
        assert len(session.demands) == len(result.timeline)
        for demand, sample in zip(session.demands, result.timeline, strict=True):
            assert set(sample.active) <= set(demand)
        assert max(map(len, session.demands)) == (1 if mode == "temporal" else 3)
        # More than one tenant was told what it may have: the demand is the scheduler's own.
        assert max(max(demand.values()) for demand in session.demands) > 0


def test_turns_go_round_and_last_a_quantum():
    clock = Clock()
    requests = {name: [Request("r", (1, 2, 3), SamplingParams(max_tokens=100))] for name in "abc"}
    engines = engines_for(tenants_for(60), clock=clock)
    result = SharedEngines(None, engines, "temporal", quantum_s=0.05, clock=clock, sleep=clock.sleep).run(requests)
    turns = [one.tenant for one in result.activations]
    assert turns == [*"abc" * (len(turns) // 3 + 1)][: len(turns)]
    assert len(turns) >= 9
    lengths = [b.time_s - a.time_s for a, b in zip(result.activations, result.activations[1:], strict=False)]
    assert all(0.05 <= length < 0.08 for length in lengths[:6])  # a step takes some milliseconds of this clock
    # A gap between two tokens that spans the others' turns is one: who waits for his turn waits for his token.
    assert result.summary()["tbt_p99_s"] > 0.1
    assert all(one.first_pass_s is not None and one.first_pass_s > one.seconds for one in result.activations)


def test_turns_go_by_what_is_due():
    """a has all day. b and c come later, c first, and b's token is due first: a goes on until b has to begin, and c follows."""
    clock = Clock()
    requests = {
        "a": [Request(f"long {i}", (1, 2, 3), SamplingParams(max_tokens=100), arrival_s=i / 5) for i in range(3)],
        "b": [Request("soon", (4, 5), SamplingParams(max_tokens=2), arrival_s=0.06)],
        "c": [Request("later", (4, 5), SamplingParams(max_tokens=2), arrival_s=0.05)],
    }
    tenants = tenants_for(60)
    for name, target in {"a": (None, None), "b": (0.3, None), "c": (0.6, 0.1)}.items():
        tenants[name].targets = target
    engines = engines_for(tenants, clock=clock)
    shared = SharedEngines(None, engines, "temporal", turns=Turns(math.inf), clock=clock, sleep=clock.sleep)
    result = shared.run(requests)
    assert result.different(alone(requests)) == []
    assert [one.tenant for one in result.activations] == ["a", "b", "c", "a"]
    assert 0.2 < result.metrics["b"].ttft_s[0] <= 0.3 and result.metrics["c"].ttft_s[0] <= 0.6


def test_a_turn_ends_early_without_work_and_lasts_on_alone():
    clock = Clock()
    requests = {
        "a": [Request("long", (1, 2, 3), SamplingParams(max_tokens=60))],
        "b": [Request("short", (4, 5), SamplingParams(max_tokens=2), arrival_s=0.05)],
        "c": [],
    }
    engines = engines_for(tenants_for(60), clock=clock)
    result = SharedEngines(None, engines, "temporal", quantum_s=0.1, clock=clock, sleep=clock.sleep).run(requests)
    assert [one.tenant for one in result.activations] == ["a", "b", "a"]
    back = result.activations[2].time_s - result.activations[1].time_s
    assert back < 0.05  # two tokens, not a quantum
    # Queueing counts: b's only request waited for a's turn to end.
    assert result.metrics["b"].ttft_s[0] > 0.04


def test_one_that_gets_nothing_done_yields_its_turn():
    """b's blocks are all held by nobody but its pool is too small until a frees: no progress, so a goes on and finishes."""
    requests = {
        "a": [Request("r", (1,) * 8, SamplingParams(max_tokens=12))],
        "b": [Request("r", (2,) * 30, SamplingParams(max_tokens=2))],
    }
    tenants = tenants_for(5, max_blocks=60, names="ab")
    session = ArenaDouble(tenants)

    def free_for_b(shared, done):
        if "a" in done and done["a"].finished:
            session.pot = 20

    shared = SharedEngines(session, engines_for(tenants, session), "temporal", quantum_s=1e-4)
    result = shared.run(requests, free_for_b)
    assert result.different(alone(requests)) == []
    assert [one.tenant for one in result.activations][:3] == ["a", "b", "a"]
    assert any(one.tenant == "b" and one.first_pass_s is None for one in result.activations)


def test_activation_that_never_succeeds_is_an_error_and_the_turn_is_the_former_ones():
    tenants = tenants_for(30, names="ab")
    session = ArenaDouble(tenants)
    shared = SharedEngines(session, engines_for(tenants, session), "temporal", quantum_s=0.0)
    for engine in shared.engines.values():
        engine.add_request(Request("r", (1, 2, 3), SamplingParams(max_tokens=6)))
    shared.step()
    session.never = ("b",)
    with pytest.raises(InvalidState, match="stand in the way") as caught:
        shared.step()
    assert (caught.value.tenant, shared.active, tenants["a"].active) == ("b", ("a",), True)
    session.never = ("a", "b")
    with pytest.raises(InvalidState):
        shared.step()
    assert shared.active == ()
    session.never = ("b",)
    shared.engines["b"].abort("r")
    while shared.unfinished:  # a goes on from where it was
        shared.step()
    assert not tenants["a"].kv.held
    assert shared.engines["a"].metrics.preemptions == 0


def test_an_interrupt_while_the_turn_is_handed_over_leaves_it_with_nobody_and_the_next_step_goes_on():
    tenants = tenants_for(40, names="ab")
    session = ArenaDouble(tenants)
    shared = SharedEngines(session, engines_for(tenants, session), "temporal", quantum_s=0.0)
    for name in "ab":
        shared.engines[name].add_request(Request("r", (1, 2, 3), SamplingParams(max_tokens=4)))
    shared.step()
    assert shared.active == ("a",)
    activate = session.activate

    def interrupted(name, **named):
        activate(name, **named)  # it has happened: a is inactive by now
        raise KeyboardInterrupt

    session.activate = interrupted
    with pytest.raises(KeyboardInterrupt):
        shared.step()
    session.activate = activate
    assert shared.active == ()
    while shared.unfinished:
        shared.step()
    assert all(engine.metrics.finished == 1 for engine in shared.engines.values())


def test_a_request_that_can_never_run_is_an_error_not_a_loop():
    tenants = tenants_for(4, max_blocks=60, names="ab")
    session = ArenaDouble(tenants)
    shared = SharedEngines(session, engines_for(tenants, session), quantum_s=0.0)
    with pytest.raises(OutOfBlocks):
        shared.run({name: [Request("r", (1,) * 30, SamplingParams(max_tokens=2))] for name in "ab"})


def test_refusals():
    tenants = tenants_for(10, names="ab")
    engines = engines_for(tenants)
    for wrong in ({"mode": "both"}, {"quantum_s": -1.0}, {"quantum_s": float("nan")}):
        with pytest.raises(InvalidArgument):
            SharedEngines(None, engines, **wrong)
    with pytest.raises(InvalidArgument):
        SharedEngines(None, {})
    with pytest.raises(InvalidArgument) as caught:
        SharedEngines(ArenaDouble(tenants), engines)
    assert caught.value.engine == "a"
    with pytest.raises(InvalidArgument):
        SharedEngines(None, {"b": engines["a"]})
    with pytest.raises(InvalidArgument) as caught:
        SharedEngines(None, engines).run({"z": []})
    assert caught.value.tenant == "z"


def test_results_name_every_difference():
    requests = requests_for(2, count=2, names="ab")
    result = SharedEngines(None, engines_for(tenants_for(60, names="ab"))).run(requests)
    expected = result.tokens()
    assert result.different(expected) == []
    expected["a"]["r0"] = (*expected["a"]["r0"], 1)
    del expected["b"]["r1"]
    expected["c"] = {"r9": (1,)}
    assert result.different(expected) == [("a", "r0"), ("b", "r1"), ("c", "r9")]


# --- the scheduler's part ---------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32), blocks=st.integers(6, 30))
def test_preempting_anybody_keeps_both_queues_in_order(seed, blocks):
    rng = random.Random(seed)
    pool = CountingPool(blocks, 4)
    scheduler = Scheduler(block_tokens=4, max_num_seqs=4, max_batch_tokens=24, chunk_align=1)
    order = 0
    for _ in range(60):
        if rng.random() < 0.4 and order < 12:
            request = Request(f"r{order}", (7,) * rng.randint(1, 12), SamplingParams(max_tokens=rng.randint(1, 6)))
            scheduler.add(Sequence.of(request, order))
            order += 1
        if scheduler.running and rng.random() < 0.3:
            victim = rng.choice(scheduler.running)
            scheduler.preempt(victim, pool)
            assert victim.state is RequestState.WAITING
            assert not victim.blocks
            assert victim.computed == 0
        for chunk in scheduler.schedule(pool).chunks:
            scheduler.commit(chunk)
            if chunk.samples and chunk.sequence.append(1):
                scheduler.finish(chunk.sequence, pool)
        for queue in (scheduler.running, scheduler.waiting):
            assert [one.order for one in queue] == sorted(one.order for one in queue)
        held = [block for one in scheduler.running for block in one.blocks]
        assert sorted(held) == sorted(pool.held)


@pytest.mark.parametrize("spec", SMALL.models, ids=lambda spec: spec.name)
@pytest.mark.parametrize("others", [0, 3])
def test_recomputed_tokens_get_the_values_that_they_had(spec, others):
    """Up to rounding, in every layer's KV: prompt and generated tokens, beside others or alone, whatever the chunks are."""
    model, _ = build(spec, "float32", seed=1)
    kv = Pages(layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.hidden // spec.heads, blocks=120)
    tenant = SwitchedTenant("a", kv)
    engine = LLMEngine(model, tenant, max_batch_tokens=64)
    engine.add_request(Request("r", (5,) + (7, 11) * 17, SamplingParams(max_tokens=60)))
    for index in range(others):
        engine.add_request(Request(f"o{index}", (index + 1,) * (20 + index), SamplingParams(max_tokens=90)))
    sequence = next(one for one in engine.scheduler.waiting if one.request.id == "r")

    def kept():
        rows = [tensor[:, sequence.blocks].flatten(1, 2)[:, : sequence.computed] for tensor in tenant.kv.tensors]
        return [row.clone() for row in rows]

    while sequence.generated < 50:  # past a padded length of 64
        engine.advance()
    before, computed = kept(), sequence.computed
    engine.scheduler.preempt(sequence, tenant.kv)
    assert sequence.computed == 0
    while sequence.computed < computed:
        engine.advance()
    assert engine.metrics.recomputed_tokens == computed
    for was, now in zip(before, kept(), strict=True):
        torch.testing.assert_close(now[:, :computed], was, rtol=1e-4, atol=1e-4)


def test_engine_preempts_as_many_of_the_youngest_requests_as_free_so_many_blocks():
    tenant = SwitchedTenant("a", pool_for("llama", 40))
    engine = engines_for({"a": tenant})["a"]
    for index in range(3):
        engine.add_request(Request(f"r{index}", (index + 1,) * 9, SamplingParams(max_tokens=5)))
    engine.step()
    first, _, third = engine.scheduler.running
    assert engine.preempt(len(third.blocks) + 1) == ("r2", "r1")
    assert engine.scheduler.running == [first]
    assert [one.request.id for one in engine.scheduler.waiting] == ["r1", "r2"]
    assert tenant.kv.held == set(first.blocks)
    assert engine.metrics.preemptions == 2
    assert engine.preempt(0) == ()
    assert engine.preempt(10_000) == ("r0",)


def test_blocks_that_stream_free_nothing_when_their_request_is_preempted():
    tenant = SwitchedTenant("a", pool_for("llama", 40))
    engine = engines_for({"a": tenant})["a"]
    for index in range(2):
        engine.add_request(Request(f"r{index}", (index + 1,) * 9, SamplingParams(max_tokens=5)))
    engine.step()
    youngest = engine.scheduler.running[-1]
    youngest.streamed = 1
    assert engine.preempt(len(youngest.blocks)) == ("r1", "r0")
