"""The engine on a real session, with the runner for CPUs and the one for devices: the same tokens with ample memory, with scarce
memory, and with scarce memory and remap.

Baseline and remap start with the same pool. The baseline preempts and recomputes; remap grows, moves blocks, shrinks and
grows again, and changes no token. Recordings of the runner for devices are frozen (see recordings.py): none is made anew when
the remapping changes, so a layer whose tensors moved, or a pass that did not wait for a streamed layer, shows as a wrong token.
"""

from __future__ import annotations

import itertools
import random
from contextlib import contextmanager
from dataclasses import replace

import pytest
from effort import LONG, some

import remap

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import VOCAB, Rig, kv_spec, make, poison  # noqa: E402
from near_tokens import Near  # noqa: E402
from recordings import FrozenGraphs, StaticPaged  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from remap_serve.engine import LLMEngine, Request, SamplingParams  # noqa: E402
from remap_serve.engine import gpu_runner as module  # noqa: E402

# Growth is decided by demand alone: on a tiny model no copy hides behind a computation.
EAGER = remap.advanced.Knobs(slowdown=1e6, contention=1e6, dwell=1, reserve_blocks=0, hysteresis_blocks=0)
STEADY = remap.advanced.Knobs(slowdown=1e6)
LAYOUTS = ("block_major", "layer_major")
GPU_TOO = [(0, "strict"), (1, "aliased")]


def slow(*values):
    """Parameters of a slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)


@contextmanager
def unhooked(model, **rig):
    """A model in a session of its own; the engine brackets its layers itself."""
    with Rig(model, **rig) as made:
        made.hooks.remove()
        yield made


@pytest.fixture
def frozen(monkeypatch):
    made = []

    def graphs():
        made.append(FrozenGraphs())
        return made[-1]

    monkeypatch.setattr(module, "EagerGraphs", graphs)
    monkeypatch.setattr(
        module, "choose_attention", lambda name, tensors, heads, scale, **_: StaticPaged(tensors, heads, scale)
    )
    return made


def requests_for(seed, count=12, low=12, high=40, tokens=14):
    rng = random.Random(seed)
    made = []
    for index in range(count):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(low, high))]
        made.append(Request(f"r{index}", tuple(prompt), SamplingParams(max_tokens=rng.randint(2, tokens))))
    return made


def run(rig, requests, session=None, *, each_step=lambda engine: None, **options):
    """Tokens by request, the metrics and the runner; after each step the invariants hold and free blocks are poisoned."""

    def checked(engine, step):
        remap.advanced.check(rig.session)
        poison(rig.kv)
        each_step(engine)

    engine = LLMEngine(rig.model, rig.tenant, session=session, **{"max_num_seqs": 8, "max_batch_tokens": 60, **options})
    result = engine.run(requests, checked)
    assert rig.kv.live_blocks == 0
    return {id: output.tokens for id, output in result.outputs.items()}, result.metrics, engine.runner


def reference(model, requests, **kv):
    """The CPU runner's tokens, with blocks for everybody."""
    with unhooked(model, kv=kv_spec(model, min_blocks=150, **kv)) as rig:
        tokens, metrics, _ = run(rig, requests)
        assert metrics.preemptions == 0
        return {one.id: Near(model, one, tokens[one.id]) for one in requests}


@pytest.mark.parametrize(
    ("kind", "runner", "layout"),
    [
        *(
            (kind, "cpu", layout)
            for place, kind in enumerate(("llama", "qwen2", "qwen3", "opt", "gpt2"))
            for layout in LAYOUTS
            if LONG or kind == "llama" or layout == LAYOUTS[place % 2]
        ),
        *((kind, "gpu", "block_major") for kind in ("qwen2", "qwen3")),  # without recordings that are frozen
    ],
)
def test_tokens_are_those_of_the_unconstrained_engine(kind, runner, layout):
    model, requests = make(kind), requests_for(kind)
    expected = reference(model, requests, layout=layout)
    scarce = kv_spec(model, min_blocks=14, layout=layout)
    fixed = remap.advanced.Knobs(max_layers=0)  # a session that may not grow
    for host_blocks, recomputes in ((0, True), (None, False)):  # by default what is preempted goes to host memory
        with unhooked(model, kv=replace(scarce, host_blocks=host_blocks), config=fixed) as rig:
            tokens, baseline, _ = run(rig, requests, rig.session, runner=runner)
            assert tokens == expected
            assert rig.tenant.remapped == 0 < baseline.preemptions + baseline.pauses
            assert (baseline.recomputed_tokens > 0) is (baseline.preemptions > 0) is (not baseline.pauses) is recomputes
    with unhooked(model, kv=scarce, config=STEADY) as rig:
        tokens, grown, _ = run(rig, requests, rig.session, runner=runner)
        assert tokens == expected
        assert grown.preemptions == grown.pauses == 0
        summary = grown.summary()
        assert summary["kv_blocks_start"] == baseline.summary()["kv_blocks_start"] < summary["kv_blocks_peak"]
        assert summary["layers_remapped_peak"] > 0
        assert rig.session.snapshot().tenants["m"].copies > 0


@pytest.mark.parametrize(
    ("runner", "seed", "mode"),
    [
        *(("cpu", seed, mode) for seed in range(3) for mode in ("aliased", "strict")),
        *(slow("gpu", seed, mode) for seed, mode in some([(1, "strict")], [(0, "aliased"), *GPU_TOO, (1, "strict")])),
    ],
)
def test_changes_by_hand_between_steps(runner, seed, mode, frozen):
    """Grow, shrink, other sets and buffers; tables follow `moved`. On the runner for devices by turns none and some: both of its
    kinds of recordings are used.
    """
    rng = random.Random(f"{seed}{mode}")
    model = make(rng.choice(["llama", "qwen3", "opt"]), seed)
    requests = requests_for(seed, count=16 if runner == "cpu" else 10)
    expected = reference(model, requests)
    steps, moves, changes = itertools.count(1), 0, 0

    def shake(engine):
        nonlocal moves, changes
        step = next(steps)
        if rng.random() < 0.5 if runner == "cpu" else step % 3:
            return
        buffers = rng.choice([1, 2])
        layers = rng.randint(0, 6 - buffers) if runner == "cpu" else rng.randint(1, 6 - buffers) * (step % 2 == 0)
        try:
            report = remap.advanced.remap(rig.session, "m", layers, buffers, rng.choice(["uniform", "nested"]))
        except remap.OutOfBlocks:
            return
        moved = report.moved.get("m", {})
        engine.scheduler.relocate(moved)
        moves, changes = moves + len(moved), changes + 1
        remap.advanced.check(rig.session)
        poison(rig.kv)

    layout = rng.choice(LAYOUTS)
    # A group of blocks is 2 x layers pages where layers come first.
    page = 4096 if layout == "layer_major" else rng.choice([16384, 65536])
    kv = kv_spec(model, min_blocks=16, layout=layout)
    with unhooked(model, kv=kv, mode=mode, page_bytes=page, spare=rng.randint(0, 2)) as rig:
        tokens, _, used = run(rig, requests, each_step=shake, runner=runner, max_num_seqs=rng.randint(4, 8))
    assert tokens == expected
    if runner == "cpu":
        assert moves > 0 and changes > 5
    else:
        assert min(used.stats["whole"], used.stats["piecewise"]) > 0


class Recording:
    """A session whose moves are counted. The report names a tenant's level only when something changed: ask for it."""

    def __init__(self, session, moved):
        self.session, self.exclusively = session, session.exclusively
        self.moved = moved

    def step(self, demand):
        report = self.session.step(demand)
        self.moved.append(sum(map(len, report.moved.values())))
        return report


@pytest.mark.parametrize(
    ("kind", "runner", "layout"),
    [
        *(("llama", "cpu", layout) for layout in LAYOUTS),
        *(
            slow(kind, "gpu", layout)
            for kind, layout in some([("opt", "layer_major")], [*itertools.product(("llama", "opt"), LAYOUTS)])
        ),
    ],
)
def test_the_controller_grows_and_shrinks_while_requests_run(kind, runner, layout, frozen):
    """A burst, then a trickle: layers come back during the trickle, and live blocks move out of their pages."""
    requests = requests_for(1, count=8, low=20, high=30)
    requests.append(Request("long", tuple(range(1, 9)), SamplingParams(max_tokens=100 if runner == "cpu" else 60)))
    model, moved = make(kind), []
    expected = reference(model, requests, layout=layout)
    with unhooked(model, kv=kv_spec(model, min_blocks=30, layout=layout), config=EAGER) as rig:
        session = Recording(rig.session, moved)
        at_once = {"max_num_seqs": 9 if runner == "cpu" else 8, "max_batch_tokens": 300}
        tokens, metrics, used = run(rig, requests, session, runner=runner, **at_once)
    levels = [sample.layers_remapped for sample in metrics.timeline]
    assert tokens == expected
    assert levels[-1] < max(levels)
    assert any(moved)
    if runner == "gpu":
        assert min(used.stats["piecewise"], used.stats["eager"]) > 0
        assert frozen[0].replays > frozen[0].captures


@pytest.mark.parametrize("seed", range(4))
def test_random_interleavings_of_arrivals_steps_and_aborts(seed):
    """Requests come and go at random while the controller acts at its most nervous; each token is the lone request's."""
    rng = random.Random(seed)
    model = make(rng.choice(["llama-odd", "qwen2", "opt-odd"]), seed)
    requests = requests_for(100 + seed, count=14)
    expected = reference(model, requests)
    kv = kv_spec(model, min_blocks=12, layout=rng.choice(LAYOUTS), block_tokens=rng.choice([2, 4, 8]))
    with unhooked(model, kv=kv, mode=rng.choice(["aliased", "strict"]), config=EAGER, spare=rng.randint(0, 2)) as rig:
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


@pytest.mark.host
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_keeps_working_over_changes(backend):
    """torch.compile holds on to tensors by address and identity; neither changes, so nothing is compiled again."""
    model = make("llama")
    with unhooked(model, kv=kv_spec(model)) as rig, torch.no_grad():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = [torch.compile(layer, backend=counter, fullgraph=True) for layer in model.model.layers]
        hidden = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(1))
        cos_sin = model.model.rotary_emb(hidden, torch.arange(7)[None])

        def forward(layers):
            x = hidden
            with rig.tenant.forward(phase="prefill", tokens=7):
                for index, layer in enumerate(layers):
                    rig.tenant.wait(index)
                    x = layer(x, position_embeddings=cos_sin)
                    rig.tenant.done(index)
            return x

        first = forward(compiled)
        torch.testing.assert_close(first, forward(model.model.layers))
        made = counter.frame_count
        for level in (3, 0, 4, 1, 0):
            rig.remap(level, 1)
            assert torch.equal(forward(compiled), first)
            assert bool(rig.tenant.streamed) == (level > 0)
        assert counter.frame_count == made > 0
