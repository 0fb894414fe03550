"""Keys and values made again from activations are those that the pass wrote, and those of transformers; tokens do not change."""

from __future__ import annotations

import copy
import itertools
import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402
from near_tokens import near_tokens  # noqa: E402
from test_engine_runner import (  # noqa: E402
    LAYERS,
    VOCAB,
    chunked,
    expected_tokens,
    make_model,
    make_tenant,
    prompts,
    requests_for,
    sequences_for,
    tokens_of,
)  # fmt: skip

from remap.errors import InvalidArgument  # noqa: E402
from remap.internals import internals  # noqa: E402
from remap_serve.engine import LLMEngine, ModelRunner  # noqa: E402
from remap_serve.engine.models import (  # noqa: E402
    LlamaLike,
    Opt,
    decoder_of,
    kv_from_activations,
    min_rows,
    require_smaller_activations,
)  # fmt: skip

KINDS = ("opt", "opt-post-norm-projected", "gpt2", "llama-all-heads")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def model_of(kind, dtype):
    return copy.deepcopy(make_model(kind)).to(dtype)


def remember(runner):
    """Keep each layer's input: the result is (layers, blocks, block_tokens, activation_width), filled by the runner's passes."""
    decoder, kv = runner.decoder, runner.tenant.kv
    shape = (LAYERS, kv.tensors[0].shape[1], internals(runner.tenant).kv.block_tokens, decoder.activation_width)
    kept = torch.full(shape, float("nan"), dtype=runner.dtype)
    plain = decoder.layer

    def layer(index, hidden, rotary, attend):
        batch = attend.args[1]
        kept[index].index_put_((batch.block_ids, batch.offsets), hidden[: batch.tokens])
        return plain(index, hidden, rotary, attend)

    decoder.layer = layer
    return kept


def projections(decoder, index, x):
    """(the inputs of the projection of keys and values, weights (out, in), biases) of a layer."""
    layer = decoder.layers[index]
    if isinstance(decoder, LlamaLike):
        linear = [layer.self_attn.k_proj, layer.self_attn.v_proj]
        return layer.input_layernorm(x), [one.weight for one in linear], [one.bias for one in linear]
    if isinstance(decoder, Opt):
        linear = [layer.self_attn.k_proj, layer.self_attn.v_proj]
        normed = layer.self_attn_layer_norm(x) if layer.do_layer_norm_before else x
        return normed, [one.weight for one in linear], [one.bias for one in linear]
    return layer.ln_1(x), [layer.attn.c_attn.weight.T], [layer.attn.c_attn.bias]


def tolerance(decoder, index, x):
    """By row, how far two computations of K or V may be apart that sum in another order.

    An element is a sum of n products and a bias. Its computed value is off by at most n u S, where u is the unit roundoff and
    S the sum of the magnitudes, S <= |x| |w| + |b| (Cauchy-Schwarz); two values are apart by twice that. A rotation mixes two
    such elements (a factor of at most sqrt 2) and rounds three times. bfloat16: the sum is made in float32 and rounded once.
    """
    normed, weights, biases = projections(decoder, index, x)
    length = max(float(one.float().norm(dim=1).max()) for one in weights)
    magnitude = normed.float().norm(dim=1) * length + max(float(one.abs().max()) for one in biases if one is not None)
    n = decoder.activation_width + 1
    float32 = 2 * n * 2.0**-24 * 2**0.5 + 6 * 2.0**-24
    return magnitude * (float32 if x.dtype is torch.float32 else float32 + 8 * 2.0**-8)


def assert_near(made, expected, limit):
    assert made.shape == expected.shape and made.dtype == expected.dtype
    assert ((made.float() - expected.float()).abs().amax((1, 2)) <= limit).all()


@each_dtype
@each_kind
def test_from_stored_activations_keys_and_values_are_those_that_the_pass_wrote(kind, dtype):
    """In passes of whole prompts, chunks and single tokens; made again by block, by sequence, for one token, and mixed."""
    model = model_of(kind, dtype)
    tenant = make_tenant(model)
    runner = ModelRunner(model, tenant)
    kept = remember(runner)
    sequences = sequences_for(tenant, prompts(5, seed=2, low=9))
    sizes = itertools.cycle([3, 5, 1, 8, 2, 7, 4, 1, 1, 6, 9, 2, 1, 1, 30])
    for chunks in chunked(sequences, lambda sequence, done: next(sizes)):
        runner.forward(chunks)
    slots = [
        (sequence.blocks[position // 4], position % 4, position)
        for sequence in sequences
        for position in range(len(sequence.tokens))
    ]
    shuffled = random.Random(4).sample(slots, len(slots))
    groups = (
        [slots[at : at + 4] for at in range(0, len(slots), 4)]
        + [slots, shuffled, shuffled[:11]]
        + [[one] for one in slots]
    )
    with torch.inference_mode():
        for group, layer in itertools.product(groups, range(LAYERS)):
            blocks, offsets, positions = (torch.tensor(column) for column in zip(*group))
            x = kept[layer, blocks, offsets]
            before = x.clone()
            made = kv_from_activations(runner.decoder, layer, x, positions)
            assert torch.equal(x, before)
            for one, stored in zip(made, tenant.kv.tensors[layer]):
                assert_near(one, stored[blocks, offsets], tolerance(runner.decoder, layer, x))


@each_dtype
@each_kind
@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_a_layer_attends_with_the_keys_and_values_that_keys_values_gives(kind, dtype, rows):
    """In batches of equal shapes bit for bit, of whatever number of rows, without padding."""
    decoder = decoder_of(model_of(kind, dtype))
    ids, positions = torch.randint(0, VOCAB, (rows,)), torch.randint(0, 100, (rows,))
    seen = []

    def attend(q, k, v, scale):
        seen.append((k, v))
        return q.flatten(1)

    with torch.inference_mode():
        hidden, rotary = decoder.embed(ids, positions)
        for layer in range(LAYERS):
            before = hidden.clone()
            made = decoder.keys_values(layer, hidden, decoder.rotary(hidden, positions))
            hidden = decoder.layer(layer, hidden, rotary, attend)
            assert all(map(torch.equal, made, seen[layer]))
            if rows >= min_rows(dtype):  # else it is padded
                assert all(map(torch.equal, made, kv_from_activations(decoder, layer, before, positions)))


@each_dtype
@each_kind
def test_keys_and_values_are_those_of_transformers(kind, dtype):
    """From the hidden states that transformers reports, against the cache that it filled in the same call."""
    model = model_of(kind, dtype)
    decoder = decoder_of(model)
    ids = torch.tensor([prompts(1, seed=6, low=30)[0]])
    with torch.inference_mode():
        stock = model(ids, output_hidden_states=True, use_cache=True)
        for layer in range(LAYERS):
            x = stock.hidden_states[layer][0]
            made = kv_from_activations(decoder, layer, x, torch.arange(ids.shape[1]))
            cached = stock.past_key_values.layers[layer]
            for one, expected in zip(made, (cached.keys, cached.values)):
                assert_near(one, expected[0].transpose(0, 1), tolerance(decoder, layer, x))


@each_dtype
@each_kind
@pytest.mark.parametrize("blocks", [64, 14])
def test_tokens_are_the_same_if_blocks_lose_their_keys_and_values_before_each_pass(kind, dtype, blocks):
    """Random complete blocks of running requests; with 14 blocks, requests are preempted and recomputed as well."""
    lose_and_compare(model_of(kind, dtype), blocks)


def test_tokens_are_the_same_where_a_row_rounds_otherwise_with_another_number_of_rows(monkeypatch):
    """As on a processor whose kernels for some numbers of rows add four sums, each rounded to bfloat16."""
    plain = F.linear

    def linear(x, weight, bias=None):
        if x.numel() // x.shape[-1] % 3 == 0:
            return plain(x, weight, bias)
        parts = sum(plain(x[..., part::4], weight[:, part::4]) for part in range(4))
        return parts if bias is None else parts + bias

    monkeypatch.setattr(F, "linear", linear)
    model = model_of("llama-all-heads", torch.bfloat16)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert not torch.equal(model.lm_head(x)[:2], model.lm_head(x[:2]))
    lose_and_compare(model, blocks=64)


def lose_and_compare(model, blocks):
    requests, rng, dtype = requests_for(), random.Random(9), model.dtype
    options = {"max_num_seqs": 4, "max_batch_tokens": 24}
    plain = LLMEngine(model, make_tenant(model, blocks=blocks), **options).run(requests)
    tenant = make_tenant(model, blocks=blocks)
    engine = LLMEngine(model, tenant, **options)
    kept, made_again = remember(engine.runner), 0
    forward = engine.runner.forward

    @torch.inference_mode()
    def lose_and_make(chunks):
        nonlocal made_again
        for sequence in engine.scheduler.running:
            for index in range(sequence.computed // 4):
                if rng.random() < 0.5:
                    block, positions = sequence.blocks[index], torch.arange(4 * index, 4 * index + 4)
                    for layer, tensor in enumerate(tenant.kv.tensors):
                        tensor[:, block] = float("nan")
                        made = kv_from_activations(engine.runner.decoder, layer, kept[layer, block], positions)
                        tensor[0, block], tensor[1, block] = made
                    made_again += 1
        return forward(chunks)

    engine.runner.forward = lose_and_make
    result = engine.run(requests)
    # Made in batches of other sizes than those of the passes: equal up to rounding.
    assert tokens_of(result) == near_tokens(model, requests, plain.outputs)
    assert made_again > 50
    assert (result.metrics.preemptions > 0) == (blocks == 14)
    if dtype is torch.float32:
        assert tokens_of(plain) == expected_tokens(model, requests)


def test_activations_that_save_nothing_are_refused_with_the_numbers():
    # 48 elements of 4 bytes, against 2 tensors of 2 KV heads of 8 elements (Qwen3 here: of 16).
    for kind, kv in (("llama", 128), ("qwen2", 128), ("qwen3", 256)):
        decoder = decoder_of(make_model(kind))
        assert decoder.activation_width == 48
        if kv < 192:
            with pytest.raises(InvalidArgument) as caught:
                kv_from_activations(decoder, 0, torch.zeros(4, 48), torch.arange(4))
            assert (caught.value.activation_bytes, caught.value.kv_bytes) == (192, kv)
        else:
            require_smaller_activations(decoder)
    for kind in KINDS:
        decoder = decoder_of(make_model(kind))
        require_smaller_activations(decoder)
        assert 2 * decoder.activation_width == 2 * decoder.kv_heads * decoder.head_dim


def test_keys_whose_angles_depend_on_the_batch_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    shape = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_hidden_layers": 1,
        "vocab_size": 50,
    }
    config = transformers.LlamaConfig(**shape, rope_parameters=rope)
    decoder = decoder_of(transformers.LlamaForCausalLM(config))
    with pytest.raises(InvalidArgument, match="depend on the whole batch"):
        require_smaller_activations(decoder)


def test_activations_of_another_shape_or_dtype_are_refused():
    decoder = decoder_of(make_model("opt"))
    for x, positions in (
        (torch.zeros(4, 47), torch.arange(4)),
        (torch.zeros(3, 48), torch.arange(4)),
        (torch.zeros(4, 48, dtype=torch.bfloat16), torch.arange(4)),
    ):
        with pytest.raises(InvalidArgument) as caught:
            kv_from_activations(decoder, 0, x, positions)
        assert caught.value.expected == (4, 48)
