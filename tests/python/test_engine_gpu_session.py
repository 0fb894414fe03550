"""The runner for devices on a real session: layers become KV and come back while it serves, and no token changes.

Recordings are frozen (see recordings.py): none is made anew when the remapping changes, so a layer whose tensors moved, or
a pass that did not wait for a streamed layer, would show as a wrong token.
"""

from __future__ import annotations

import itertools
import random

import pytest

import remap

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import Rig, kv_spec, make, poison  # noqa: E402
from recordings import FrozenGraphs, StaticPaged  # noqa: E402
from test_engine_on_session import EAGER, LAYOUTS, STEADY, Recording, requests_for, run  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from remap.engine import Request, SamplingParams  # noqa: E402
from remap.engine import gpu_runner as module  # noqa: E402

GPU = {"runner": "gpu"}


@pytest.fixture
def frozen(monkeypatch):
    made = []

    def graphs():
        made.append(FrozenGraphs())
        return made[-1]

    def choose(name, tensors, heads, scale, **sizes):
        return StaticPaged(tensors, heads, scale)

    monkeypatch.setattr(module, "EagerGraphs", graphs)
    monkeypatch.setattr(module, "choose_attention", choose)
    return made


def kept(engines):
    """An `each_step` that remembers the engine."""

    def each_step(engine):
        if not engines:
            engines.append(engine)

    return each_step


def reference(kind, requests, **kv):
    """The CPU runner's tokens, with blocks for everybody."""
    model = make(kind)
    with Rig(model, kv=kv_spec(model, min_blocks=120, **kv)) as rig:
        rig.hooks.remove()
        return run(rig, requests)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_the_controller_grows_and_shrinks_mid_run(kind, layout, frozen):
    """A burst, then a trickle: recordings of both kinds are used, and blocks move under them."""
    requests = requests_for(1, count=8, low=20, high=30)
    requests.append(Request("long", tuple(range(1, 9)), SamplingParams(max_tokens=60)))
    expected = reference(kind, requests, layout=layout)
    model, engines, moved = make(kind), [], []
    with Rig(model, kv=kv_spec(model, min_blocks=30, layout=layout), config=EAGER) as rig:
        rig.hooks.remove()
        session = Recording(rig.session, moved)
        session.exclusively = rig.session.exclusively
        tokens, metrics = run(
            rig, requests, session, each_step=kept(engines), max_num_seqs=8, max_batch_tokens=300, **GPU
        )
    stats = engines[0].runner.stats
    assert tokens == expected
    assert max(sample.layers_remapped for sample in metrics.timeline) > 0
    assert any(moved)
    assert min(stats["piecewise"], stats["eager"]) > 0
    assert frozen[0].replays > frozen[0].captures


@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("seed", range(2))
def test_changes_by_hand_between_steps(seed, mode, frozen):
    """Every third step another remapping: by turns none, so that layers come back, and some."""
    rng = random.Random(f"{seed}{mode}")
    kind = rng.choice(["llama", "qwen3", "opt"])
    requests = requests_for(seed, count=10)
    steps = itertools.count(1)
    expected = reference(kind, requests)
    model, engines = make(kind), []

    def shake(engine):
        kept(engines)(engine)
        step = next(steps)
        if step % 3:
            return
        buffers = rng.choice([1, 2])
        layers = 0 if step % 2 else rng.randint(1, 6 - buffers)
        try:
            report = remap.advanced.remap(rig.session, "m", layers, buffers, rng.choice(["uniform", "nested"]))
        except remap.OutOfBlocks:
            return
        engine.scheduler.relocate(report.moved.get("m", {}))
        remap.advanced.check(rig.session)
        poison(rig.kv)

    with Rig(model, kv=kv_spec(model, min_blocks=16), mode=mode, spare=1) as rig:
        rig.hooks.remove()
        tokens, _ = run(rig, requests, each_step=shake, max_num_seqs=4, **GPU)
    assert tokens == expected
    stats = engines[0].runner.stats
    assert min(stats["whole"], stats["piecewise"]) > 0


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_fewer_preemptions_than_the_baseline(kind):
    """The same engine with and without remap, in the same memory; also without recordings that are frozen."""
    requests = requests_for(kind)
    expected = reference(kind, requests)
    model = make(kind)
    scarce = kv_spec(model, min_blocks=14)
    with Rig(model, kv=scarce) as rig:
        rig.hooks.remove()
        tokens, baseline = run(rig, requests, **GPU)
        assert tokens == expected
    with Rig(model, kv=scarce, config=STEADY) as rig:
        rig.hooks.remove()
        tokens, grown = run(rig, requests, rig.session, **GPU)
        assert tokens == expected
    assert grown.preemptions == 0 < baseline.preemptions


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_keeps_working_over_changes(backend):
    """torch.compile holds on to tensors by address and identity; neither changes, so nothing is compiled again."""
    model = make("llama")
    layers = model.model.layers
    with Rig(model, kv=kv_spec(model)) as rig:
        rig.hooks.remove()
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = [torch.compile(layer, backend=counter, fullgraph=True) for layer in layers]
        hidden = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(1))
        cos_sin = model.model.rotary_emb(hidden, torch.arange(7)[None])

        def forward(run_layers):
            x = hidden
            with torch.no_grad(), rig.tenant.forward(phase="prefill", tokens=7):
                for index, layer in enumerate(run_layers):
                    rig.tenant.wait(index)
                    x = layer(x, position_embeddings=cos_sin)
                    x = x[0] if isinstance(x, tuple) else x
                    rig.tenant.done(index)
            return x

        expected = forward(layers)
        first = forward(compiled)
        torch.testing.assert_close(first, expected)
        made = counter.frame_count
        for level in (3, 0, 4, 1, 0):
            rig.remap(level, 1)
            assert torch.equal(forward(compiled), first)
            assert bool(rig.tenant.streamed) == (level > 0)
        assert counter.frame_count == made > 0
