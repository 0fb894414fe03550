"""What the GPU suite's shared serving is made of: published sizes, what fits, the requests, and what a cut-off run counts."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from bench.gpu import models
from bench.gpu.context import MIB, Skip
from bench.gpu.measures import shared_serving as sharing
from conftest import needs

GIB = 1 << 30
# Of the published checkpoints: numbers of a layer, and of all of it without the table of positions.
PUBLISHED = [
    (models.OPT_6_7B, 201_379_840, 6_658_473_984 - 8_396_800),
    (models.OPT_13B, 314_639_360, 12_853_473_280 - 10_496_000),
    (models.OPT_30B, 616_655_872, 29_974_540_288 - 14_694_400),
    (models.LLAMA_2_13B, 317_204_480, 13_015_864_320),
    (models.LLAMA_3_8B, 218_112_000, 8_030_261_248),
]
both = pytest.mark.parametrize("case", [sharing.C1, sharing.C2], ids=lambda case: case.name)


def test_sizes_are_the_published_ones() -> None:
    assert [(shape, shape.layer_params(), shape.params()) for shape, _, _ in PUBLISHED] == PUBLISHED


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_model_has_the_numbers_that_its_shape_says(family: str) -> None:
    needs("torch", "transformers")
    shape = models.ModelShape("small", family, 3, 64, 160, 4, 4 if family == "opt" else 2, 96, MIB)
    model = models.make_model(shape, "cpu", "float32")
    positions = sum(p.numel() for name, p in model.named_parameters() if "embed_positions" in name)
    assert sum(p.numel() for p in model.parameters()) - positions == shape.params()
    layers = model.model.decoder.layers if family == "opt" else model.model.layers
    assert sum(p.numel() for p in layers[0].parameters()) == shape.layer_params()


@both
def test_layers_are_scaled_down_to_what_fits(case: sharing.Combination) -> None:
    device, host = case.needs()
    whole, share = sharing.fitting(case, device, int(1.05 * host) + 1)
    assert (whole, share) == (case, 1.0)
    for given in ((device // 2, 10 * host), (10 * device, host // 2)):
        fewer, share = sharing.fitting(case, *given)
        assert share < 1.0
        assert fewer.needs()[0] <= given[0]
        assert 1.05 * fewer.needs()[1] <= given[1]
        for before, after in zip(case.models, fewer.models):
            assert after.layers == int(before.layers * share)
            # KV cache stays the same share of a layer's weights.
            assert after.kv_bytes / after.layers == pytest.approx(before.kv_bytes / before.layers, rel=1e-6)
    with pytest.raises(Skip, match="quarter"):
        sharing.fitting(case, 4 * GIB, 4 * GIB)


@both
def test_requests_are_the_same_every_time_and_fit(case: sharing.Combination) -> None:
    needs("torch")
    made, seed = sharing.make_requests(case)
    assert (made, seed) == sharing.make_requests(case)
    others, later = sharing.make_requests(case, seed)
    assert later > seed and others != made
    for shape in case.models:
        mine = made[shape.name]
        assert abs(len(mine) - case.rate * case.span_s) <= 0.3 * case.rate * case.span_s
        most = sharing.longest(shape, case.itemsize)
        assert max(len(each.prompt) for each in mine) <= most
        assert max(each.sampling.max_tokens for each in mine) <= most
        assert max(max(each.prompt) for each in mine) < shape.vocabulary
        # Any request fits into the KV cache that the tenant begins with.
        assert 2 * most * 2 <= shape.kv_bytes // shape.block_bytes(16, case.itemsize) * 16
        assert max(each.arrival_s for each in mine) < case.span_s


def test_turns_and_the_span_of_requests_grow_together() -> None:
    case = sharing.C2.turning(5.0)
    assert (case.quantum_s, case.span_s, sharing.C2.turning(20.0).span_s) == (5.0, 10.0, 40.0)


def _run(kind: str, first: list[float], late: tuple[float, ...], tokens: int, seconds: float) -> sharing.Run:
    one = SimpleNamespace(ttft_s=first, tbt_s=[0.01] * tokens, generated_tokens=tokens)
    summary = {"recomputed_tokens": 7, "tenants": {"a": {"layers_remapped_peak": 3 if kind == "remap" else 0}}}
    turn = SimpleNamespace(first_pass_s=0.2, restored_layers=4, preempted_requests=1, predicted_stall_s=0.1)
    result = SimpleNamespace(
        metrics={"a": one}, duration_s=seconds, activations=(turn,), timeline=(), summary=lambda: summary
    )
    return sharing.Run(kind, result, len(late), late)


def test_requests_that_got_no_token_count_as_late_as_they_were() -> None:
    runs = [_run("recompute", [0.1, 0.2], (9.0,), 100, 10.0), _run("remap", [0.1, 0.2, 0.3], (), 150, 10.0)]
    found = {each.name: each for each in sharing._figures("C", runs, {"layers_share": 1.0})}
    assert found["C, recompute, first token, P99"].n == 3
    for name, value in {
        "recompute, first token, P99": 9000.0,
        "first token, P99, remap / recompute": 0.3 / 9.0,
        "tokens/s, remap / recompute": 1.5,
        "recompute, unfinished": 1,
        "layers of one model that were KV at once": 3,
    }.items():
        assert found[f"C, {name}"].value == pytest.approx(value)
    assert found["C, remap (us: between tokens)"].detail["layers_share"] == 1.0


def test_figures_are_medians_over_the_seeds_with_their_range() -> None:
    runs = [
        _run(kind, [first], (), tokens, 10.0)
        for first, tokens in ((1.0, 100), (3.0, 300), (2.0, 500))
        for kind in sharing.KINDS
    ]
    found = {each.name: each for each in sharing._figures("C", runs, {})}
    late = found["C, swap, first token, P99"]
    assert (late.value, late.detail["least"], late.detail["most"]) == pytest.approx((2000.0, 1000.0, 3000.0))
    assert found["C, swap (us: between tokens)"].value == pytest.approx(30.0)
    for other in ("recompute", "swap"):
        ratio = found[f"C, first token, P99, remap / {other}"]
        assert (ratio.value, ratio.detail["runs"]) == (pytest.approx(1.0), 3)


def test_a_swap_brings_one_model_in_whole_and_sends_the_others_out(emulated_gpu: Any) -> None:
    needs("torch", "transformers")
    with ExitStack() as stack:
        arena = sharing.Arena(sharing._tiny(sharing.C2), "cpu", stack)
        arena.warm_up()
        arena.restore()
        names = list(arena.engines)
        for name in (*names, names[0]):
            before = arena.session.snapshot().tenants[name].usable_blocks
            report = arena.whole.activate(name, alone=True, partial=True)
            assert report.activated
            assert report.moved == {}
            tenants = arena.session.snapshot().tenants
            assert [each for each, tenant in tenants.items() if tenant.active] == [name]
            assert arena.session._tenants[name].streamed == ()
            for other in names:
                if other != name:
                    assert len(arena.session._tenants[other].streamed) == arena.whole._layers[other]
            assert tenants[name].usable_blocks >= before
            assert tenants[name].usable_blocks > arena.start[name]
        assert arena.whole.swaps == len(names) + 1
        assert arena.whole.step({}).moved == {}
        arena.restore()
