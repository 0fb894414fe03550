"""What the GPU suite's shared serving is made of: published sizes, what fits, the requests, and what a cut-off run counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from bench.gpu import models
from bench.gpu.context import MIB, Skip
from bench.gpu.measures import shared_serving as sharing
from conftest import needs

from remap.internals import internals

GIB = 1 << 30
# Of the published checkpoints: numbers of a layer, and of all of it without the table of positions.
PUBLISHED = [
    (models.OPT_6_7B, 201_379_840, 6_658_473_984 - 8_396_800),
    (models.OPT_13B, 314_639_360, 12_853_473_280 - 10_496_000),
    (models.OPT_30B, 616_655_872, 29_974_540_288 - 14_694_400),
    (models.LLAMA_2_13B, 317_204_480, 13_015_864_320),
    (models.LLAMA_3_8B, 218_112_000, 8_030_261_248),
    (models.QWEN_14B, 275_261_440, 14_770_033_664 - 48 * (5120 + 2 * 1024)),  # and without biases
]
CASES = [sharing.C1, sharing.C2, sharing._trio(8.0)]
both = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_sizes_are_the_published_ones() -> None:
    assert [(shape, shape.layer_params(), shape.params()) for shape, _, _ in PUBLISHED] == PUBLISHED


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_model_has_the_numbers_that_its_shape_says(family: str) -> None:
    needs("torch", "transformers")
    import torch

    shape = models.ModelShape("small", family, 3, 64, 160, 4, 4 if family == "opt" else 2, 96, MIB)
    model = models.make_model(shape, "cpu", "float32")
    positions = sum(p.numel() for name, p in model.named_parameters() if "embed_positions" in name)
    assert sum(p.numel() for p in model.parameters()) - positions == shape.params()
    layers = model.model.decoder.layers if family == "opt" else model.model.layers
    assert [sum(p.numel() for p in layer.parameters()) for layer in layers] == [shape.layer_params()] * 3
    # Each layer has numbers of its own, and knows its place in the KV cache.
    found = [layer.self_attn.q_proj.weight for layer in layers]
    assert len({each.data_ptr() for each in found}) == 3 and not torch.equal(found[0], found[1])
    assert torch.equal(found[0].roll(2, 0), found[2])
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 2]
    assert model.config.num_hidden_layers == 3


@both
def test_kv_and_then_layers_are_scaled_down_to_what_fits(case: sharing.Combination) -> None:
    device, host = case.needs()
    swapped = sharing.HOST_KV_BYTES
    assert sharing.fitting(case, device, int(1.05 * host) + swapped + 1) == (case, 1.0, 1.0)
    kv = sum(shape.kv_bytes for shape in case.models)
    fewer, layers, share = sharing.fitting(case, device - kv // 4, 10 * host)
    assert (layers, share) == (1.0, 0.75)
    assert sum(shape.kv_bytes for shape in fewer.models) == pytest.approx(0.75 * kv)
    for given in ((device // 2, 10 * host), (10 * device, host // 2 + swapped)):
        fewer, layers, share = sharing.fitting(case, *given)
        assert layers < 1.0 and share == 0.5
        assert fewer.needs()[0] <= given[0]
        assert 1.05 * fewer.needs()[1] + swapped <= given[1]
        for before, after in zip(case.models, fewer.models):
            assert after.layers == int(before.layers * layers)
            # KV cache stays the same share of a layer's weights.
            assert after.kv_bytes / after.layers == pytest.approx(share * before.kv_bytes / before.layers, rel=1e-6)
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
    predicted = {"ttft_p99_s": 2 * max(first), "tbt_p99_s": 0.02} if sharing.SIDES[kind].simulated else {}
    return sharing.Run(kind, result, len(late), late, predicted=predicted)


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
        for kind in sharing.SIDES
    ]
    found = {each.name: each for each in sharing._figures("C", runs, {})}
    late = found["C, whole models, first token, P99"]
    assert (late.value, late.detail["least"], late.detail["most"]) == pytest.approx((2000.0, 1000.0, 3000.0))
    assert found["C, whole models (us: between tokens)"].value == pytest.approx(30.0)
    for other in set(sharing.SIDES) - {"remap"}:
        ratio = found[f"C, first token, P99, remap / {other}"]
        assert (ratio.value, ratio.detail["runs"]) == (pytest.approx(1.0), 3)


def test_the_simulators_figures_stand_beside_the_measured() -> None:
    runs = [_run(kind, [first], (), 100, 10.0) for first in (1.0, 3.0, 2.0) for kind in sharing.SIDES]
    found = {each.name: each for each in sharing._figures("C", runs, {})}
    said = found["C, remap, first token, P99, simulated"]
    assert (said.value, said.n, said.detail["most"]) == (pytest.approx(4000.0), 3, pytest.approx(6000.0))
    assert found["C, remap, first token, P99, measured / simulated"].value == pytest.approx(0.5)
    assert found["C, remap, between tokens, P99, measured / simulated"].value == pytest.approx(0.5)
    assert not any(name.startswith("C, swap,") and "simulated" in name for name in found)


def test_the_simulator_is_given_the_arena_and_the_requests() -> None:
    needs("torch")
    case = sharing._trio(8.0)
    blocks = {shape.name: shape.kv_bytes // shape.block_bytes(16, 2) for shape in case.models}
    arena: Any = SimpleNamespace(start=blocks)
    ctx: Any = SimpleNamespace(probe={"name": "NVIDIA H100 80GB HBM3"})
    simulated = sharing._simulation(ctx, case, arena)
    assert simulated is not None
    requests = {name: mine[:6] for name, mine in sharing.make_requests(case)[0].items()}
    for side, one in sharing.SIDES.items():
        figures = simulated(side, requests, 1.0, 60.0)
        assert bool(figures) is bool(one.simulated)
        assert not figures or 0.0 < figures["ttft_p99_s"] < 60.0
        if figures:  # a run that is cut off as early as this has nobody who waited for longer
            last = max(each.arrival_s for mine in requests.values() for each in mine)
            assert simulated(side, requests, 1.0, last)["ttft_p99_s"] <= last
    assert sharing._simulation(SimpleNamespace(probe={"name": "a GPU"}), case, arena) is None
    assert sharing._simulation(ctx, case.scaled(0.5), arena) is None


@pytest.fixture
def arena(emulated_gpu: Any) -> Iterator[sharing.Arena]:
    needs("torch", "transformers")
    with ExitStack() as stack:
        made = sharing.Arena(sharing._tiny(sharing.C2), "cpu", stack)
        made.warm_up()
        yield made


def test_every_side_serves_what_it_says_and_leaves_all_as_it_was(arena: sharing.Arena) -> None:
    requests, seed = sharing.make_requests(arena.case)
    requests = {name: mine[:6] for name, mine in requests.items()}
    for kind, side in sharing.SIDES.items():
        before = {name: internals(engine.tenant).kv.copied_out_bytes for name, engine in arena.engines.items()}
        run = sharing.serve(kind, arena, requests, 60.0, 0.05, seed)
        assert not run.unfinished and len(run.first_s) == sum(map(len, requests.values()))
        tenants = run.result.summary()["tenants"].values()
        assert side.weights or max(each["layers_remapped_peak"] for each in tenants) == 0
        for name, engine in arena.engines.items():
            state = arena.session._tenants[name]
            assert side.swaps or internals(engine.tenant).kv.copied_out_bytes == before[name]
            assert len(state.pinned) == (0 if side.weights else arena.whole._layers[name])
    arena.restore()
    for name, engine in arena.engines.items():
        state, kv = arena.session._tenants[name], engine.tenant.kv
        assert (kv.usable_blocks, sharing._kv_pages(state)) == (arena.start[name], arena.kv_pages[name])
        assert not state.pinned and kv.host.free_blocks == kv.host.total


def test_a_swap_brings_one_model_in_whole_and_sends_the_others_out(arena: sharing.Arena) -> None:
    arena.prepare("whole models")
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
