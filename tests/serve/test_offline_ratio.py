"""The ratio of an offline batch: what a pass is certified to take, the best of all ratios, and the engine that chooses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remap
from remap.errors import InvalidArgument, OutOfMemory
from remap.internals import internals
from remap.policy import kv_stream
from remap_serve.policy.activations import BlockBytes, Line
from remap_serve.policy.minibatches import Mix
from remap_serve.policy.offline import OfflineCosts, OfflineRoom, Option, at_once, choose

RELAXED = settings(deadline=None)
SECONDS = st.floats(0.0, 4.0)
MIXES = st.lists(st.builds(Mix, st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=5)


@st.composite
def costs(draw: st.DrawFn) -> OfflineCosts:
    layers, base, each = draw(st.integers(1, 6)), draw(st.floats(0.0, 0.2)), draw(st.floats(0.01, 2.0))
    resident = draw(st.sets(st.integers(0, layers)))
    weight, head = draw(SECONDS), draw(SECONDS)
    forward, ends = draw(st.tuples(SECONDS, st.floats(0.0, 0.5), st.floats(0.0, 0.5))), draw(SECONDS)
    return OfflineCosts(
        layers=layers,
        weights_s=weight,
        load_kv=Line(base, 2 * each),
        load_activations=Line(base, each),
        recompute=Line(draw(st.floats(0.0, 0.3)), draw(st.floats(0.01, 2.0))),
        forward_s=lambda requests, blocks: forward[0] + forward[1] * requests + forward[2] * blocks,
        ends_s=lambda requests: ends,
        store_kv_s=0.02,
        store_activations_s=0.01,
        ring=draw(st.integers(1, 3)),
        weights=tuple(0.0 if at in resident else (weight, head)[at == layers] for at in range(layers + 1)),
    )


def room(layers: int, host: int = 1 << 20, scratch: int = 1 << 10) -> OfflineRoom:
    """host, scratch: in blocks of KV."""
    return OfflineRoom(layers, BlockBytes(4, 2), 4 * layers * host, 0, 1, 4 * scratch)


@RELAXED
@given(costs(), MIXES)
def test_a_pass_takes_what_the_prefetchers_order_gives_and_no_less_than_its_bound(
    found: OfflineCosts, mixes: list[Mix]
) -> None:
    """With one copy a layer for all mini-batches: how they are packed changes but the bases of what is made again."""
    kv, activations = sum(mix.kv for mix in mixes), sum(mix.activations for mix in mixes)
    made = sum(found.recompute(mix.activations) for mix in mixes)
    own = made + found.forward_s(len(mixes), kv + activations)
    block = found.load_kv.base_s + found.load_activations.each_s * (2 * kv + activations) if kv + activations else 0.0
    weights = [*found.weights, 0.0]
    passed = kv_stream.pass_seconds(
        [own] * found.layers + [found.ends_s(1)],
        weights,
        [layer for layer, seconds in enumerate(weights) if seconds],
        found.ring,
        block,
        found.layers,
        2,
    )
    share = activations / max(1, kv + activations)
    stores = found.layers * len(mixes) * (share * 0.01 + (1 - share) * 0.02)
    assert found.seconds(mixes) == pytest.approx(passed + stores)
    together = Mix(kv, activations, requests=len(mixes))
    assert found.least_seconds(together) <= found.seconds(mixes) * (1 + 1e-9)
    assert found.seconds([together]) <= found.seconds(mixes) * (1 + 1e-9)


LENGTHS = st.lists(st.tuples(st.integers(1, 32), st.integers(0, 16)), min_size=1, max_size=6)
EVERY = [(a, k) for a in range(6) for k in range(6) if a + k and math.gcd(a, k) == 1]


@settings(deadline=None, max_examples=30)
@given(LENGTHS, costs(), st.integers(1, 40), st.integers(1, 12), st.integers(1, 6))
def test_no_ratio_gives_more_tokens_a_second(
    lengths: list[tuple[int, int]], found: OfflineCosts, host: int, scratch: int, most: int
) -> None:
    """Of all ratios, each with as many requests as host memory then holds."""
    memory = room(found.layers, host, scratch)

    def option(ratio: tuple[int, int]) -> Option | None:
        count = at_once(lengths[:most], 8, ratio, memory)
        (longest,) = memory.divided([max(prompt + answer for prompt, answer in lengths) // 8], ratio)
        if not count or not memory.limits.holds(longest) or memory.host_bytes_of(longest) > memory.host_bytes:
            return None
        passes = [
            [(prompt + math.floor(share * answer)) // 8 for prompt, answer in lengths[:count]] for share in STAGES
        ]
        mixes = [memory.divided(blocks, ratio) for blocks in passes]
        packed = [[found.packings(each, memory.limits)[0], each] for each in mixes]
        seconds = [found.seconds([sum_of([each[at] for at in group]) for group in packing]) for packing, each in packed]
        return Option(ratio, count, math.fsum(seconds) / len(seconds))

    every = [one for ratio in EVERY if (one := option(ratio)) is not None]
    if not every:
        with pytest.raises((InvalidArgument, OutOfMemory)):
            choose(lengths, 8, found, memory, most)
        return
    options = choose(lengths, 8, found, memory, most)
    best = options["best"]
    assert best == option(best.ratio) or best.pass_s == pytest.approx(option(best.ratio).pass_s)
    assert best.tokens_per_s >= max(one.tokens_per_s for one in every) * (1 - 1e-9)
    assert best.tokens_per_s >= max(one.tokens_per_s for one in options.values())
    assert ("KV" in options) is (option((0, 1)) is not None)


STAGES = (0.125, 0.375, 0.625, 0.875)


def sum_of(mixes: list[Mix]) -> Mix:
    return Mix(sum(mix.kv for mix in mixes), sum(mix.activations for mix in mixes), requests=len(mixes))


def plain(link: float, make: float, weights: float = 0.0) -> OfflineCosts:
    return OfflineCosts(
        4,
        weights,
        Line(0, 2 * link),
        Line(0, link),
        Line(0, make),
        lambda r, b: 0.1,
        lambda r: 0.0,
        weights=(weights,) * 4,
    )


def test_link_processor_or_host_memory_whichever_is_scarce_decides() -> None:
    lengths = [(80, 0)] * 8
    assert choose(lengths, 8, plain(1.0, 0.001), room(4), 8)["best"].ratio == (1, 0)
    scarce = choose(lengths, 8, plain(0.001, 1.0), room(4), 8)
    assert scarce["best"] == scarce["KV"] and scarce["best"].ratio == (0, 1)
    both = choose(lengths, 8, plain(1.0, 2.0), room(4), 8)
    assert both["best"].tokens_per_s > max(both["KV"].tokens_per_s, both["activations"].tokens_per_s)
    # Algorithm 1 does not count that activations are loaded too: 2/3 instead of 1/2.
    assert both["best"].tokens_per_s > both["Algorithm 1"].tokens_per_s
    # Host memory for the KV of four: activations of eight share the weights that each pass copies.
    full = choose(lengths, 8, plain(0.001, 0.01, weights=50.0), room(4, host=40), 8)
    assert (full["KV"].at_once, full["activations"].at_once, full["best"].at_once) == (4, 8, 8)
    assert full["best"].ratio == (1, 0)


def test_requests_that_fit_nowhere_are_refused_with_the_numbers() -> None:
    with pytest.raises(OutOfMemory) as raised:
        choose([(80, 0)], 8, plain(1.0, 1.0), room(4, host=4), 8)
    assert (raised.value.requested, raised.value.free) == (4 * 2 * 10, 4 * 4 * 4)
    only_kv = choose([(80, 0)], 8, plain(1.0, 0.001), room(4, scratch=4), 8)
    assert "activations" not in only_kv and only_kv["best"].ratio[0] / sum(only_kv["best"].ratio) < 0.5


# ---------------------------------------------------------------------------------------------- the engine

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_throughput import MODELS, PAGE, _host, expected, llama, opt, requests_for, serve, spec_of  # noqa: E402

from remap import _core  # noqa: E402
from remap.errors import DriverError  # noqa: E402
from remap_serve.engine import throughput_times  # noqa: E402
from remap_serve.engine.throughput import ThroughputEngine  # noqa: E402
from remap_serve.engine.throughput_times import Times, _forward_parts, _line  # noqa: E402


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_chooses_by_measured_times_and_the_tokens_stay_the_same(name: str) -> None:
    model, requests = MODELS[name](), requests_for(1)
    wanted = expected(model, requests)
    with remap.Session("64MiB", page_bytes=PAGE) as session:
        tenant = session.attach(
            model, kv=spec_of(model, blocks=40, streamed=300, scratch=40), hooks=False, resident_layers=2
        )
        engine = ThroughputEngine(model, tenant, max_batch_tokens=64)
        assert engine.chosen is None
        assert serve(engine, requests) == wanted
        chosen = engine.chosen
        assert chosen.ratio == engine.scheduler.ratio == chosen.options["best"].ratio
        assert set(chosen.options) == {"best", "KV", "activations", "Algorithm 1"} and "measured" in chosen.why
        times = chosen.times
        assert times.forward_s(1, 1) > 0 and times.recompute(4) > 0 and times.copy.each_s > 0 and times.ends_s > 0
        assert [seconds > 0 for seconds in times.weights_s] == [layer in tenant.streamed for layer in range(6)]


@pytest.mark.parametrize(("link", "make", "ratio"), [(1.0, 1e-6, (1, 0)), (1e-6, 1.0, (0, 1))])
def test_the_scarce_one_of_link_and_processor_decides_what_is_copied(monkeypatch, link, make, ratio) -> None:
    model, requests = opt(), requests_for(5, count=6, low=40, high=60)
    wanted = expected(model, requests)
    seen = []

    def measured(runner, count, tokens, clock):
        seen.append((count, tokens))
        return Times(0.01, 0.0, 0.0, Line(0.0, make), Line(0.0, link), (0.0,) * 6, 0.0)

    monkeypatch.setattr(throughput_times, "measure", measured)
    with remap.Session("64MiB", page_bytes=PAGE) as session:
        tenant = session.attach(model, kv=spec_of(model, blocks=240, streamed=300, scratch=240), hooks=False)
        engine = ThroughputEngine(model, tenant, max_batch_tokens=512)
        assert serve(engine, requests) == wanted
        assert engine.chosen.ratio == ratio and [count for count, _ in seen] == [6]
        pairs = sum((request.max_kv_tokens - 1) // 8 for request in requests)  # before the last pass
        assert (
            internals(tenant).kv.copied_out_bytes == (1 if ratio == (1, 0) else 2) * pairs * tenant.kv.spec.block_bytes
        )


def test_kv_alone_where_nothing_else_can_be_kept_or_measured() -> None:
    grouped, plain_model = llama(kv_heads=2), opt()
    for model, scratch, said in (
        (grouped, 20, "activations would save nothing"),
        (plain_model, 0, "no scratch_blocks"),
    ):
        with remap.Session("64MiB", page_bytes=PAGE) as session:
            tenant = session.attach(model, kv=spec_of(model, blocks=40, streamed=60, scratch=scratch), hooks=False)
            engine = ThroughputEngine(model, tenant)
            assert engine.chosen.ratio == (0, 1) and said in engine.chosen.why
            assert len(serve(engine, requests_for(2, count=3))) == 3
            if scratch:
                with pytest.raises(InvalidArgument) as caught:
                    ThroughputEngine(model, tenant, ratio=(1, 1))
                assert caught.value.fields["activation_bytes"] == caught.value.fields["kv_bytes"] == 256
            assert ThroughputEngine(model, tenant, ratio=(0, 1)).chosen.why == "as asked for"


def test_a_copy_that_fails_while_times_are_measured_is_told_and_the_next_step_measures() -> None:
    model, requests = opt(), requests_for(11, count=3)
    wanted = expected(model, requests)
    fault = _core.make_fault_backend(_host(64 << 20))
    with remap.Session("64MiB", page_bytes=PAGE, platform=remap.advanced.Platform(backend=fault)) as session:
        tenant = session.attach(
            model, kv=spec_of(model, blocks=40, streamed=200, scratch=60), hooks=False, resident_layers=0
        )
        engine = ThroughputEngine(model, tenant, max_batch_tokens=64)
        for request in requests:
            engine.add_request(request)
        fault.fail_async_copy(1)
        with pytest.raises(DriverError):
            engine.step()
        assert engine.chosen is None and engine.unfinished == 3
        for request in requests:
            engine.abort(request.id)
        assert serve(engine, requests) == wanted and engine.chosen is not None


@RELAXED
@given(st.integers(1, 40), st.integers(1, 300), st.tuples(SECONDS, SECONDS, SECONDS))
def test_the_parts_of_a_layers_seconds_give_back_what_was_measured(
    requests: int, tokens: int, seconds: tuple[float, float, float]
) -> None:
    few, short = max(1, requests // 2), max(1, tokens // 2)
    parts = _forward_parts((requests, tokens, seconds[0]), (requests, short, seconds[1]), (few, short, seconds[2]), 32)
    assert min(parts) >= 0
    assert parts[0] + parts[1] * requests + parts[2] * requests * tokens / 32 == pytest.approx(seconds[0], abs=1e-9)
    base, token, pair = 0.5, 0.25, 0.125
    exact = [
        (rows, length, base + token * rows + pair * rows * length / 32)
        for rows, length in ((requests, tokens), (requests, short), (few, short))
    ]
    found = _forward_parts(*exact, 32)
    if tokens > short and requests > few:
        assert found == pytest.approx((base, token, pair))


@RELAXED
@given(st.integers(1, 20), st.integers(1, 20), SECONDS, SECONDS)
def test_the_line_of_what_is_made_again_ends_where_it_was_measured(
    few: int, more: int, first: float, last: float
) -> None:
    line = _line([few, few + more], [first, last])
    assert line.base_s >= 0 and line.each_s >= 0 and line.base_s + line.each_s * (few + more) == pytest.approx(last)
    assert _line([few], [last]) == Line(0.0, last / few)
    exact = Line(first, last)
    found = _line([few, few + more], [exact(few), exact(few + more)])
    if last > 1e-6:
        assert (found.base_s, found.each_s) == pytest.approx((first, last), rel=1e-6, abs=1e-6)
