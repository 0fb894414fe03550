"""The engine's forward against transformers': logits, greedy tokens, and independence of batch, blocks, chunks and
preemption.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remap.internals import internals

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fakes import FakeKV, FakeTenant  # noqa: E402
from models import kv_spec  # noqa: E402
from near_tokens import MARGIN, Near, logits_after, near_tokens  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from remap.errors import InvalidArgument, OutOfBlocks  # noqa: E402
from remap_serve.engine import LLMEngine, ModelRunner, Request, SamplingParams  # noqa: E402
from remap_serve.engine.attention import AttentionBatch, decode_first  # noqa: E402
from remap_serve.engine.chunk import Chunk  # noqa: E402
from remap_serve.engine.request import Sequence  # noqa: E402
from remap_serve.engine.sampling import sample, scores  # noqa: E402

LAYERS, VOCAB = 3, 97
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 6,
    "max_position_embeddings": 128,
}  # fmt: skip
GATED = {**COMMON, "intermediate_size": 80, "num_key_value_heads": 2}
OPT = {**COMMON, "ffn_dim": 80, "word_embed_proj_dim": 48, "dropout": 0.1}
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 48, "n_layer": LAYERS, "n_head": 6, "n_positions": 128,
    "scale_attn_by_inverse_layer_idx": True, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
KINDS = {
    "llama": ("Llama", {**GATED, "tie_word_embeddings": True}),
    "llama-bias-rope": ("Llama", {**GATED, "attention_bias": True, "mlp_bias": True, "rope_parameters": ROPE}),
    "qwen2": ("Qwen2", GATED),
    "qwen3": ("Qwen3", {**GATED, "head_dim": 16}),
    "llama-all-heads": ("Llama", {**GATED, "num_key_value_heads": 6, "attention_bias": True}),
    "gpt2": ("GPT2", GPT2),
    "opt": ("OPT", OPT),
    "opt-post-norm-projected": ("OPT", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32}),
}
_MODELS: dict[str, object] = {}


def make_model(kind):
    """Random weights, large enough that greedy tokens vary; one instance a kind (nothing here writes to it)."""
    if kind not in _MODELS:
        torch.manual_seed(3)
        family, shape = KINDS[kind]
        config = getattr(transformers, f"{family}Config")(**shape)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.12) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
        _MODELS[kind] = model
    return _MODELS[kind]


def make_tenant(model, blocks=64, **more):
    spec = kv_spec(model)
    shape = {"kv_heads": spec.kv_heads, "head_dim": spec.head_dim, "dtype": model.dtype}
    return FakeTenant(LAYERS, FakeKV(layers=LAYERS, blocks=blocks, **shape, **more))


def prompts(count, seed=0, low=1, high=40):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist()) for length in lengths]


def reference_tokens(model, prompt, count):
    """Greedy decoding the slow way: the whole sequence through transformers for every token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_after(model, ids).argmax()))
    return Near(model, Request("reference", prompt), ids[len(prompt) :])


def requests_for(count=6, seed=1, tokens=10, high=24):
    return [
        Request(f"r{index}", prompt, SamplingParams(max_tokens=tokens + index))
        for index, prompt in enumerate(prompts(count, seed=seed, high=high))
    ]


def expected_tokens(model, requests):
    return {one.id: reference_tokens(model, one.prompt, one.sampling.max_tokens) for one in requests}


def tokens_of(result):
    return {id: output.tokens for id, output in result.outputs.items()}


@pytest.fixture(params=list(KINDS))
def model(request):
    return make_model(request.param)


@pytest.fixture(params=["cpu", "gpu"])
def runner(request):
    """The runner for devices runs on CPU tensors here; test_engine_gpu_runner.py has what it alone does."""
    return request.param


def sequences_for(tenant, texts):
    """Sequences with blocks for all of their tokens."""
    made = [Sequence.of(Request(str(index), prompt), index) for index, prompt in enumerate(texts)]
    for sequence in made:
        sequence.blocks = tenant.kv.allocate(-(-len(sequence.tokens) // 4))
    return made


def chunked(sequences, count_of):
    """Chunks, pass by pass, until all tokens are done; count_of(sequence, done): how many tokens of it are next."""
    done = dict.fromkeys(range(len(sequences)), 0)
    while any(done[index] < len(sequence.tokens) for index, sequence in enumerate(sequences)):
        chunks = []
        for index, sequence in enumerate(sequences):
            if count := min(count_of(sequence, done[index]), len(sequence.tokens) - done[index]):
                chunks.append(Chunk(sequence, done[index], count))
                done[index] += count
        yield chunks


def test_logits_equal_transformers(model):
    """Mixed passes: whole prompts, chunks over a prefix, and single tokens of sequences of unlike lengths, in one batch."""
    tenant = make_tenant(model)
    runner = ModelRunner(model, tenant)
    sizes = itertools.cycle([3, 5, 1, 8, 2, 7, 4, 1, 1, 6, 9, 2, 1, 1, 30])
    seen = 0
    for chunks in chunked(sequences_for(tenant, prompts(6, low=9)), lambda sequence, done: next(sizes)):
        samplers, logits = runner.forward(chunks)
        assert len(samplers) == sum(chunk.samples for chunk in chunks)
        for chunk, row in zip(samplers, logits, strict=True):
            with torch.no_grad():
                expected = model(torch.tensor([chunk.sequence.tokens]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
            seen += 1
    assert seen == 6
    assert tenant.calls[: 2 * LAYERS] == [(call, layer) for layer in range(LAYERS) for call in ("wait", "done")]


@pytest.mark.parametrize("blocks", [64, 14])
def test_greedy_tokens_equal_transformers(model, blocks, runner):
    """Also with so few blocks that sequences are preempted and recomputed."""
    tenant = make_tenant(model, blocks=blocks)
    engine = LLMEngine(model, tenant, runner=runner, max_num_seqs=4, max_batch_tokens=24)
    requests = requests_for()
    result = engine.run(requests)
    assert tokens_of(result) == expected_tokens(model, requests)
    assert {output.finish_reason for output in result.outputs.values()} == {"length"}
    assert (result.metrics.preemptions > 0) == (result.metrics.recomputed_tokens > 0) == (blocks == 14)
    assert tenant.kv.free_blocks == blocks
    assert not engine.unfinished
    if runner == "gpu":
        stats = engine.runner.stats
        assert stats["whole"] > 10 and stats["eager"] > 2 and stats["piecewise"] == 0
        assert {phase for phase, _ in tenant.passes} == {"decode", "mixed", "prefill"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_batch_gives_the_same_bits_wherever_the_blocks_lie(dtype):
    model, rows = copy.deepcopy(make_model("qwen3")).to(dtype), []
    for seed in range(2):
        tenant = make_tenant(model)
        tenant.kv.free_ids = tenant.kv.free_ids[seed:] + tenant.kv.free_ids[:seed]
        chunks = [Chunk(sequence, 0, len(sequence.tokens)) for sequence in sequences_for(tenant, prompts(5))]
        rows.append(ModelRunner(model, tenant).forward(chunks)[1])
    assert torch.equal(*rows)
    assert torch.isfinite(rows[0]).all()


def _shapes(chunks):
    """Of every token, the shape of the attention call that computes it: (rows of the call, its own row, keys)."""
    batch = AttentionBatch(decode_first(chunks), 4, torch.float32)
    shapes = {}
    first_rows = itertools.accumulate((chunk.count for chunk in decode_first(chunks)[:-1]), initial=0)
    for chunk, row in zip(decode_first(chunks), first_rows, strict=True):
        for token in range(chunk.count):
            for group in batch.groups:
                if group.first <= row + token < group.last:
                    shapes[chunk.sequence.order, chunk.start + token] = (1, 0, group.bias.shape[-1])
            for tile in (tile for prefill in batch.prefills for tile in prefill.tiles):
                if tile.first <= row + token < tile.last:
                    shapes[chunk.sequence.order, chunk.start + token] = (*tile.bias.shape, row + token - tile.first)
    return shapes


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 9)), min_size=1, max_size=5), st.lists(st.integers(1, 5)))
def test_attention_shapes_depend_on_the_sequence_alone(sizes, cuts):
    """While nothing is recomputed: the less shapes depend on the batch, the less rounding does."""
    sequences = []
    for order, (length, more) in enumerate(sizes):
        sequence = Sequence.of(Request(str(order), (1,) * length), order)
        sequence.tokens += [2] * more
        sequence.blocks = list(range(60))
        sequences.append(sequence)
    alone = {}
    for sequence in sequences:
        prompt = len(sequence.request.prompt)
        alone |= _shapes([Chunk(sequence, 0, prompt)])
        for token in range(prompt, len(sequence.tokens)):
            alone |= _shapes([Chunk(sequence, token, 1)])
    steps = itertools.cycle([*cuts, 2])

    def count_of(sequence, done):
        left = len(sequence.request.prompt) - done
        return min(left, 32 * next(steps)) if left > 0 else 1

    together = {}
    for chunks in chunked(sequences, count_of):
        together |= _shapes(chunks)
    assert together == alone


def test_seeded_sampling_ignores_batch_preemption_and_runner():
    model = make_model("qwen2")
    drawn = {"max_tokens": 12, "top_k": 20, "top_p": 0.95}
    params = [SamplingParams(**drawn, temperature=0.0 if index == 3 else 0.9, seed=index) for index in range(5)]
    requests = [Request(f"r{i}", prompt, params[i]) for i, prompt in enumerate(prompts(5, seed=4, high=20))]
    roomy = LLMEngine(model, make_tenant(model, blocks=64)).run(requests)
    tight = LLMEngine(model, make_tenant(model, blocks=10), max_num_seqs=3, max_batch_tokens=16).run(requests)
    assert tight.metrics.preemptions > 0
    recorded = LLMEngine(model, make_tenant(model), runner="gpu").run(requests)
    near = near_tokens(model, requests, roomy.outputs)
    assert tokens_of(tight) == near
    assert tokens_of(recorded) == near
    again = Request("r0", requests[0].prompt, SamplingParams(max_tokens=12, temperature=0.9, seed=99))
    other = LLMEngine(model, make_tenant(model)).run([again])
    assert other.outputs["r0"].tokens != roomy.outputs["r0"].tokens
    assert roomy.outputs["r1"].tokens != reference_tokens(model, requests[1].prompt, 12)


LIKELY = torch.tensor([0.05, 0.4, 0.2, 0.15, 0.12, 0.08])
CUTS = {
    "whole": ({}, [0, 1, 2, 3, 4, 5]),
    "top_k": ({"top_k": 3}, [1, 2, 3]),
    "top_p": ({"top_p": 0.7}, [1, 2, 3]),  # 0.4 + 0.2 + 0.15 reaches it
    "both": ({"top_k": 4, "top_p": 0.6}, [1, 2]),  # of the four, 0.6 / 0.87 reaches it
    "more than there are": ({"top_k": 50}, [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("cut", CUTS)
def test_sampling_follows_the_distribution(cut, temperature):
    """Chi-square of draws by seed and by position, below its value at a probability of 0.001."""
    settings, kept = CUTS[cut]
    # Cuts look at probabilities after the temperature: begin with the logits that have the same ones.
    logits = LIKELY.log() * temperature
    wanted = LIKELY[kept] / LIKELY[kept].sum()
    limit = {2: 10.83, 3: 13.82, 6: 20.52}[len(kept)]
    draws = [(seed, 7) for seed in range(600)], [(11, position) for position in range(600)]
    for each in draws:
        counts = torch.zeros(len(LIKELY))
        for seed, position in each:
            sampling = SamplingParams(temperature=temperature, seed=seed, **settings)
            counts[int(scores(logits, sampling, position).argmax())] += 1
        assert counts.sum() == counts[kept].sum() == 600
        assert float(((counts[kept] - 600 * wanted) ** 2 / (600 * wanted)).sum()) < limit


def test_who_ties_with_the_last_token_kept_is_kept():
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0])
    for cut in ({"top_k": 2}, {"top_p": 0.7}):
        found = scores(logits, SamplingParams(temperature=1.0, **cut), 3)
        assert torch.isfinite(found).tolist() == [True, True, True, False]


class Sorted(TorchDispatchMode):
    """Counts the elements that are sorted inside of it."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "sort" in function.name():
            self.elements += args[0].numel()
        return function(*args, **(kwargs or {}))


def flat_and_peaked():
    generator = torch.Generator().manual_seed(8)
    for scale in (0.0, 0.01, 1.0, 4.0, 30.0):
        yield scale * torch.randn(3000, generator=generator)
    yield torch.randn(3000, generator=generator).mul(2).round()  # many that tie
    yield torch.randn(3000, generator=generator).bfloat16().float()
    yield torch.randn(3000, generator=generator).masked_fill(torch.rand(3000, generator=generator) < 0.5, -math.inf)
    yield torch.tensor([2.0])


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("temperature", [1.0, 0.01, 7.0])
def test_top_p_keeps_the_tokens_that_a_sort_of_all_keeps(temperature, top_k):
    """Up to shares of 1 - 1e-12; beyond, the rounding of the sums decides."""
    for logits, top_p in itertools.product(flat_and_peaked(), (1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12)):
        scaled = (logits.double() - logits.max()) / temperature
        if 0 < top_k < len(scaled):
            scaled = scaled.masked_fill(scaled < scaled.sort(descending=True).values[top_k - 1], -math.inf)
        ordered = scaled.sort(descending=True).values
        reached = ordered.softmax(0).cumsum(0)
        least = ordered[(reached < top_p * reached[-1]).sum()]
        found = scores(logits, SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k), 3)
        assert torch.equal(torch.isfinite(found), (scaled >= least) & torch.isfinite(scaled)), (top_p, least)


def test_min_p_keeps_what_is_so_likely_beside_the_likeliest():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    for min_p, kept in ((0.0, 4), (0.2, 4), (0.3, 2), (0.6, 1), (1.0, 1)):
        found = scores(logits, SamplingParams(temperature=1.0, min_p=min_p), 3)
        assert torch.isfinite(found).tolist() == [True] * kept + [False] * (4 - kept), min_p
        hot = scores(logits, SamplingParams(temperature=2.0, min_p=min_p), 3)  # of the softmax that is drawn from
        assert torch.isfinite(hot).sum() >= kept
    with pytest.raises(InvalidArgument):
        SamplingParams(min_p=1.5)


def test_top_p_sorts_few_tokens():
    """Of a flat model's, of which 30,000 are kept."""
    logits = torch.randn(49152, generator=torch.Generator().manual_seed(1))
    with Sorted() as counted:
        found = scores(logits, SamplingParams(temperature=1.0, top_p=0.9), 3)
    assert torch.isfinite(found).sum() > 25000
    assert 0 < counted.elements < 1000


def test_logits_that_are_no_numbers_draw_the_first_token_with_top_p_too():
    for logits in (torch.full((5,), math.nan), torch.tensor([0.0, math.nan, 1.0])):
        for top_p in (1.0, 0.5):
            assert int(scores(logits, SamplingParams(temperature=1.0, top_p=top_p), 3).argmax()) == 0


def from_sorted(logits, seed):
    """A draw that inverts the cumulative distribution of sorted probabilities: what this engine does not do."""
    probabilities, ids = torch.softmax(logits, -1).sort(descending=True, stable=True)
    return int(
        ids[int(torch.searchsorted(probabilities.cumsum(0), random.Random(seed).random()).clamp(max=len(ids) - 1))]
    )


@pytest.mark.parametrize("cut", [{}, {"top_k": 50}, {"top_p": 0.9}], ids=str)
def test_logits_that_round_otherwise_give_the_same_draws(cut):
    """A flat model of 20,000 tokens, with logits apart by 1e-6 as in another batch."""
    generator = torch.Generator().manual_seed(2)
    logits = 0.05 * torch.randn(20000, generator=generator)
    other = logits + 1e-6 * (2 * torch.rand(20000, generator=generator) - 1)
    sampled = [SamplingParams(temperature=1.0, seed=seed, **cut) for seed in range(100)]
    assert all(int(scores(logits, one, 9).argmax()) == int(scores(other, one, 9).argmax()) for one in sampled)
    assert sum(from_sorted(logits, seed) != from_sorted(other, seed) for seed in range(100)) > 3


def test_a_draw_is_the_same_on_every_machine():
    """Its noise is made of integers: these figures hold for any processor and release."""
    found = scores(torch.zeros(4), SamplingParams(temperature=1.0, seed=-5), 17)
    torch.testing.assert_close(
        found,
        torch.tensor(
            [0.8463981215359719, -0.4544954331135961, 2.39637086526143, 1.220211853035835], dtype=torch.float64
        ),
        rtol=1e-12,
        atol=0,
    )


def test_tokens_are_near_only_where_the_model_finds_them_as_good():
    model = make_model("llama")
    near = reference_tokens(model, (1, 2, 3), 6)
    logits = logits_after(model, [1, 2, 3, *near[:2]])
    assert float(logits.topk(2).values.diff()) < -MARGIN[torch.float32]
    other = int(logits.topk(2).indices[1])
    assert near == list(near) and near[:3] == tuple(near)[:3]
    assert near != (*near[:2], other, *near[3:]) and near != near[:5] and {"a": tuple(near)} == {"a": near}
    close = Near(lambda ids, use_cache: SimpleNamespace(logits=torch.zeros(1, 1, VOCAB)), near.request, near)
    close.model.dtype = torch.float32
    assert close == (*near[:2], other, 9) and close[:3] == (*near[:2], other)


def test_stop_tokens_end_a_request():
    model = make_model("llama")
    prompt = prompts(1, low=6)[0]
    tokens = reference_tokens(model, prompt, 8)
    stop = tokens[4]
    request = Request("a", prompt, SamplingParams(max_tokens=8, stop_token_ids={stop}))
    output = LLMEngine(model, make_tenant(model)).run([request]).outputs["a"]
    assert output.tokens == tokens[: tokens.index(stop) + 1]
    assert output.finish_reason == "stop"


def _fail(*args, **kwargs):
    raise RuntimeError("broken layer")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_layer_that_raises_leaves_every_request_where_it_was(streaming, runner, monkeypatch):
    model = make_model("llama")
    tenant = make_tenant(model)
    tenant.streaming = streaming
    engine = LLMEngine(model, tenant, runner=runner, max_batch_tokens=16)
    requests = requests_for(4, seed=5, tokens=6)
    for request in requests:
        engine.add_request(request)
    outputs, steps = {}, 0
    while engine.unfinished:
        if steps % 3 == 1:
            with monkeypatch.context() as patch:
                patch.setattr(model.model.layers[1].mlp, "forward", _fail)
                with pytest.raises(RuntimeError, match="broken layer"):
                    engine.step()
            assert not internals(tenant).in_pass
        outputs.update((output.id, output.tokens) for output in engine.step().finished)
        steps += 1
    assert tenant.abandoned > 2
    assert outputs == expected_tokens(model, requests)


def test_refusals_change_nothing():
    model = make_model("llama")
    tenant = make_tenant(model, blocks=4)
    engine = LLMEngine(model, tenant)
    for prompt, tokens, needed, limit in ((10, 8, 5, 4), (120, 10, 129, 128)):
        with pytest.raises(InvalidArgument) as caught:
            engine.add_request(Request("long", (1,) * prompt, SamplingParams(max_tokens=tokens)))
        assert (caught.value.needed, caught.value.limit) == (needed, limit)
    for token in (-1, VOCAB):
        with pytest.raises(InvalidArgument) as caught:
            engine.add_request(Request("strange", (1, token), SamplingParams(max_tokens=1)))
        assert (caught.value.token, caught.value.vocabulary) == (token, VOCAB)
    with pytest.raises(InvalidArgument) as caught:
        engine.add_request(Request("json", (1,), SamplingParams(json_schema="{}")))
    assert caught.value.param == "json_schema"
    assert not engine.unfinished
    engine.add_request(Request("fits", (1,) * 10, SamplingParams(max_tokens=7)))
    for call, argument in ((engine.add_request, Request("fits", (1,))), (engine.abort, "unknown")):
        with pytest.raises(InvalidArgument):
            call(argument)
    engine.step()
    assert engine.abort("fits").finish_reason == "abort"
    assert tenant.kv.free_blocks == 4
    for other in (make_model("opt"), torch.nn.Linear(2, 2)):
        with pytest.raises(InvalidArgument):
            ModelRunner(other, tenant)
    for heads in ((7, 8), (3, 4)):
        kv = FakeKV(layers=LAYERS, kv_heads=heads[0], head_dim=heads[1], blocks=4)
        with pytest.raises(InvalidArgument) as caught:
            ModelRunner(model, FakeTenant(LAYERS, kv))
        assert caught.value.got == (LAYERS, *heads, torch.float32)


def test_a_pool_that_shrank_under_a_lone_request_is_an_error_not_a_loop():
    model = make_model("llama")
    tenant = make_tenant(model, blocks=6)
    engine = LLMEngine(model, tenant)
    engine.add_request(Request("a", (1, 2, 3), SamplingParams(max_tokens=18)))
    engine.step()
    tenant.kv.free_ids = tenant.kv.free_ids[:2]
    with pytest.raises(OutOfBlocks) as caught:
        while engine.unfinished:
            engine.step()
    assert caught.value.requested > caught.value.usable == 3
    assert caught.value.request == "a"
    assert engine.abort("a").tokens == reference_tokens(model, (1, 2, 3), 18)[: 3 * 4 - 2]


def test_arrivals_are_respected_on_the_engines_clock():
    model, now, slept = make_model("llama"), itertools.count(), []  # each look takes a thousandth of a second
    engine = LLMEngine(model, make_tenant(model), clock=lambda: next(now) * 1e-3 + sum(slept), sleep=slept.append)
    late = Request("late", (1, 2), SamplingParams(max_tokens=2), arrival_s=5.0)
    result = engine.run([late, Request("now", (3,), SamplingParams(max_tokens=3))])
    assert list(result.outputs) == ["now", "late"]
    assert result.metrics.duration_s > 5.0
    assert max(result.metrics.ttft_s) < 0.1
    assert (len(result.metrics.ttft_s), len(result.metrics.tbt_s)) == (2, 3)


@pytest.mark.parametrize("temperature", [1e-42, 1e-60])
def test_a_temperature_near_0_draws_the_largest(temperature):
    """Divided by it, logits leave a float's range."""
    logits = torch.tensor([[1.0, 3.0, -2.0], [-5.0, -7.0, -9.0]])
    sampling = SamplingParams(temperature=temperature, seed=3)
    chunks = [Chunk(Sequence.of(Request("x", (1,), sampling), 0), 0, 1) for _ in range(2)]
    assert sample(chunks, logits) == [1, 0]
