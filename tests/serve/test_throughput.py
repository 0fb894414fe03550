"""Offline batches: the same tokens, however KV is kept, wherever the weights are, and whatever fails."""

from __future__ import annotations

import contextlib
import itertools
import json
import random

import pytest

import remap
from remap.internals import internals

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attached_models import SHAPE, randomised  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from near_tokens import Near  # noqa: E402

from remap import _core  # noqa: E402
from remap.errors import DriverError, InvalidArgument  # noqa: E402
from remap_serve.engine import LLMEngine, Request, SamplingParams  # noqa: E402
from remap_serve.engine.offline import generate_offline  # noqa: E402
from remap_serve.engine.throughput import ThroughputEngine, ThroughputScheduler  # noqa: E402

PAGE = 4096
BLOCK = 4


def opt(layers: int = 6):
    config = transformers.OPTConfig(
        vocab_size=101,
        hidden_size=64,
        ffn_dim=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=64,
    )
    return randomised(transformers.OPTForCausalLM(config))


def llama(layers: int = 6, kv_heads: int = 4):
    shape = {**SHAPE, "num_hidden_layers": layers, "num_key_value_heads": kv_heads}
    return randomised(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)))


def gpt2(layers: int = 6):
    config = transformers.GPT2Config(
        vocab_size=101, n_embd=64, n_layer=layers, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    )
    return randomised(transformers.GPT2LMHeadModel(config))


MODELS = {"opt": opt, "llama": llama, "gpt2": gpt2}


def spec_of(model, *, blocks: int, streamed: int = 0, scratch: int = 0, dtype: str = "float32") -> remap.KVSpec:
    heads = model.config.num_attention_heads
    return remap.KVSpec(
        layers=model.config.num_hidden_layers,
        kv_heads=getattr(model.config, "num_key_value_heads", None) or heads,
        head_dim=model.config.hidden_size // heads,
        block_tokens=BLOCK,
        dtype=dtype,
        min_blocks=blocks,
        max_blocks=blocks,
        layout="layer_major",
        host_blocks=streamed,
        streamed_blocks=streamed,
        scratch_blocks=scratch,
    )


def requests_for(seed: int, count: int = 10, low: int = 3, high: int = 60, tokens: int = 30) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            f"r{index}",
            tuple(rng.randrange(3, 101) for _ in range(rng.randint(low, high))),
            SamplingParams(max_tokens=rng.randint(1, tokens)),
        )
        for index in range(count)
    ]


def serve(engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    for request in requests:
        engine.add_request(request)
    found = {}
    for _ in range(3000):
        for output in engine.step().finished:
            found[output.id] = output.tokens
        if not engine.unfinished:
            return found
    raise AssertionError(f"{engine.unfinished} of {len(requests)} did not finish")


def expected(model, requests: list[Request], dtype: str = "float32") -> dict[str, tuple[int, ...]]:
    """With memory for everything."""
    with remap.Session("64MiB", page_bytes=PAGE) as session:
        tenant = session.attach(model, kv=spec_of(model, blocks=600, dtype=dtype), hooks=False)
        found = serve(LLMEngine(model, tenant), requests)
        session.detach("model")
    return {one.id: Near(model, one, found[one.id]) for one in requests}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ratio", [(0, 1), (2, 3), (1, 0)])
@pytest.mark.parametrize("resident", [None, 2])
def test_tokens_are_those_of_ample_memory(name: str, ratio: tuple[int, int], resident: int | None) -> None:
    model, requests = MODELS[name](), requests_for(1)
    wanted = expected(model, requests)
    with remap.Session("64MiB", page_bytes=PAGE) as session:
        spec = spec_of(model, blocks=40, streamed=300, scratch=40 if ratio[0] else 0)
        tenant = session.attach(model, kv=spec, hooks=False, resident_layers=resident)
        engine = ThroughputEngine(model, tenant, ratio=ratio, max_batch_tokens=64)
        assert serve(engine, requests) == wanted
        stats, kv = internals(tenant).stats(), internals(tenant).kv
        assert stats.block_bytes > 0 and (stats.copied_bytes > 0) is (resident is not None)
        assert kv.live_blocks == 0 and kv.host.free_blocks == 300 and kv.streamed.used_blocks == 0
        assert engine.scheduler.used_blocks == 0


def test_in_bfloat16_too() -> None:
    model, requests = opt().to(torch.bfloat16), requests_for(3)
    wanted = expected(model, requests, "bfloat16")
    with remap.Session("64MiB", page_bytes=PAGE) as session:
        spec = spec_of(model, blocks=40, streamed=300, scratch=60, dtype="bfloat16")
        tenant = session.attach(model, kv=spec, hooks=False, resident_layers=0)
        assert serve(ThroughputEngine(model, tenant, ratio=(1, 1), max_batch_tokens=64), requests) == wanted


def test_activations_halve_what_is_copied_in_and_out() -> None:
    """The same requests in the same passes."""
    model, requests, found = opt(), requests_for(5, count=6, low=40, high=60), {}
    for ratio in ((0, 1), (1, 0)):
        with remap.Session("64MiB", page_bytes=PAGE) as session:
            spec = spec_of(model, blocks=240, streamed=300, scratch=240)
            tenant = session.attach(model, kv=spec, hooks=False)
            engine = ThroughputEngine(model, tenant, ratio=ratio, max_batch_tokens=512)
            serve(engine, requests)
            found[ratio] = (
                engine.metrics.steps,
                internals(tenant).kv.copied_out_bytes,
                internals(tenant).stats().block_bytes,
            )
    assert found[1, 0][0] == found[0, 1][0]
    assert 2 * found[1, 0][1] == found[0, 1][1]
    # A pass copies a run of host blocks, with what lies between.
    assert found[1, 0][2] <= 0.6 * found[0, 1][2]


def test_many_mini_batches_a_pass() -> None:
    """Scratch blocks for the longest request alone."""
    model, requests = llama(), requests_for(7, count=12)
    wanted = expected(model, requests)
    most = max(-(-request.max_kv_tokens // BLOCK) for request in requests)
    with remap.Session("64MiB", page_bytes=PAGE) as session:
        tenant = session.attach(model, kv=spec_of(model, blocks=60, streamed=400, scratch=most), hooks=False)
        engine = ThroughputEngine(model, tenant, ratio=(1, 0), max_batch_tokens=96)
        groups, original = [], engine.runner._packed

        def watched(chunks):
            packed = original(chunks)
            needs = [sum(map(engine.runner._remade_blocks, group)) for group in packed]
            # Two of them never fit into one, in whatever order the requests came.
            assert max(needs) <= most and all(sum(pair) > most for pair in itertools.combinations(needs, 2))
            groups.append(packed)
            return packed

        engine.runner._packed = watched
        assert serve(engine, requests) == wanted
        assert max(map(len, groups)) > 2


def test_a_pass_has_the_order_that_its_certificate_counts() -> None:
    """Each layer once: it is waited for, all its mini-batches are made again and attend, one after another, and it is done."""
    model, requests = llama(), requests_for(7, count=6, low=30)
    with remap.Session("64MiB", page_bytes=PAGE) as session:
        tenant = session.attach(
            model, kv=spec_of(model, blocks=60, streamed=400, scratch=24), hooks=False, resident_layers=2
        )
        engine = ThroughputEngine(model, tenant, ratio=(1, 0), max_batch_tokens=512)
        events, runner = [], engine.runner

        class Watched:
            def __getattr__(self, name):
                if name.startswith("_"):  # `inside` of this is this
                    raise AttributeError(name)
                return getattr(internals(tenant), name)

            def wait(self, layer):
                tenant.wait(layer)
                events.append(("wait", layer))

            def done(self, layer):
                events.append(("done", layer))
                tenant.done(layer)

        remake, attention = runner.remake, runner.attention
        runner.tenant = Watched()
        runner.remake = lambda layer, group: (events.append(("made", layer, group.first)), remake(layer, group))
        runner.attention = lambda layer, batch, *given: (
            events.append(("attended", layer)),
            attention(layer, batch, *given),
        )[1]
        most = 0
        for request in requests:
            engine.add_request(request)
        while engine.unfinished:
            events.clear()
            engine.step()
            firsts = [event[2] for event in events if event[:2] == ("made", 0)]
            most = max(most, len(firsts))
            assert events == [
                event
                for layer in range(6)
                for event in (
                    ("wait", layer),
                    *(one for first in firsts for one in (("made", layer, first), ("attended", layer))),
                    ("done", layer),
                )
            ]
        assert most > 2


@given(
    blocks=st.integers(10, 40),
    streamed=st.integers(24, 120),
    ratio=st.sampled_from([(0, 1), (1, 3), (1, 2), (1, 1), (9, 1), (1, 0)]),
    seed=st.integers(0, 2),
    budget=st.sampled_from([32, 40, 64, 200]),
)
@settings(max_examples=15, deadline=None)
def test_every_request_is_answered_in_whatever_memory_it_fits(blocks, streamed, ratio, seed, budget) -> None:
    model, requests = _MODEL, requests_for(seed, tokens=16)
    if seed not in _WANTED:
        _WANTED[seed] = expected(model, requests)
    wanted = _WANTED[seed]
    with remap.Session("64MiB", page_bytes=PAGE) as session:
        spec = spec_of(model, blocks=blocks, streamed=streamed, scratch=30)
        tenant = session.attach(model, kv=spec, hooks=False)
        if blocks < 17:
            with pytest.raises(InvalidArgument) as caught:
                ThroughputEngine(model, tenant, ratio=ratio, max_batch_tokens=budget)
            assert caught.value.fields["least"] == 17
            return
        engine = ThroughputEngine(model, tenant, ratio=ratio, max_batch_tokens=budget)
        fit = []
        for request in requests:
            try:
                engine.add_request(request)
            except InvalidArgument:
                continue
            fit.append(request)
        found = {}
        for _ in range(2000):
            step = engine.step()
            found.update((output.id, output.tokens) for output in step.finished)
            assert engine.scheduler.used_blocks == tenant.kv.live_blocks
            if not engine.unfinished:
                break
        assert found == {request.id: wanted[request.id] for request in fit}
        assert tenant.kv.live_blocks == 0 and tenant.kv.host.free_blocks == streamed


_MODEL = opt(3)
_WANTED: dict[int, dict[str, tuple[int, ...]]] = {}


@given(ratio=st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(any), pairs=st.integers(0, 200))
def test_the_mixture_follows_the_ratio(ratio: tuple[int, int], pairs: int) -> None:
    scheduler = ThroughputScheduler(
        ratio=ratio, host_blocks=9, block_tokens=BLOCK, max_num_seqs=1, max_batch_tokens=8, chunk_align=8
    )
    kinds = [scheduler.keeps_activations(number) for number in range(pairs)]
    assert abs(sum(kinds) - ratio[0] * pairs / sum(ratio)) <= 0.5
    tokens = 2 * BLOCK * pairs
    assert scheduler.host_need(tokens) == sum(1 if kind else 2 for kind in kinds)
    assert scheduler.activation_blocks(tokens) == 2 * sum(kinds)


@pytest.mark.parametrize("nth", [1, 4, 9])
def test_a_copy_that_fails_costs_time_and_no_token(nth: int) -> None:
    """One asynchronous copy fails, out or in: `step` raises, is called again, and who lost KV starts again."""
    model, requests = opt(3), requests_for(11, count=5)
    wanted = expected(model, requests)
    fault = _core.make_fault_backend(_host(64 << 20))
    with remap.Session("64MiB", page_bytes=PAGE, platform=remap.advanced.Platform(backend=fault)) as session:
        tenant = session.attach(model, kv=spec_of(model, blocks=40, streamed=200, scratch=60), hooks=False)
        engine = ThroughputEngine(model, tenant, ratio=(1, 1), max_batch_tokens=64)
        for request in requests:
            engine.add_request(request)
        found, failures = {}, 0
        fault.fail_async_copy(nth * 7)
        for _ in range(500):
            try:
                step = engine.step()
            except DriverError:
                failures += 1
                continue
            found.update((output.id, output.tokens) for output in step.finished)
            if not engine.unfinished:
                break
        assert found == wanted and failures == 1
        assert tenant.kv.live_blocks == 0 and tenant.kv.host.free_blocks == 200


def test_a_file_of_requests_to_a_model_larger_than_its_session(tmp_path) -> None:
    """Interrupted twice, and resumed with another mixture."""
    model, requests = opt(16), requests_for(21, count=24, tokens=12)
    wanted = expected(model, requests)
    questions, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"custom_id": one.id, "prompt": list(one.prompt), "max_tokens": one.sampling.max_tokens} for one in requests
    ]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    weights = sum(value.numel() * value.element_size() for value in model.parameters())
    for ratio, stop in (((1, 0), 5), ((0, 1), 14), ((1, 2), 99)):

        def interrupt(progress, stop=stop) -> None:
            if progress.answered >= stop:
                raise KeyboardInterrupt

        with remap.Session(int(0.9 * weights) // PAGE * PAGE, page_bytes=PAGE) as session:
            spec = spec_of(model, blocks=30, streamed=60, scratch=24)
            tenant = session.attach(model, kv=spec, hooks=False, resident_layers=0)
            engine = ThroughputEngine(model, tenant, ratio=ratio, max_batch_tokens=64)
            with contextlib.suppress(KeyboardInterrupt):
                generate_offline(engine, questions, answers, on_progress=interrupt)
            assert engine.unfinished == 0 and tenant.kv.live_blocks == 0
            session.detach("model")
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(found) == 24 and {one["custom_id"]: tuple(one["tokens"]) for one in found} == wanted


def _host(capacity: int):
    from arena_worlds import make_backend

    return make_backend(capacity, PAGE)


def test_what_is_refused() -> None:
    model = llama(kv_heads=2)
    with remap.Session("64MiB", page_bytes=PAGE) as session:
        tenant = session.attach(model, kv=spec_of(model, blocks=40, streamed=60, scratch=20), hooks=False)
        with pytest.raises(InvalidArgument) as caught:
            ThroughputEngine(model, tenant, ratio=(1, 1))
        assert caught.value.fields["activation_bytes"] == caught.value.fields["kv_bytes"] == 256
        engine = ThroughputEngine(model, tenant)  # as KV it works
        requests = requests_for(2, count=3)
        assert len(serve(engine, requests)) == 3
        for field, request in (
            ("positions", Request("long", (5,) * 250, SamplingParams(max_tokens=20))),
            ("host blocks", Request("wide", (5,) * 245, SamplingParams(max_tokens=5))),
            ("token 101", Request("strange", (5, 101))),
        ):
            with pytest.raises(InvalidArgument, match=field):
                engine.add_request(request)
        for ratio in ((-1, 1), (0, 0)):
            with pytest.raises(InvalidArgument):
                ThroughputEngine(model, tenant, ratio=ratio)
        engine.add_request(requests[0])
        with pytest.raises(InvalidArgument):
            engine.add_request(requests[0])
        engine.abort(requests[0].id)
    model = opt()
    with remap.Session("64MiB", page_bytes=PAGE) as session:
        tenant = session.attach(model, kv=spec_of(model, blocks=40), hooks=False)
        with pytest.raises(InvalidArgument, match="streamed_blocks"):
            ThroughputEngine(model, tenant)
    with pytest.raises(InvalidArgument):
        spec_of(model, blocks=4, scratch=4)
