"""The runner for devices, over CPU tensors: buckets, padding, fixed tensors, whole and piecewise recordings, and the same
tokens as transformers in all of them.
"""

from __future__ import annotations

import itertools

import pytest
from effort import LONG, examples, some
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.internals import internals

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fakes import FakeSession, FakeTenant  # noqa: E402
from recordings import FrozenGraphs, StaticPaged  # noqa: E402
from test_engine_runner import (  # noqa: E402
    LAYERS,
    expected_tokens,
    make_model,
    make_tenant,
    prompts,
    requests_for,
    sequences_for,
    tokens_of,
)  # fmt: skip

from remap.errors import InvalidArgument  # noqa: E402
from remap_serve.engine import LLMEngine, Request, SamplingParams  # noqa: E402
from remap_serve.engine import gpu_runner as module  # noqa: E402
from remap_serve.engine.captured import buckets_up_to  # noqa: E402
from remap_serve.engine.chunk import Chunk  # noqa: E402
from remap_serve.engine.gpu_runner import GpuRunner  # noqa: E402
from remap_serve.engine.inputs import TokenInputs  # noqa: E402
from remap_serve.engine.request import RequestState, Sequence  # noqa: E402
from remap_serve.engine.runner import ModelRunner  # noqa: E402


class StreamingTenant(FakeTenant):
    """A fake tenant whose layers are streamed on every other pass if it is told to `flip`."""

    flip = False

    def forward(self, phase="decode", tokens=0, streamed=()):
        if self.flip:
            self.streaming = len(self.passes) % 2 == 1
        return super().forward(phase, tokens)


def tenant_for(model, streaming=False, **more):
    tenant = make_tenant(model, **more)
    tenant.__class__ = StreamingTenant
    tenant.streaming = streaming
    return tenant


@pytest.fixture
def frozen(monkeypatch):
    """Recordings that are frozen, and an attention that can be: as near to CUDA graphs as a CPU comes."""
    made = FrozenGraphs()

    monkeypatch.setattr(module, "EagerGraphs", lambda: made)
    monkeypatch.setattr(
        module, "choose_attention", lambda name, tensors, heads, scale, **_: StaticPaged(tensors, heads, scale)
    )
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "streaming"),
    [
        (kind, streaming)
        for kind in ("llama", "qwen3", "opt", "gpt2")
        for streaming in (False, True, "changing")
        if LONG or kind == "llama" or streaming == "changing"  # which has both
    ],
)
def test_frozen_recordings_give_the_same_tokens(kind, streaming, frozen):
    """Nothing of a recorded pass is decided in Python: not the batch, not the lengths, not where the blocks lie."""
    model = make_model(kind)
    tenant = tenant_for(model, streaming is True, blocks=10, max_blocks=120)
    tenant.flip = streaming == "changing"
    session = FakeSession(tenant, move_every=3)
    session.exclusively = lambda call, always=False: None
    # Most of the time goes into recordings: of each bucket, whole and layer by layer.
    most, count = some((3, 5), (5, 8))
    engine = LLMEngine(model, tenant, session=session, runner="gpu", max_num_seqs=most, max_batch_tokens=40)
    requests = requests_for(count)
    addresses = _fixed_addresses(engine.runner)
    assert tokens_of(engine.run(requests)) == expected_tokens(model, requests)
    assert _fixed_addresses(engine.runner) == addresses
    stats = engine.runner.stats
    assert frozen.replays > 0
    assert (stats["whole"] > 0) == (streaming is not True)
    assert (stats["piecewise"] > 0) == (streaming is not False)
    if streaming is not False:
        assert frozen.captures > stats["captured"]  # a piecewise recording is one for each layer, and two


def _fixed_addresses(runner):
    inputs, captured = runner._decodes, runner.captured
    tensors = [inputs.ids, inputs.positions, inputs.slots, inputs.rows, inputs.lens, inputs.table.device]
    return [tensor.data_ptr() for tensor in (*tensors, captured.hidden, captured.tokens)]


@pytest.mark.parametrize("streaming", [False, True])
def test_waits_only_while_something_is_streamed(streaming):
    model = make_model("llama")
    tenant = tenant_for(model, streaming)
    LLMEngine(model, tenant, runner="gpu").run([Request("a", (1, 2, 3), SamplingParams(max_tokens=4))])
    # The prompt's pass is eager and always waits: it costs nothing where there is nothing to wait for.
    order = [(call, layer) for layer in range(LAYERS) for call in ("wait", "done")]
    assert tenant.passes == [("prefill", 3)] + [("decode", 1)] * 3
    assert tenant.calls == order * (4 if streaming else 1)


def _decode_pass(kind, streaming, graphs, sizes=(5, 9, 3)):
    """Prefill some sequences, then decode them together once: (all KV before, after, slots written, hidden, tokens)."""
    model = make_model(kind)
    tenant = tenant_for(model, streaming)
    runner = GpuRunner(model, tenant, max_num_seqs=8, max_batch_tokens=64, graphs=graphs)
    texts = prompts(len(sizes), seed=3, low=9, high=9)
    sequences = sequences_for(tenant, [prompt[:size] for prompt, size in zip(texts, sizes)])
    for sequence in sequences:
        sequence.state = RequestState.RUNNING
    _, tokens = runner.run([Chunk(sequence, 0, len(sequence.tokens)) for sequence in sequences])
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.tokens.append(token)
    tenant.kv.memory[tenant.kv.free_ids] = 7.0  # what is free belongs to somebody else
    before = tenant.kv.memory.clone()
    chunks = [Chunk(sequence, len(sequence.tokens) - 1, 1) for sequence in sequences]
    samplers, tokens = runner.run(chunks)
    assert samplers == chunks
    written = [(chunk.sequence.blocks[chunk.start // 4], chunk.start % 4) for chunk in chunks]
    return before, tenant.kv.memory, written, runner.captured.hidden[: len(chunks)], tokens


@pytest.mark.parametrize("kind", ["llama", "qwen2", "opt", "opt-post-norm-projected", "gpt2"])
def test_padding_and_recording_damage_no_block_and_change_no_bit(kind):
    """Three sequences in a bucket of four, recorded when first needed, whole or piecewise: three slots of all KV change."""
    results = [_decode_pass(kind, streaming, graphs) for streaming in (False, True) for graphs in ("eager", "off")]
    for before, after, written, hidden, tokens in results:
        changed = (before != after) & ~(before.isnan() & after.isnan())
        places = changed.any(-1).any(-1).any(2).any(1)  # (blocks, block_tokens)
        assert {(int(block), int(offset)) for block, offset in places.nonzero()} == set(written)
        assert torch.equal(after.nan_to_num(1e9), results[0][1].nan_to_num(1e9))
        assert torch.equal(hidden, results[0][3])
        assert tokens == results[0][4]


def test_recording_happens_between_passes_and_after_settling(frozen):
    model = make_model("llama")
    tenant = tenant_for(model)
    log = []

    class Session:
        def exclusively(self, call, always=False):
            log.append("settle")

    capture = frozen.capture

    def watched(piece):
        assert not internals(tenant).in_pass
        log.append("capture")
        return capture(piece)

    frozen.capture = watched
    runner = GpuRunner(model, tenant, session=Session(), max_num_seqs=8, max_batch_tokens=8)
    runner.prepare([3, 8])
    assert log == (["settle", "capture"] + ["settle"] + ["capture"] * (LAYERS + 2)) * 2
    assert runner.stats["captured"] == 4
    assert tenant.passes == [] and not tenant.calls
    runner.prepare([4, 7, 8])
    runner.prepare([5], piecewise=False)
    assert runner.stats["captured"] == 4
    assert bool(tenant.kv.memory.isnan().all())


def test_warm_up_records_every_bucket():
    model = make_model("llama")
    engine = LLMEngine(model, tenant_for(model), runner="gpu", max_num_seqs=6)
    engine.warm_up()
    recorded = engine.runner.stats["captured"]
    assert recorded == 2 * len(engine.runner.captured.buckets) == 2 * len((1, 2, 4, 6))
    engine.run(requests_for(8))
    assert engine.runner.stats["captured"] == recorded
    LLMEngine(model, make_tenant(model)).warm_up()


def test_the_runner_is_picked_by_device_and_refusals_create_nothing():
    model = make_model("llama")
    assert isinstance(LLMEngine(model, make_tenant(model)).runner, ModelRunner)
    assert isinstance(LLMEngine(model, tenant_for(model), runner="gpu").runner, GpuRunner)
    bad = [{"attention": "magic"}, {"attention": "flashinfer"}, {"graphs": "magic"}, {"graphs": "cuda"}]
    bad += [{"staging": "magic"}, {"staging": "kernel"}, {"max_model_len": 0}, {"runner": "tpu"}]
    for more in bad:
        with pytest.raises(InvalidArgument):
            LLMEngine(model, tenant_for(model), **{"runner": "gpu", **more})
    with pytest.raises(InvalidArgument) as caught:
        GpuRunner(make_model("opt"), tenant_for(model))
    assert caught.value.got[1:3] == (2, 8)


def test_limits_are_kept():
    model = make_model("llama")
    tenant = tenant_for(model)
    engine = LLMEngine(model, tenant, runner="gpu", max_model_len=20)
    runner = GpuRunner(model, tenant, max_num_seqs=2, max_batch_tokens=8, max_model_len=8)
    (long,), short = sequences_for(tenant, [(1,) * 12]), sequences_for(tenant, [(1,)] * 3)
    for one in short:
        one.state = RequestState.RUNNING
    request = Request("long", (1,) * 15, SamplingParams(max_tokens=7))
    for call, argument, fields in (
        (engine.add_request, request, {"needed": 21, "limit": 20}),
        (runner.run, [Chunk(long, 0, 12)], {"tokens": 12, "limit": 8}),
        (runner.run, [Chunk(long, 0, 8)], {"blocks": 3, "width": 2}),
        (runner.run, [Chunk(one, 0, 1) for one in short], {"wanted": 3, "free": 2}),
    ):
        with pytest.raises(InvalidArgument) as caught:
            call(argument)
        assert fields.items() <= caught.value.fields.items()
    assert tenant.passes == []
    assert len(runner.run([Chunk(one, 0, 1) for one in short[:2]])[1]) == 2


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 8, 9, 32, 256, 300])
def test_buckets(most):
    buckets = buckets_up_to(most)
    assert sorted(set(buckets)) == list(buckets)
    assert buckets[-1] == most
    for size in range(1, most + 1):
        bucket = next(one for one in buckets if one >= size)
        assert bucket < 2 * size
        assert size < 9 or bucket - size < (8 if size <= 256 else 16)


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=60), st.randoms(use_true_random=False))
def test_the_block_table_follows_whatever_happens_to_the_blocks(steps, rng):
    """Sequences come, grow, are moved, preempted and finished; after each pass, their rows on the device are right."""
    width, most, serial = 6, 4, itertools.count()
    inputs = TokenInputs(torch.device("cpu"), most, most, 4, (most, width))
    running, waiting = [], []
    for action, pick in steps:
        if action <= 2 and len(running) < most:
            running.append(waiting.pop() if waiting and action == 0 else Sequence.of(Request("x", (1,)), 0))
            running[-1].state, running[-1].blocks = RequestState.RUNNING, []
        elif action <= 5 and running:
            blocks = running[pick % len(running)].blocks
            blocks += [next(serial) for _ in range(min(pick, width - len(blocks)))]
        elif action == 6:
            for sequence in running:
                sequence.blocks = [next(serial) for _ in sequence.blocks]
        elif action in (7, 8) and running:
            sequence = running.pop(pick % len(running))
            sequence.state, sequence.blocks = RequestState.WAITING if action == 7 else RequestState.FINISHED, []
            waiting += [sequence] if action == 7 else []
        passed = [sequence for sequence in running if rng.random() < 0.7]
        rows = inputs.table.rows_of(passed)
        if rng.random() < 0.2:
            continue  # the pass failed before anything was published
        inputs.publish_table()
        assert len(set(rows)) == len(rows)
        for sequence, row in zip(passed, rows, strict=True):
            assert inputs.table.device[row, : len(sequence.blocks)].tolist() == sequence.blocks
