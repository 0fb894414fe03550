"""The roofline: values by hand, what must grow with what, and others' measurements."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.drawn_experts import drawn_experts
from remap.errors import InvalidArgument
from remap.policy._tables import table_of
from remap.policy.hardware import machine, model
from remap_serve.sim.model_variants import in_dtype
from remap_serve.sim.roofline import Roofline, prefill_pairs, touched

# A machine on which every term is a round number: 1 TB/s, 100 TFLOP/s, half of each reached.
EFFICIENCIES = {"eff_bw": 0.5, "eff_flops": 0.5, "p": 2.0, "attn_decode_eff": 0.25, "attn_prefill_eff": 0.1}
OVERHEADS = {"op_overhead_s": 1e-6, "attn_decode_overhead_s": 3e-6, "other_ops_s": 7e-6}
ROUND = machine("H100-SXM").with_(
    hbm_bytes_per_s=1e12, flops=1e14, other_ops_s_per_token_per_khidden=1e-8, **EFFICIENCIES, **OVERHEADS
)
SHAPE = {"layers": 2, "hidden": 1000, "heads": 10, "kv_heads": 5, "head_dim": 100, "vocab": 4000, "context": 4096}
BYTES = {"dtype_bytes": 2, "layer_bytes": 8_000_000, "resident_bytes": 16_000_000}
OPS = {"linear_ops": [["a", 1000, 3000], ["b", 1000, 1000]], "head": [1000, 4000]}
TINY = {"models": {"tiny": {**SHAPE, **BYTES, **OPS}}}
# Of the data of 7.1: per-layer microseconds of a prefill of 512 and of 2048 tokens.
PREFILL_US = [
    *(("OPT-13b", "GH200-96GB", 650, 2272), ("OPT-13b", "H100-SXM", 674, 2294), ("OPT-13b", "H100-PCIe", 906, 2966)),
    *(("OPT-13b", "H200-SXM", 631, 2255), ("Llama-2-13b", "GH200-96GB", 654, 2288)),
    *(("Llama-2-13b", "H100-SXM", 678, 2309), ("Llama-2-13b", "H100-PCIe", 913, 2987)),
    *(("Llama-3-8b", "GH200-96GB", 474, 1632), ("Llama-3-8b", "H200-SXM", 460, 1619)),
    *(("OPT-30b", "GH200-96GB", 1185, 4195), ("OPT-30b", "H100-SXM", 1229, 4231), ("OPT-30b", "H100-PCIe", 1676, 5507)),
    *(("OPT-6.7b", "GH200-96GB", 445, 1532), ("OPT-6.7b", "H100-PCIe", 613, 1990)),
]


def op(k: int, n: int, tokens: int) -> float:
    memory = 2 * (k * n + tokens * (k + n)) / 5e11
    compute = 2 * tokens * k * n / 5e13
    return (memory**2 + compute**2) ** 0.5 + 1e-6


def test_one_layer_by_hand() -> None:
    roof = Roofline(ROUND, model("tiny", TINY))
    for tokens in (1, 7, 300):
        linear = op(1000, 3000, tokens) + op(1000, 1000, tokens) + 7e-6 + 1e-8 * tokens
        # decode: 2 * 5 * 100 * 2 = 2000 bytes a token of context, at 2.5e11 bytes/s
        decode = linear + 3e-6 + 5000 * 2000 / 2.5e11
        assert roof.layer_s(0, 0, tokens, 5000) == pytest.approx(decode, rel=1e-12)
        # prefill: 4 * 10 * 100 FLOP a pair, at 1e13 FLOP/s
        prefill = linear + 1e-6 + prefill_pairs(tokens, 11) * 4000 / 1e13
        assert roof.layer_s(tokens, prefill_pairs(tokens, 11), 0, 0) == pytest.approx(prefill, rel=1e-12)
    both = op(1000, 3000, 12) + op(1000, 1000, 12) + 7e-6 + 12e-8 + 4e-6 + 100 * 2000 / 2.5e11 + 36 * 4000 / 1e13
    assert roof.layer_s(8, 36, 4, 100) == pytest.approx(both, rel=1e-12)
    assert roof.layer_s(0, 0, 0, 0) == 0.0


def test_the_ends_by_hand() -> None:
    roof = Roofline(ROUND, model("tiny", TINY))
    rows = 2 * (2 * 50 * 1000 * 2 / 5e11 + 1e-6)
    assert roof.ends_s(50, 0) == pytest.approx(rows, rel=1e-12)
    assert roof.ends_s(50, 8) == pytest.approx(rows + op(1000, 4000, 8), rel=1e-12)
    assert roof.ends_s(50, 8) == roof.ends_s(50, 8)
    assert roof.ends_s(0, 0) == 0.0
    for new, before in [(0, 5), (1, 0), (1, 9), (4, 0), (7, 13)]:
        assert prefill_pairs(new, before) == sum(before + i + 1 for i in range(new))
    assert roof.pass_s(5, 15, 3, 30) == pytest.approx(2 * roof.layer_s(5, 15, 3, 30) + roof.ends_s(8, 3), rel=1e-12)


def test_a_mixture_of_experts_reads_the_weights_that_its_tokens_touch() -> None:
    mixtral = model("Mixtral-8x7B")
    roof = Roofline(ROUND, mixtral)
    # Of four popular experts a token takes one with 0.45, of the other four one with 0.05.
    for tokens, read in [(1, 2), (2, 4 * (2 - 0.55**2 - 0.95**2)), (64, 4 * (2 - 0.55**64 - 0.95**64))]:
        rows = 2 * tokens
        memory = 2 * (read * 4096 * 28672 + rows * (4096 + 28672)) / 5e11
        compute = 2 * rows * 4096 * 28672 / 5e13
        expected = (memory**2 + compute**2) ** 0.5 + 1e-6
        assert roof.op_s(4096, 28672, tokens, copies=8, uses=2) == pytest.approx(expected, rel=1e-12)
    dense = Roofline(ROUND, model("Llama-3-8b"))  # the same attention, and one expert's feed-forward
    assert 1.5 < roof.layer_s(0, 0, 1, 1) / dense.layer_s(0, 0, 1, 1) < 2
    assert 3.5 < roof.layer_s(0, 0, 8, 8) / dense.layer_s(0, 0, 8, 8) < 4.5


@pytest.mark.parametrize(
    ("experts", "active", "tokens"),
    [
        (8, 2, 1),
        (8, 2, 16),
        (128, 8, 4),
        (128, 8, 16),
        (128, 8, 64),
        (256, 8, 87),
        (32, 4, 16),
        (4, 3, 2),
        (60, 4, 300),
    ],
)
def test_experts_touched_are_those_of_drawn_tokens(experts: int, active: int, tokens: int) -> None:
    mean, error = drawn_experts(experts, active, tokens, batches=600)
    assert touched(experts, active, tokens) == pytest.approx(mean, abs=4 * error + 1e-9)


@given(st.integers(1, 512), st.integers(1, 64), st.integers(0, 4096))
def test_experts_touched_grow_with_tokens_and_experts(experts: int, active: int, tokens: int) -> None:
    active = min(active, experts)
    now = touched(experts, active, tokens)
    if tokens:
        assert active * (1 - 1e-12) <= now <= min(experts, tokens * active) * (1 + 1e-12)
    assert now <= touched(experts, active, tokens + 1) * (1 + 1e-12)
    if experts >= 2 * active:  # as all published mixtures: of fewer, the popular half is in every token's selection
        assert now <= touched(experts + 1, active, tokens) * (1 + 1e-12)


def test_experts_touched_at_the_ends() -> None:
    assert all(touched(1, 1, tokens) == 1.0 for tokens in (1, 2, 4096)), "dense: exactly, so that its times are exact"
    assert all(touched(experts, active, 0) == 0.0 for experts, active in [(1, 1), (8, 2), (256, 8)])
    for experts, active in [(8, 2), (128, 8), (256, 8), (128, 4), (7, 5), (8, 8)]:
        assert touched(experts, active, 1) == pytest.approx(active, rel=1e-12)
        assert touched(experts, active, 1 << 20) == pytest.approx(experts, rel=1e-12)


def test_fewer_bytes_of_experts_and_a_latent_take_less_time() -> None:
    whole = in_dtype(model("gpt-oss-120b"), "bf16")
    at = [Roofline(ROUND, found).layer_s(0, 0, 64, 64) for found in (whole, model("gpt-oss-120b"))]
    saved = touched(128, 4, 64) * 3 * 2880 * 2880 * (2 - 17 / 32) / 5e11  # less than that, by the knee
    assert 0.9 * saved < at[0] - at[1] < saved
    roof = Roofline(ROUND, model("DeepSeek-V3"))
    assert roof.layer_s(0, 0, 8, 8000) - roof.layer_s(0, 0, 8, 0) == pytest.approx(8000 * 576 * 2 / 2.5e11)


@given(
    st.sampled_from(list(table_of("machines", None))),
    st.sampled_from(list(table_of("models", None))),
    st.integers(0, 2048),
    st.integers(0, 300),
    st.integers(0, 100_000),
)
def test_more_work_never_takes_less_time(on: str, what: str, prefill: int, rows: int, context: int) -> None:
    roof = Roofline(machine(on), model(what))
    now = roof.layer_s(prefill, prefill_pairs(prefill), rows, context)
    assert roof.layer_s(prefill + 1, prefill_pairs(prefill + 1), rows, context) > now
    assert roof.layer_s(prefill, prefill_pairs(prefill), rows + 1, context) > now
    assert roof.layer_s(prefill, prefill_pairs(prefill), rows, context + 1) >= now
    assert roof.ends_s(prefill + rows + 1, rows) > roof.ends_s(prefill + rows, 0)
    if prefill + rows:
        half = Roofline(machine(on), model(what), share=0.5)
        assert now < half.layer_s(prefill, prefill_pairs(prefill), rows, context) <= 2 * now


@pytest.mark.parametrize("share", [0, -1, 1.1, True, "half", None])
def test_a_share_is_a_share(share: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Roofline(ROUND, model("tiny", TINY), share=share)  # type: ignore[arg-type]
    assert caught.value.field == "share"


def test_times_are_those_of_the_fit() -> None:
    for what, on, *expected in PREFILL_US:
        roof = Roofline(machine(on), model(what))
        found = [roof.layer_s(tokens, prefill_pairs(tokens), 0, 0) * 1e6 for tokens in (512, 2048)]
        assert found == pytest.approx(expected, rel=0.002), (what, on)
    # Decoding. OPT-13b at 35 % of a GH200: 23 requests of 512 tokens, 13 ms; Llama-3-8b: as many as 35 % hold, 8 ms.
    gh200 = machine("GH200")
    for what, rows, ms in (("OPT-13b", 23, 13), ("Llama-3-8b", 59, 8)):
        found = model(what)
        seconds = found.layers * Roofline(gh200, found).layer_s(0, 0, rows, rows * 512) + gh200.iteration_gap_s
        assert round(seconds * 1e3) == ms


def test_measured_operators_are_met() -> None:
    """Vidur's measurements: layers within 8 % on average for each machine, and no point off by more than a third."""
    data = json.loads((Path(__file__).parent / "data" / "vidur_points.json").read_text(encoding="utf-8"))
    errors = defaultdict(list)
    for row in data["rows"]:
        constants = machine(row["machine"]).roofline
        roof = Roofline(machine(row["machine"]), model("Llama-2-7b"))  # op_s takes 2 bytes an element of it, no more
        measured = sum(ms for *_, ms in row["linear_ms"]) + row["other_ms"]
        computed = sum(roof.op_s(k, n, row["tokens"]) for _, k, n, _ in row["linear_ms"])
        computed += constants.other_ops_s
        computed += constants.other_ops_s_per_token_per_khidden * row["tokens"] * row["hidden"] / 1000
        errors[row["machine"]].append(abs(computed / (measured * 1e-3) - 1))
    assert {name: len(found) for name, found in errors.items()} == {"H100-SXM": 14, "A100-80GB-SXM": 15}
    for found in errors.values():
        assert statistics.fmean(found) < 0.08
        assert max(found) < 0.34
