"""KV or activations: bytes, fitted costs, which block is which, mini-batches, and the division with the shortest pass; against
tries of everything, HybridServe's Algorithm 1, KV alone and activations alone."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from bench.lab.hybridserve import division
from bench.lab.hybridserve import packing as packings
from bench.lab.hybridserve.division import LayerwiseCosts, LayerwiseRoom
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument, OutOfMemory
from remap.policy._tables import table_of
from remap.policy.hardware import model
from remap_serve.policy import hybrid, minibatches
from remap_serve.policy.activations import BlockBytes, Line, activations_of, block_bytes, next_is_activations, ratios
from remap_serve.policy.minibatches import BufferLimits, Mix, total

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
import hybrid_brute as brute

# ---------------------------------------------------------------------------------------------- bytes and costs


@pytest.mark.parametrize("name", list(table_of("models", None)))
def test_activations_are_refused_where_they_are_not_smaller(name: str) -> None:
    one = model(name)
    sizes = (16, one.kv_heads, one.head_dim, one.hidden, one.dtype_bytes)
    if one.heads == one.kv_heads and one.heads * one.head_dim == one.hidden:  # multi-head attention: half
        assert block_bytes(*sizes) == BlockBytes(16 * one.kv_bytes_per_token_layer, 8 * one.kv_bytes_per_token_layer)
    elif one.hidden >= 2 * one.kv_heads * one.head_dim:
        with pytest.raises(InvalidArgument, match="keep K and V") as raised:
            block_bytes(*sizes)
        assert raised.value.kv_bytes == 16 * one.kv_bytes_per_token_layer
        assert raised.value.activation_bytes == 16 * one.hidden * one.dtype_bytes >= raised.value.kv_bytes
    else:
        assert block_bytes(*sizes).activations < block_bytes(*sizes).kv


RELAXED = settings(deadline=None)
POINTS = st.lists(st.tuples(st.integers(0, 50), st.floats(0.0, 50.0)), min_size=2, max_size=8)


@RELAXED
@given(POINTS, st.floats(-0.2, 0.2), st.floats(-0.2, 0.2))
def test_no_line_near_the_fitted_one_is_nearer_to_the_points(
    points: list[tuple[int, float]], base: float, each: float
) -> None:
    assume(len({x for x, _ in points}) > 1)

    def missed(line: Line) -> float:
        return math.fsum((line.base_s + line.each_s * x - y) ** 2 for x, y in points)

    found = Line.fit(points)
    assert found.base_s >= 0 and found.each_s >= 0
    other = Line(max(0.0, found.base_s + base), max(0.0, found.each_s + each))
    assert missed(found) <= missed(other) * (1 + 1e-9) + 1e-9


def test_points_on_a_line_give_it_back_and_no_block_takes_nothing() -> None:
    points = [(n, 0.25 + 0.5 * n) for n in (1, 4, 16)]
    line = Line.fit(points)
    assert (line.base_s, line.each_s) == pytest.approx((0.25, 0.5))
    assert line.r_squared(points) == pytest.approx(1.0) and line(0) == 0.0 and line(2) == pytest.approx(1.25)
    assert Line.fit([(1, 3.0), (2, 3.0)]).r_squared([(1, 3.0), (2, 3.0)]) == 1.0
    for bad in ([], [(1, 1.0)], [(1, 1.0), (1, 2.0)], [(1, 1.0), (2, -1.0)], [(1, 1.0), (2, math.nan)]):
        with pytest.raises(InvalidArgument):
            Line.fit(bad)


# ---------------------------------------------------------------------------------------------- which block is which


@RELAXED
@given(st.integers(0, 60), st.integers(0, 30), st.integers(0, 30))
def test_blocks_keep_the_ratio_one_by_one(blocks: int, activations: int, kv: int) -> None:
    assume(activations + kv)
    ratio, have = (activations, kv), [0, 0]
    for _ in range(blocks):
        have[0 if next_is_activations(*have, ratio) else 1] += 1
    assert have[0] == activations_of(blocks, ratio) == brute.blocks_one_by_one(blocks, activations, kv)
    assert abs(have[0] - Fraction(activations * blocks, activations + kv)) <= Fraction(1, 2)


def test_the_papers_example_and_ties() -> None:
    assert next_is_activations(5, 2, (3, 1))  # section 4.3.2
    assert next_is_activations(0, 0, (1, 1)) and not next_is_activations(1, 0, (1, 1))
    for bad in ((0, 0), (-1, 2)):
        with pytest.raises(InvalidArgument):
            activations_of(4, bad)


@RELAXED
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_the_ratios_give_every_division_once(blocks: list[int]) -> None:
    given_by = [tuple(activations_of(each, ratio) for each in blocks) for ratio in ratios(blocks)]
    assert len(given_by) == len(set(given_by)) and set(given_by) == brute.divisions(blocks)
    assert [sum(each) for each in given_by] == sorted(sum(each) for each in given_by)
    assert given_by[0] == tuple([0] * len(blocks)) and given_by[-1] == tuple(blocks)


# ---------------------------------------------------------------------------------------------- mini-batches

MIXES = st.lists(st.builds(Mix, st.integers(0, 6), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=6)
LINES = st.builds(Line, st.floats(0.0, 2.0), st.floats(0.01, 3.0))


def check(packing: minibatches.Packing, mixes: list[Mix], limits: BufferLimits) -> None:
    assert sorted(at for each in packing for at in each) == list(range(len(mixes)))
    assert all(limits.holds(total(mixes[at] for at in each)) for each in packing)


@RELAXED
@given(MIXES, st.integers(24, 60), LINES, LINES, LINES)
def test_every_request_is_packed_once_and_fits(mixes: list[Mix], most: int, make: Line, load: Line, half: Line) -> None:
    limits = BufferLimits(most, 2, 2, 1)
    papers = packings.as_in_the_paper(mixes, limits, make, load)
    tried = packings.candidates(mixes, limits, make, load, half)
    for packing in tried:
        check(packing, mixes, limits)
    sizes = [2 * mix.kv + 2 * mix.activations + mix.held for mix in mixes]
    fewest = brute.fewest(sizes, most)
    assert tried[0] == papers and fewest <= min(map(len, tried)) <= 2 * sum(sizes) / most + 1

    def seconds(packing: minibatches.Packing) -> float:
        sums = [total(mixes[at] for at in each) for each in packing]
        return sum(max(make(mix.recomputed), load(mix.kv)) for mix in sums)

    took, packing = minibatches.least(tried, seconds)
    assert took <= seconds(papers)
    assert took < seconds(papers) or len(packing) <= len(papers)


@RELAXED
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 30), st.integers(7, 40))
def test_equal_requests_fill_mini_batches_under_either_packing(
    kv: int, activations: int, count: int, size: int
) -> None:
    limits, mixes = BufferLimits(size, 1, 1, 1), [Mix(kv, activations)] * count
    fit = size // (kv + activations)
    for packing in (
        packings.as_in_the_paper(mixes, limits, Line(1.0, 2.0), Line(1.0, 3.0)),
        minibatches.first_fit(mixes, limits, range(count)),
    ):
        assert len(packing) == -(-count // fit)


def test_what_the_paper_leaves_open_about_f_b() -> None:
    make, load = Line(9.0, 2.0), Line(9.0, 3.0)
    assert packings.imbalance(Mix(0, 0), make, load) == 1.0
    assert packings.imbalance(Mix(1, 0), make, load) == packings.imbalance(Mix(0, 1), make, load) == math.inf
    assert packings.imbalance(Mix(2, 1, 2), make, load) == 1.0  # held activations are made into K and V too
    assert packings.imbalance(Mix(1, 3), make, load) == packings.imbalance(Mix(4, 3), make, load) == 2.0
    mixes = [Mix(4, 1), Mix(1, 4), Mix(4, 1)]  # the second balances the first, the third would not
    assert packings.as_in_the_paper(mixes, BufferLimits(99, 1, 1, 1), Line(0, 1), Line(0, 1)) == ((0, 1), (2,))


def test_a_bound_on_the_difference_keeps_requests_of_one_sort_apart() -> None:
    mixes = [Mix(4, 0), Mix(4, 0), Mix(0, 4), Mix(0, 4)]

    def apart(mix: Mix) -> float:
        return float(mix.activations - mix.kv)

    limits = BufferLimits(16, 1, 1, 1)
    assert minibatches.first_fit(mixes, limits, range(4)) == ((0, 1, 2, 3),)
    assert minibatches.first_fit(mixes, limits, range(4), apart, 0.0) == ((0, 2), (1, 3))


def test_a_request_that_fits_nowhere_is_named_with_the_numbers() -> None:
    mixes = [Mix(1, 1), Mix(2, 3, 2)]
    for pack in (packings.as_in_the_paper, lambda *given: packings.candidates(*given, Line(0, 1))):
        with pytest.raises(InvalidArgument) as raised:
            pack(mixes, BufferLimits(10, 2, 2, 1), Line(0, 1), Line(0, 1))
        assert (raised.value.request, raised.value.taken, raised.value.most) == (1, 12, 10)


# ---------------------------------------------------------------------------------------------- the division

COSTS = st.builds(
    lambda layers, weights, load, make, base, each, token: LayerwiseCosts(
        layers,
        weights,
        Line(0.01, load),
        Line(0.01, load / 2),
        Line(base, make),
        lambda requests, blocks: 0.02 + each * blocks,
        lambda requests: 0.1 * (requests > 0),
        token,
        token / 2,
        slowed=0.4,
    ),
    st.integers(1, 4),
    st.floats(0.0, 8.0),
    st.floats(0.05, 2.0),  # the link is scarce, or
    st.floats(0.01, 4.0),  # computing is
    st.floats(0.0, 0.3),
    st.floats(0.0, 0.3),
    st.floats(0.0, 0.05),
)
BLOCKS = st.lists(st.integers(1, 5), min_size=1, max_size=4)
BLOCK = BlockBytes(8, 4)


def room(layers: int, device: int = 0, buffers: int = 400, host: int = 1 << 20) -> LayerwiseRoom:
    return LayerwiseRoom(layers, BLOCK, host, device, 64, buffers)


@settings(deadline=None, max_examples=examples(60))
@given(BLOCKS, COSTS, st.integers(0, 200), st.integers(200, 500))
def test_it_is_the_best_of_all_divisions(blocks: list[int], costs: LayerwiseCosts, device: int, buffers: int) -> None:
    memory = room(costs.layers, device, buffers)

    def seconds(ratio: tuple[int, int]) -> float | None:
        try:
            return hybrid.fixed(blocks, ratio, costs, memory).seconds
        except InvalidArgument:  # one request does not fit into the buffers
            return None

    found = division.best(blocks, costs, memory)
    every = [(a, k) for a in range(11) for k in range(11) if a + k]
    assert found.seconds == pytest.approx(brute.least_seconds(every, seconds))
    check(found.packing, list(found.mixes), memory.limits)
    assert total(found.mixes).held <= memory.held


@settings(deadline=None, max_examples=examples(60))
@given(BLOCKS, COSTS, st.integers(0, 200), st.integers(0, 5000))
def test_never_slower_than_the_papers_kv_alone_or_activations_alone(
    blocks: list[int], costs: LayerwiseCosts, device: int, host: int
) -> None:
    memory = room(costs.layers, device, host=host + 8 * costs.layers * sum(blocks))
    found = division.best(blocks, costs, memory).seconds
    papers = division.as_in_the_paper(blocks, costs, memory)
    kv, activations = (hybrid.fixed(blocks, ratio, costs, memory).seconds for ratio in ((0, 1), (1, 0)))
    assert found <= min(papers.seconds, kv, activations) * (1 + 1e-9)
    check(papers.packing, list(papers.mixes), memory.limits)


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(1, 20), BLOCKS), min_size=1, max_size=3), COSTS, st.integers(0, 200))
def test_one_ratio_for_several_passes_is_the_best_of_all(
    passes: list[tuple[int, list[int]]], costs: LayerwiseCosts, device: int
) -> None:
    memory = room(costs.layers, device)

    def seconds(ratio: tuple[int, int]) -> float:
        return math.fsum(count * hybrid.fixed(blocks, ratio, costs, memory).seconds for count, blocks in passes)

    every = [(a, k) for a in range(11) for k in range(11) if a + k]
    found = seconds(division.best_ratio(passes, costs, memory))
    assert found == pytest.approx(brute.least_seconds(every, seconds))
    papers = math.fsum(count * division.as_in_the_paper(blocks, costs, memory).seconds for count, blocks in passes)
    assert found <= papers * (1 + 1e-9)


def slow_best_ratio(
    passes: list[tuple[int, list[int]]], costs: LayerwiseCosts, memory: LayerwiseRoom
) -> tuple[float, tuple[int, int]]:
    """Every ratio, none left out."""
    found = (math.inf, 0, (1, 0))
    for place, ratio in enumerate(ratios(each for _, blocks in passes for each in blocks)):
        try:
            plans = [(count, hybrid.fixed(blocks, ratio, costs, memory)) for count, blocks in passes]
        except (InvalidArgument, OutOfMemory):
            continue
        found = min(found, (math.fsum(count * plan.seconds for count, plan in plans), place, ratio))
    return found[0], found[2]


@settings(deadline=None, max_examples=examples(40))
@given(
    st.lists(st.tuples(st.integers(0, 20), BLOCKS), min_size=1, max_size=3),
    COSTS,
    st.integers(0, 200),
    st.integers(60, 500),
    st.integers(0, 120),
)
def test_ratios_are_left_out_only_if_they_are_not_the_best(
    passes: list[tuple[int, list[int]]], costs: LayerwiseCosts, device: int, buffers: int, host: int
) -> None:
    """Where little fits into the buffers or host memory, too."""
    memory = room(costs.layers, device, buffers, host * costs.layers)
    seconds = slow_best_ratio(passes, costs, memory)[0]
    if seconds == math.inf:
        with pytest.raises((InvalidArgument, OutOfMemory)):
            division.best_ratio(passes, costs, memory)
        return
    found = division.best_ratio(passes, costs, memory)
    plans = [(count, hybrid.fixed(blocks, found, costs, memory)) for count, blocks in passes]
    assert math.fsum(count * plan.seconds for count, plan in plans) == pytest.approx(seconds)


@RELAXED
@given(BLOCKS, st.integers(0, 300), st.integers(1, 4), st.data())
def test_no_ratio_of_a_range_loads_or_makes_less_than_its_bound(
    blocks: list[int], device: int, layers: int, data: st.DataObject
) -> None:
    memory, every = room(layers, device), ratios(blocks)
    first, at, last = sorted(data.draw(st.lists(st.integers(0, len(every) - 1), min_size=3, max_size=3)))
    least, streamed = memory.least(blocks, every[first], every[last])
    found = total(memory.divided(blocks, every[at]))
    assert (least.requests, least.blocks) == (found.requests, found.blocks)
    for name in ("kv", "activations", "recomputed"):
        assert getattr(least, name) <= getattr(found, name)
    assert streamed <= memory.streamed(found)
    if first == last:
        assert (least, streamed) == (found, memory.streamed(found))


def test_few_ratios_of_mixed_lengths_are_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, looked = [3 + 7 * at % 31 for at in range(13)], list[tuple[int, int]]()
    costs = LayerwiseCosts(8, 9.0, Line(0, 0.1), Line(0, 0.05), Line(0, 0.1), lambda r, b: 0.1, lambda r: 0.0)
    memory, original = room(8, device=2000, buffers=4000), hybrid.fixed
    ratio = slow_best_ratio([(1, blocks)], costs, memory)[1]
    monkeypatch.setattr(hybrid, "fixed", lambda *given: (looked.append(given[1]), original(*given))[1])
    assert division.best_ratio([(1, blocks)], costs, memory) == ratio
    assert len(looked) < 0.05 * len(ratios(blocks))


@RELAXED
@given(BLOCKS, st.integers(0, 4), st.integers(0, 4), st.integers(1, 4), st.integers(0, 900))
def test_blocks_are_divided_whole_and_the_device_holds_no_more_than_it_has(
    blocks: list[int], activations: int, kv: int, layers: int, device: int
) -> None:
    assume(activations + kv)
    memory = room(layers, device)
    mixes = memory.divided(blocks, (activations, kv))
    assert [mix.blocks for mix in mixes] == blocks
    assert [mix.recomputed for mix in mixes] == [activations_of(each, (activations, kv)) for each in blocks]
    assert all(min(mix.kv, mix.activations, mix.held, mix.held_kv) >= 0 for mix in mixes)
    all_of = total(mixes)
    weights = (1.0 - memory.streamed(all_of)) * layers * memory.weight_bytes
    held = layers * (all_of.held * BLOCK.activations + all_of.held_kv * BLOCK.kv)
    assert weights >= 0.0 and held + weights <= device + 1e-6
    lost = device - held - weights  # less than a block of each request, of either kind, or nothing is left to hold
    loaded = all_of.kv or all_of.activations
    assert not loaded or lost < layers * BLOCK.kv * (len(blocks) + 1) + 1e-6
    assert memory.host_bytes_of(all_of) == layers * (all_of.kv * BLOCK.kv + all_of.activations * BLOCK.activations)


def test_link_or_processor_whichever_is_scarce_decides() -> None:
    def costs(load: float, make: float) -> LayerwiseCosts:
        return LayerwiseCosts(8, 1.0, Line(0, load), Line(0, load / 2), Line(0, make), lambda r, b: 0.1, lambda r: 0.0)

    blocks, memory = [64] * 8, LayerwiseRoom(8, BLOCK, 1 << 30, 0, 64, 1 << 20)
    scarce_link = division.best(blocks, costs(1.0, 0.001), memory)
    assert all(mix.kv == 0 for mix in scarce_link.mixes)
    scarce_processor = division.best(blocks, costs(0.001, 1.0), memory)
    assert all(mix.recomputed <= 1 for mix in scarce_processor.mixes)  # what fits beside the weights
    both = division.best(blocks, costs(1.0, 1.0), memory)
    shares = {mix.recomputed for mix in both.mixes}
    # 1 + (64 - x) 8 + x 4 = 0.1 + 8 x, but for one mini-batch that nothing hides
    assert shares <= {42, 43, 44} and both.seconds <= division.as_in_the_paper(blocks, costs(1.0, 1.0), memory).seconds


@RELAXED
@given(COSTS, st.integers(0, 300), st.integers(8, 4000))
def test_algorithm_1_fills_the_memory_and_balances_what_it_counts(
    costs: LayerwiseCosts, device: int, blocks: int
) -> None:
    memory = room(costs.layers, device, host=blocks * 4 * costs.layers)
    activations, kv = hybrid.algorithm_1(costs, memory)
    used = (activations * BLOCK.activations + kv * BLOCK.kv) * costs.layers
    assert activations >= 0 and kv >= 0
    assert memory.host_bytes - BLOCK.kv * costs.layers < used <= memory.host_bytes
    if activations > 1 and kv > 1:  # not at an end: equal but for whole blocks
        link = costs.weights_s + costs.load_kv(kv)
        computing = costs.recompute(memory.held + activations)
        assert abs(link - computing) <= 2 * (costs.load_kv.each_s + costs.recompute.each_s) + 1e-9


def test_algorithm_1_at_its_ends() -> None:
    def costs(weights: float, load: float, make: float) -> LayerwiseCosts:
        return LayerwiseCosts(
            2, weights, Line(0, load), Line(0, load / 2), Line(0, make), lambda r, b: 0.0, lambda r: 0.0
        )

    memory = room(2, host=800)  # 100 blocks of activations, 50 of KV
    assert hybrid.algorithm_1(costs(1000.0, 1.0, 1.0), memory) == (100, 0)  # weights take longer than all of it
    assert hybrid.algorithm_1(costs(0.0, 1.0, 1e9), memory) == (0, 50)
    assert hybrid.algorithm_1(costs(10.0, 1.0, 1.0), memory) == (10 + 30, 30)
    assert hybrid.algorithm_1(costs(0.0, 1.0, 0.0), memory) == (100, 0)
    held = room(2, device=800, host=800)  # making what the device holds takes longer than the weights
    assert hybrid.algorithm_1(costs(70.0, 1.0, 1.0), held) == (13, 43)
    with pytest.raises(InvalidArgument) as raised:
        hybrid.algorithm_1(costs(1.0, 1.0, 1.0), room(2, host=15))
    assert (raised.value.host_bytes, raised.value.block_bytes) == (15, 16)


def test_a_batch_that_host_memory_cannot_hold_is_refused_with_the_numbers() -> None:
    costs = LayerwiseCosts(2, 1.0, Line(0, 1), Line(0, 0.5), Line(0, 1.0), lambda r, b: 0.1, lambda r: 0.0)
    for call in (division.best, lambda *given: hybrid.fixed(given[0], (1, 0), *given[1:])):
        with pytest.raises(OutOfMemory) as raised:
            call([5, 5], costs, room(2, host=79))
        assert (raised.value.requested, raised.value.free) == (80, 79)
    tight = division.best([5, 5], costs, room(2, host=80))
    assert total(tight.mixes) == Mix(0, 10, requests=2)  # KV would not fit, slower or not
