"""The engine on a real session: the same tokens with ample memory, with scarce memory, and with scarce memory and remap.

Baseline and remap start with the same pool. The baseline preempts and recomputes; remap grows, moves blocks, shrinks and
grows again, and changes no token.
"""

from __future__ import annotations

import random

import pytest

import remap

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import VOCAB, Rig, kv_spec, make, poison  # noqa: E402

from remap.engine import LLMEngine, Request, SamplingParams  # noqa: E402

# Growth is decided by demand alone: on a tiny model no copy hides behind a computation.
EAGER = remap.advanced.Knobs(slowdown=1e6, contention=1e6, dwell=1, reserve_blocks=0, hysteresis_blocks=0)
STEADY = remap.advanced.Knobs(slowdown=1e6)
LAYOUTS = ("block_major", "layer_major")


def requests_for(seed, count=12, low=12, high=40, tokens=14):
    rng = random.Random(seed)
    made = []
    for index in range(count):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(low, high))]
        made.append(Request(f"r{index}", tuple(prompt), SamplingParams(max_tokens=rng.randint(2, tokens))))
    return made


def run(rig, requests, session=None, *, each_step=None, **engine):
    """Tokens by request and the metrics; after each step the invariants hold and free blocks are poisoned."""

    def checked(engine, step):
        remap.advanced.check(rig.session)
        poison(rig.kv)
        if each_step is not None:
            each_step(engine)

    engine = LLMEngine(rig.model, rig.tenant, session=session, **{"max_num_seqs": 8, "max_batch_tokens": 60, **engine})
    result = engine.run(requests, checked)
    assert rig.kv.live_blocks == 0
    return {id: output.tokens for id, output in result.outputs.items()}, result.metrics


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "opt"])
def test_tokens_are_those_of_the_unconstrained_engine(kind, layout):
    model = make(kind)
    requests = requests_for(kind)
    with Rig(model, kv=kv_spec(model, min_blocks=100, layout=layout)) as rig:
        rig.hooks.remove()
        expected, metrics = run(rig, requests)
        assert metrics.preemptions == 0
    scarce = kv_spec(model, min_blocks=14, layout=layout)
    with Rig(model, kv=scarce) as rig:
        rig.hooks.remove()
        tokens, baseline = run(rig, requests)
        assert tokens == expected
        assert baseline.preemptions > 0
        assert baseline.recomputed_tokens > 0
        assert rig.tenant.remapped == 0
    with Rig(model, kv=scarce, config=STEADY) as rig:
        rig.hooks.remove()
        tokens, grown = run(rig, requests, rig.session)
        assert tokens == expected
        assert grown.preemptions == 0
        summary = grown.summary()
        assert summary["kv_blocks_start"] == baseline.summary()["kv_blocks_start"] < summary["kv_blocks_peak"]
        assert summary["layers_remapped_peak"] > 0
        assert rig.session.snapshot().tenants["m"].copies > 0


@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("seed", range(3))
def test_random_changes_between_steps(seed, mode):
    """`remap` by hand between engine steps: grow, shrink, other sets and buffers; tables follow `moved`."""
    rng = random.Random(f"{seed}{mode}")
    model = make(rng.choice(["llama", "qwen3", "opt"]), seed)
    requests = requests_for(seed, count=16)
    with Rig(model, kv=kv_spec(model, min_blocks=120)) as rig:
        rig.hooks.remove()
        expected, _ = run(rig, requests)
    moves = changes = 0

    def shake(engine):
        nonlocal moves, changes
        if rng.random() < 0.5:
            return
        buffers = rng.choice([1, 2])
        try:
            report = remap.advanced.remap(
                rig.session, "m", rng.randint(0, 6 - buffers), buffers, rng.choice(["uniform", "nested"])
            )
        except remap.OutOfBlocks:
            return
        moved = report.moved.get("m", {})
        engine.scheduler.relocate(moved)
        moves += len(moved)
        changes += 1
        remap.advanced.check(rig.session)
        poison(rig.kv)

    layout = rng.choice(LAYOUTS)
    page = (
        4096 if layout == "layer_major" else rng.choice([16384, 65536])
    )  # a group of blocks is 2 x layers pages there
    kv = kv_spec(model, min_blocks=16, layout=layout)
    with Rig(model, kv=kv, mode=mode, page_bytes=page, spare=rng.randint(0, 2)) as rig:
        rig.hooks.remove()
        tokens, _ = run(rig, requests, each_step=shake, max_num_seqs=rng.randint(4, 8))
    assert tokens == expected
    assert moves > 0
    assert changes > 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_controller_shrinks_while_requests_run(layout):
    """A burst, then a trickle: layers come back during the trickle, and live blocks move out of their pages."""
    model = make("llama")
    requests = [*requests_for(1, count=8, low=20, high=30)]
    requests += [Request("long", tuple(range(1, 9)), SamplingParams(max_tokens=100))]
    with Rig(model, kv=kv_spec(model, min_blocks=120, layout=layout)) as rig:
        rig.hooks.remove()
        expected, _ = run(rig, requests, max_num_seqs=9, max_batch_tokens=300)
    moved = []
    with Rig(model, kv=kv_spec(model, min_blocks=30, layout=layout), config=EAGER) as rig:
        rig.hooks.remove()
        session = Recording(rig.session, moved)
        tokens, metrics = run(rig, requests, session, max_num_seqs=9, max_batch_tokens=300)
        levels = [sample.layers_remapped for sample in metrics.timeline]
        assert tokens == expected
        assert max(levels) > 0
        assert levels[-1] < max(levels)
    assert any(moved)


class Recording:
    """A session whose moves are counted. The report names a tenant's level only when something changed: ask for it."""

    def __init__(self, session, moved):
        self.session = session
        self.moved = moved

    def step(self, demand):
        report = self.session.step(demand)
        self.moved.append(sum(map(len, report.moved.values())))
        return report


@pytest.mark.parametrize("seed", range(4))
def test_random_interleavings_of_arrivals_steps_and_aborts(seed):
    """Requests come and go at random while the controller acts at its most nervous; each token is the lone request's."""
    rng = random.Random(seed)
    model = make(rng.choice(["llama-odd", "qwen2", "opt-odd"]), seed)
    requests = requests_for(100 + seed, count=14)
    with Rig(model, kv=kv_spec(model, min_blocks=150)) as rig:
        rig.hooks.remove()
        expected, _ = run(rig, requests)
    kv = kv_spec(model, min_blocks=12, layout=rng.choice(LAYOUTS), block_tokens=rng.choice([2, 4, 8]))
    with Rig(model, kv=kv, mode=rng.choice(["aliased", "strict"]), config=EAGER, spare=rng.randint(0, 2)) as rig:
        rig.hooks.remove()
        engine = LLMEngine(model, rig.tenant, session=rig.session, max_num_seqs=5, max_batch_tokens=rng.randint(12, 60))
        pending, outputs, aborted = list(requests), {}, set()
        while pending or engine.unfinished:
            for _ in range(rng.choice([0, 0, 1, 3])):
                if pending:
                    engine.add_request(pending.pop(0))
            outputs.update((output.id, output) for output in engine.step().finished)
            remap.advanced.check(rig.session)
            poison(rig.kv)
            if engine.scheduler.running and rng.random() < 0.05:
                victim = rng.choice(engine.scheduler.running).request.id
                outputs[victim] = engine.abort(victim)
                aborted.add(victim)
        assert rig.kv.live_blocks == 0
        assert rig.session.snapshot().tenants["m"].copies > 0
    for id, output in outputs.items():
        assert output.tokens == expected[id][: len(output.tokens)]
        assert id in aborted or output.tokens == expected[id]


def test_a_session_that_may_not_grow_behaves_like_the_baseline():
    model = make("qwen2")
    requests = requests_for(5)
    kv = kv_spec(model, min_blocks=14)
    with Rig(model, kv=kv) as rig:
        rig.hooks.remove()
        expected, baseline = run(rig, requests)
    with Rig(model, kv=kv, config=remap.advanced.Knobs(max_layers=0)) as rig:
        rig.hooks.remove()
        tokens, capped = run(rig, requests, rig.session)
        assert rig.tenant.remapped == 0
    assert tokens == expected
    assert capped.preemptions == baseline.preemptions > 0
