"""The Triton kernels in the interpreter, against the obvious reference. Run by test_triton_attention.py, in a process of
its own with TRITON_INTERPRET=1: whether a kernel is interpreted is decided when its module is imported.

All KV memory holds NaN but the slots that a sequence has written, and table entries beyond a sequence's blocks name a block
far outside of the memory: what should not be read either shows in the result or ends the process.
"""

from __future__ import annotations

import random
import sys
from itertools import product

import pytest
import torch
from effort import some, spread
from fakes import FakeSession
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import flashinfer_module
from test_engine_gpu_runner import tenant_for
from test_engine_runner import expected_tokens, make_model, requests_for, tokens_of

from reference.attention_reference import decode_reference, prefill_reference
from remap.errors import InvalidArgument
from remap_serve.engine import LLMEngine
from remap_serve.engine import gpu_runner as runner_module
from remap_serve.engine.fused_triton import FusedLlama, rms_norm, rotate_, silu_mul
from remap_serve.engine.models import LlamaLike
from remap_serve.engine.paged_triton import INTERPRETED, decode_splits, paged_decode, write_kv
from remap_serve.engine.prefill_triton import paged_prefill, prefill_config, prefill_tiles

assert INTERPRETED

FAR = 2**30
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
CASES = settings(max_examples=some(5, 14), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


class World:
    """KV memory of one layer with sequences of given lengths in it, wherever the dice put them."""

    def __init__(self, seed, kv_heads, dim, block_tokens, lengths, dtype, layout):
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // block_tokens) for length in lengths]
        ids = rng.sample(range(sum(counts) + 7), sum(counts))
        blocks = sum(counts) + 7
        if layout == "block_major":
            layers = rng.randint(1, 4)
            self.memory = torch.full((blocks, layers, 2, block_tokens, kv_heads, dim), float("nan"), dtype=dtype)
            self.kv = self.memory[:, rng.randrange(layers)].transpose(0, 1)
        else:
            self.memory = torch.full((2, blocks + 3, block_tokens, kv_heads, dim), float("nan"), dtype=dtype)
            self.kv = self.memory[:, :blocks]
        self.table = [[ids.pop() for _ in range(count)] for count in counts]
        width, sequences = max(counts, default=1) + rng.randint(0, 3), len(lengths) + rng.randint(0, 3)
        transposed = rng.random() < 0.5
        shape = (width, sequences) if transposed else (sequences, width)
        self.device_table = torch.full(shape, FAR, dtype=torch.int32)
        if transposed:
            self.device_table = self.device_table.t()
        self.rows = rng.sample(range(sequences), len(lengths))
        for row, blocks_of in zip(self.rows, self.table, strict=True):
            self.device_table[row, : len(blocks_of)] = torch.tensor(blocks_of, dtype=torch.int32)
        for blocks_of, length in zip(self.table, lengths, strict=True):
            k, v = (torch.randn(length, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
            slots = [blocks_of[token // block_tokens] * block_tokens + token % block_tokens for token in range(length)]
            write_kv(self.kv, k, v, torch.tensor(slots, dtype=torch.int32))
        self.random = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def shapes(draw):
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 7), (2, 4), (1, 20)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    dim = draw(st.sampled_from([8, 24, 64, 80, 96, 128, 256]))
    block_tokens = draw(st.sampled_from([1, 3, 4, 16]))
    return kv_heads, group, dim, block_tokens, dtype, draw(st.sampled_from(["block_major", "layer_major"]))


@CASES
@given(st.data())
def test_decode(data):
    kv_heads, group, dim, block_tokens, dtype, layout = shapes(data.draw)
    lengths = data.draw(
        st.lists(st.sampled_from([0, 1, block_tokens, block_tokens + 1, 17, 70]), min_size=1, max_size=3)
    )
    world = World(data.draw(st.integers(0, 99)), kv_heads, dim, block_tokens, lengths, dtype, layout)
    q = world.random(len(lengths), kv_heads * group + 2, dim)[:, 1:-1]
    out = torch.full((len(lengths), kv_heads * group, dim), float("nan"), dtype=dtype)
    result = paged_decode(
        q, world.kv, world.device_table, torch.tensor(lengths, dtype=torch.int32), out,
        rows=torch.tensor(world.rows, dtype=torch.int32), splits=data.draw(st.sampled_from([None, 1, 2, 5])),
    )  # fmt: skip
    assert result is out
    expected = decode_reference(q, world.kv, world.table, lengths, dim**-0.5)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@CASES
@given(st.data())
def test_prefill(data):
    kv_heads, group, dim, block_tokens, dtype, layout = shapes(data.draw)
    spans = data.draw(
        st.lists(st.tuples(st.sampled_from([0, 1, 5, 40]), st.sampled_from([1, 2, 33])), min_size=1, max_size=2)
    )
    lengths = [start + count for start, count in spans]
    world = World(data.draw(st.integers(0, 99)), kv_heads, dim, block_tokens, lengths, dtype, layout)
    first, chunks = 1, []  # the first token of the batch is somebody else's
    for index, (start, count) in enumerate(spans):
        chunks.append((index, first, count, start))
        first += count
    q = world.random(first, kv_heads * group, dim)
    out = torch.full_like(q, 5.0)
    tiles = prefill_tiles([(world.rows[row], *rest) for row, *rest in chunks], group, dim, dtype)
    scale = data.draw(st.sampled_from([dim**-0.5, 0.05]))
    paged_prefill(q, world.kv, world.device_table, tiles, out, scale)
    expected = prefill_reference(q, world.kv, world.table, chunks, scale)
    expected[0] = 5.0
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@CASES
@given(st.data())
def test_write(data):
    """Only the slots named change; k and v may be slices of something larger."""
    kv_heads, _, dim, block_tokens, dtype, layout = shapes(data.draw)
    world = World(data.draw(st.integers(0, 99)), kv_heads, dim, block_tokens, [9, 2], dtype, layout)
    slots = data.draw(st.lists(st.integers(-1, world.kv.shape[1] * block_tokens - 1), max_size=5, unique=True))
    both = world.random(len(slots), 3, kv_heads, dim)
    expected = world.memory.clone()
    view = expected.as_strided(world.kv.shape, world.kv.stride(), world.kv.storage_offset())
    for token, slot in enumerate(slots):
        if slot >= 0:
            view[0, slot // block_tokens, slot % block_tokens] = both[token, 1]
            view[1, slot // block_tokens, slot % block_tokens] = both[token, 2]
    write_kv(world.kv, both[:, 1], both[:, 2], torch.tensor(slots, dtype=torch.int32))
    assert torch.equal(world.memory.nan_to_num(77.0), expected.nan_to_num(77.0))


def test_blocks_beyond_the_reach_of_32_bit_offsets():
    blocks, stride = 40, 2**31 // 32
    memory = torch.empty(blocks * stride, dtype=torch.float16)  # 5 GiB of addresses, of which a few pages are touched
    kv = memory.as_strided((2, blocks, 4, 1, 16), (64, stride, 16, 16, 1), 0)
    k, v, q = torch.randn(3, 6, 1, 16, generator=torch.Generator().manual_seed(1)).half()
    slots = torch.tensor([38 * 4 + 3, 39 * 4, 39 * 4 + 1, 39 * 4 + 2, 39 * 4 + 3, 0], dtype=torch.int32)
    write_kv(kv, k, v, slots)
    assert torch.equal(kv[0, 39, 2], k[3])
    table = torch.tensor([[39]], dtype=torch.int32)
    out = paged_decode(q[:1], kv, table, torch.tensor([4], dtype=torch.int32))
    expected = decode_reference(q[:1], kv, [[39]], [4], 0.25)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    out = paged_prefill(q[:4], kv, table, prefill_tiles([(0, 0, 4, 0)], 1, 16, torch.float16))
    expected = prefill_reference(q[:4], kv, [[39]], [(0, 0, 4, 0)], 0.25)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)


def test_every_token_is_in_one_tile():
    chunks = [(3, 0, 100, 7), (1, 100, 1, 0), (2, 101, 64, 900)]
    tiles = prefill_tiles(chunks, 4, 128, torch.bfloat16).tolist()
    most = prefill_config(128, torch.bfloat16)["ROWS"] // 4
    covered = [(row, first + i, position + i) for row, first, count, position in tiles for i in range(count)]
    assert sorted(covered) == sorted(
        (row, first + i, position + i) for row, first, count, position in chunks for i in range(count)
    )
    assert max(count for _, _, count, _ in tiles) == most
    ends = [position + count for _, _, count, position in tiles]
    assert ends == sorted(ends, reverse=True)


def test_splits_fill_the_machine_and_cut_long_contexts():
    assert decode_splits(1, 8, 2048, 132) == 32
    assert decode_splits(64, 8, 2048, 132) == 1
    assert decode_splits(64, 8, 16384, 132) == 4
    for batch in (1, 3, 9, 300):
        assert 1 <= decode_splits(batch, 3, 10**6, 132) <= 32


def test_shapes_that_do_not_fit_are_refused():
    kv = torch.zeros(2, 4, 4, 2, 16)
    lens, table = torch.ones(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    for call in (
        lambda: paged_decode(torch.zeros(1, 3, 16), kv, table, lens),
        lambda: paged_decode(torch.zeros(1, 4, 8), kv, table, lens),
        lambda: paged_decode(torch.zeros(2, 4, 16), kv, table, lens),
        lambda: paged_decode(torch.zeros(1, 4, 16), kv.transpose(3, 4), table, lens),
        lambda: paged_prefill(torch.zeros(1, 4, 16), kv, table, torch.zeros(1, 3, dtype=torch.int32)),
        lambda: write_kv(kv, torch.zeros(1, 1, 16), torch.zeros(1, 1, 16), lens),
        lambda: prefill_tiles([(0, 0, 1, 0)], 300, 64, torch.float16),
    ):
        with pytest.raises(InvalidArgument):
            call()
    assert not kv.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_operations(dtype):
    torch.manual_seed(1)
    rounding = 1e-5 if dtype is torch.float32 else 2e-2
    x = torch.randn(5, 60).to(dtype)
    weight = torch.randn(48).to(dtype)
    wide = x[:, 6:54].float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    torch.testing.assert_close(rms_norm(x[:, 6:54], weight, 1e-5), expected, atol=1e-6, rtol=rounding)
    q = torch.randn(5, 9, 24).to(dtype)[:, 1:7]
    angle = torch.randn(5, 12).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    turned = torch.cat((-q[..., 12:], q[..., :12]), -1)
    expected = (q.float() * cos.float()[:, None] + turned.float() * sin.float()[:, None]).to(dtype)
    rotate_(q, cos, sin)
    torch.testing.assert_close(q, expected)
    gate, up = torch.randn(2, 7, 333).to(dtype)
    expected = (torch.nn.functional.silu(gate.float()) * up.float()).to(dtype)
    torch.testing.assert_close(silu_mul(gate, up), expected, atol=1e-6, rtol=rounding)


@pytest.mark.parametrize("kind", ["llama", "llama-bias-rope", "qwen2", "qwen3"])
def test_fused_layers_are_the_plain_ones(kind):
    model = make_model(kind)
    assert FusedLlama.fits(model)
    seen = []

    def attend(q, k, v, scale):
        seen.append((q.clone(), k.clone(), scale))
        return (q * v.repeat_interleave(q.shape[1] // v.shape[1], 1)).flatten(1)

    ids, positions = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 7, 3, 1, 90], dtype=torch.int32)
    results = []
    with torch.inference_mode():
        for decoder in (LlamaLike(model), FusedLlama(model)):
            hidden, rotary = decoder.embed(ids, positions)
            for layer in range(3):
                made = decoder.keys_values(layer, hidden, decoder.rotary(hidden, positions))
                hidden = decoder.layer(layer, hidden, rotary, attend)
                assert torch.equal(made[0], seen[-1][1])
            results.append((hidden, decoder.head(hidden)))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
    for (q, k, scale), (fused_q, fused_k, fused_scale) in zip(seen[:3], seen[3:], strict=True):
        torch.testing.assert_close((fused_q, fused_k), (q, k), atol=1e-5, rtol=1e-5)
        assert scale == fused_scale == LlamaLike(model).scale


@pytest.mark.parametrize(("kind", "attention"), spread([*product(("qwen3", "opt"), ("triton", "flashinfer"))], 2))
def test_the_runner_on_the_kernels(kind, attention, monkeypatch):
    """Whole requests: mixed passes, padded decodes, moved blocks; whole and piecewise."""
    if attention == "flashinfer":
        monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_module())
        from remap_serve.engine.paged_flashinfer import FlashInferPaged

        def choose(name, tensors, heads, scale, *, max_blocks, max_tiles, by_kernel):
            return FlashInferPaged(tensors, heads, scale, max_blocks, by_kernel)

        monkeypatch.setattr(runner_module, "choose_attention", choose)
    if kind == "qwen3":
        monkeypatch.setattr(runner_module, "_decoder_for", lambda model, device: FusedLlama(model))
    model = make_model(kind)
    tenant = tenant_for(model, blocks=8, max_blocks=60)
    tenant.flip = True
    session = FakeSession(tenant, move_every=2)
    session.exclusively = lambda call, always=False: None
    arguments = {"attention": "triton", "staging": "kernel"} if attention == "triton" else {}
    engine = LLMEngine(model, tenant, session=session, runner="gpu", max_num_seqs=3, max_batch_tokens=40, **arguments)
    assert engine.runner.attention.name == attention
    requests = requests_for(4, tokens=3, high=12)
    assert tokens_of(engine.run(requests)) == expected_tokens(model, requests)
    assert min(engine.runner.stats.values()) > 0
