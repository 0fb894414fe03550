"""Microbatches: the cost of a chunk, its fit, and divisions against every division."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from itertools import count

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference import lookahead_brute
from reference.flow_shop import bubble_share, makespan
from remap.errors import InvalidArgument
from remap_serve.policy.cluster import lookahead as module
from remap_serve.policy.cluster.lookahead import (
    ChunkCost,
    Microbatch,
    QueuedChunk,
    Waiting,
    balanced,
    fit,
    halved,
    lookahead,
)

# Multiples of 1/16 with few tokens: sums are exact.
PARTS = [st.integers(0, 8).map(lambda n: n / 16) for _ in range(5)]
COSTS = st.builds(ChunkCost, *PARTS)
QUEUES = st.lists(st.builds(Waiting, st.integers(0, 20), st.integers(0, 8)), max_size=6)
TOKENS_ONLY = ChunkCost(0.0, 0.0, 1.0, 0.0, 0.0)

Divided = list[Microbatch]


def by_tokens(requests: list[Waiting], budget: int, grain: int) -> Divided:
    """As Sarathi-Serve divides: microbatches of at most `budget` tokens, or of one piece, filled in order."""
    found, room = list[list[QueuedChunk]](), 0
    for piece in lookahead_brute.places(requests, grain):
        number, first = piece[0]
        if len(piece) > room:
            found.append([])
            room = max(budget, grain)
        room -= len(piece)
        microbatch = found[-1]
        if microbatch and microbatch[-1].request == number:
            microbatch[-1] = replace(microbatch[-1], tokens=microbatch[-1].tokens + len(piece))
        else:
            microbatch.append(QueuedChunk(number, requests[number].prefix + first, len(piece)))
    return [tuple(each) for each in found]


SECONDS = st.floats(0.0, 500.0, allow_subnormal=False)


@example(ChunkCost(0.0, 0.0, 1e-300, 0.0, 0.0), 0, 1e-300)
@settings(max_examples=examples(200), deadline=None)
@given(st.builds(ChunkCost, *[st.floats(0.0, 2.0, allow_subnormal=False)] * 5), st.integers(0, 20_000), SECONDS)
def test_the_longest_chunk_for_so_much_is_that_and_no_longer(cost: ChunkCost, prefix: int, seconds: float) -> None:
    most = cost.tokens(prefix, seconds)
    if most < sys.maxsize:
        assert cost.chunk(prefix, most) <= seconds * (1 + 1e-9)
        assert cost.chunk(prefix, most + 1) >= seconds * (1 - 1e-9)
    assert cost.tokens(prefix, -1.0) == 0 and ChunkCost(0.0, 0.0, 0.0, 0.0, 1.0).tokens(prefix, 1.0) == sys.maxsize


def largest(divided: Divided, cost: ChunkCost) -> float:
    return max(map(cost.microbatch, divided), default=0.0)


def check_division(divided: Divided, requests: list[Waiting], grain: int) -> None:
    """Every token once, in order; requests are divided at multiples of the grain; no microbatch is empty."""
    chunks = [chunk for microbatch in divided for chunk in microbatch]
    for number, request in enumerate(requests):
        own = [chunk for chunk in chunks if chunk.request == number]
        assert sum(chunk.tokens for chunk in own) == request.tokens
        done = 0
        for chunk in own:
            assert chunk.prefix == request.prefix + done
            assert chunk.tokens > 0
            assert done % grain == 0
            done += chunk.tokens
    assert [chunk.request for chunk in chunks] == sorted(chunk.request for chunk in chunks)
    for microbatch in divided:
        assert microbatch
        assert len({chunk.request for chunk in microbatch}) == len(microbatch)


@settings(max_examples=examples(200), deadline=None)
@given(QUEUES, COSTS)
def test_a_microbatch_costs_what_its_tokens_cost(requests: list[Waiting], cost: ChunkCost) -> None:
    chunks = [QueuedChunk(number, each.prefix, each.tokens) for number, each in enumerate(requests) if each.tokens]
    tokens = [(number, token) for number, each in enumerate(requests) for token in range(each.tokens)]
    assert cost.microbatch(chunks) == lookahead_brute.seconds(tokens, requests, cost)
    # The paper's form: the sum of whole chunks less what all but one load again.
    a, b, c, d, e = (
        cost.pair_s,
        cost.pair_s / 2 + cost.masked_s,
        cost.token_s,
        cost.chunk_s + cost.batch_s,
        cost.batch_s,
    )
    whole = sum(a * each.prefix * each.tokens + b * each.tokens**2 + c * each.tokens + d for each in chunks)
    assert cost.microbatch(chunks) == (whole - (len(chunks) - 1) * e if chunks else 0.0)


@settings(max_examples=examples(300), deadline=None)
@given(QUEUES, COSTS, st.integers(1, 5), st.integers(1, 4))
def test_the_largest_microbatch_is_the_least_possible(
    requests: list[Waiting], cost: ChunkCost, count: int, grain: int
) -> None:
    divided = balanced(requests, cost, count, grain)
    check_division(divided, requests, grain)
    assert len(divided) <= count
    pieces = lookahead_brute.places(requests, grain)

    def of(first: int, end: int) -> float:
        return lookahead_brute.seconds([token for piece in pieces[first:end] for token in piece], requests, cost)

    assert largest(divided, cost) == lookahead_brute.least_largest(len(pieces), count, of)


@settings(max_examples=examples(300), deadline=None)
@given(QUEUES, COSTS, st.integers(1, 6), st.integers(1, 4), st.integers(1, 20))
def test_never_worse_than_halving_or_counting(
    requests: list[Waiting], cost: ChunkCost, count: int, grain: int, budget: int
) -> None:
    papers, counted = halved(requests, cost, count, grain), by_tokens(requests, budget, grain)
    for divided in (papers, counted):
        check_division(divided, requests, grain)
    assert len(papers) <= count
    assert largest(balanced(requests, cost, count, grain), cost) <= largest(papers, cost)
    assert largest(balanced(requests, cost, max(1, len(counted)), grain), cost) <= largest(counted, cost)
    for microbatch in counted:
        assert sum(chunk.tokens for chunk in microbatch) <= max(budget, grain)


@settings(max_examples=30, deadline=None)
@given(QUEUES, COSTS, st.integers(1, 4), st.integers(1, 4))
def test_lookahead_is_near_the_shortest_of_all_counts(
    requests: list[Waiting], cost: ChunkCost, stages: int, grain: int
) -> None:
    """With many tokens: its formula leaves out what chunks cost and where they begin."""
    found = lookahead(requests, cost, stages, grain)
    check_division(found, requests, grain)
    many = [Waiting(each.prefix, 40 * each.tokens) for each in requests]
    weights = replace(cost, masked_s=0.0, chunk_s=0.0, batch_s=cost.batch_s + 1 / 16)
    best = min(seconds(balanced(many, weights, count, grain), weights, stages) for count in range(1, 40))
    assert seconds(lookahead(many, weights, stages, grain), weights, stages) <= 1.02 * best


def seconds(divided: Divided, cost: ChunkCost, stages: int) -> float:
    return makespan([[cost.microbatch(each) / stages] * stages for each in divided])


def test_how_many_microbatches_there_are() -> None:
    """Work of 64 s, a second to load the weights, five stages: 16 microbatches of 4 tokens."""
    cost = ChunkCost(0.0, 0.0, 1.0, 0.0, 1.0)
    found = lookahead([Waiting(0, 64)], cost, 5)
    assert [len(found), largest(found, cost)] == [16, 5.0]
    assert len(lookahead([Waiting(0, 64)], cost, 1)) == 1  # one stage has no bubbles
    assert len(lookahead([Waiting(0, 8)], replace(cost, batch_s=0.0), 2)) == 8
    assert lookahead([], cost, 3) == lookahead([Waiting(5, 0)], cost, 3) == []


def test_halves_of_halves() -> None:
    """Equal tokens cost alike: the paper's algorithm on ten of them, for two, three and four microbatches."""
    queue = [Waiting(0, 6), Waiting(0, 4)]
    shares = [[sum(chunk.tokens for chunk in each) for each in halved(queue, TOKENS_ONLY, n)] for n in (1, 2, 3, 4, 20)]
    assert shares == [[10], [5, 5], [3, 3, 4], [2, 3, 2, 3], [1] * 10]
    assert halved(queue, TOKENS_ONLY, 2)[1] == (QueuedChunk(0, 5, 1), QueuedChunk(1, 0, 4))
    assert [len(halved([], TOKENS_ONLY, n)) for n in (1, 3)] == [0, 0]
    # One long request and a short one: no cut within a grain.
    assert halved([Waiting(0, 3), Waiting(0, 1)], TOKENS_ONLY, 2, 4) == [
        (QueuedChunk(0, 0, 3),),
        (QueuedChunk(1, 0, 1),),
    ]


def test_counting_tokens_makes_bubbles_that_costs_do_not() -> None:
    """A long request in chunks of equal tokens: the last one attends to all before it."""
    cost = ChunkCost(1e-6, 0.0, 1e-4, 0.0, 1e-3)
    queue = [Waiting(0, 8192), *[Waiting(0, 256)] * 8]

    def bubbles(divided: Divided) -> float:
        return bubble_share([[cost.microbatch(each) / 2] * 2 for each in divided])

    counted = by_tokens(queue, 1024, 64)
    even = balanced(queue, cost, len(counted), 64)
    assert largest(even, cost) < 0.75 * largest(counted, cost)
    assert bubbles(even) < bubbles(counted)


def test_it_ends_where_the_mean_of_two_bounds_is_the_upper_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of the twin's, between whose last two bounds there is no number."""
    looks, filled = count(), module._Queue.filled

    def counted(self: module._Queue, bound: float, most: int) -> tuple[list[int], float]:
        assert next(looks) < 1000
        return filled(self, bound, most)

    monkeypatch.setattr(module._Queue, "filled", counted)
    cost = ChunkCost(7.876923076921734e-09, 0.0, 0.00012601900882021894, 0.0, 0.010239813169120371)
    prefixes = {305: 1024, 113: 128}
    tokens = (305, 22, 505, 113, 1197, 102, 832, 1659, 1027, 587, 363, 127, 34)
    divided = balanced([Waiting(prefixes.get(each, 0), each) for each in tokens], cost, 9, 128)
    assert len(divided) <= 9 and largest(divided, cost) == pytest.approx(0.1178, abs=1e-4)


def test_a_queue_with_thousands_of_places() -> None:
    queue = [Waiting(17 * n % 4000, 100 + 37 * n % 6000) for n in range(300)]
    cost = ChunkCost(2e-9, 1e-9, 2e-5, 1e-5, 5e-3)
    divided = balanced(queue, cost, 16)
    check_division(divided, queue, 1)
    costs = list(map(cost.microbatch, divided))
    assert max(costs) <= min(costs) + 2 * cost.chunk(10_000, 1)  # a token more or less


@pytest.mark.parametrize("wrong", [([Waiting(0, -1)], 1), ([Waiting(-1, 1)], 1), ([Waiting(0, 1)], 0)])
def test_what_is_no_queue_is_refused(wrong: tuple[list[Waiting], int]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        balanced(wrong[0], TOKENS_ONLY, 2, wrong[1])
    assert (caught.value.requests, caught.value.grain) == wrong


# ------------------------------------------------------------------------------------------------------- the fit


def drawn(seed: int, count: int) -> list[list[QueuedChunk]]:
    rng = random.Random(seed)
    return [
        [
            QueuedChunk(n, rng.choice([0, rng.randrange(8000)]), rng.randrange(1, 2000))
            for n in range(rng.randrange(1, 9))
        ]
        for _ in range(count)
    ]


def test_factors_come_back_from_passes_that_they_made() -> None:
    pytest.importorskip("scipy", reason="costs are fitted with scipy, of the extra `sim`")
    cost = ChunkCost(3e-9, 1e-9, 2e-5, 1e-5, 6e-3)
    found = fit([(chunks, cost.microbatch(chunks)) for chunks in drawn(1, 40)])
    for name in ("pair_s", "masked_s", "token_s", "chunk_s", "batch_s"):
        assert getattr(found, name) == pytest.approx(getattr(cost, name), rel=1e-4)


def test_the_fit_predicts_other_passes_and_tokens_alone_do_not() -> None:
    """With 3 % of noise; without attention the same passes are far off (KunServe, section 5.4: up to 48 % and 74 %)."""
    pytest.importorskip("scipy", reason="costs are fitted with scipy, of the extra `sim`")
    cost, rng = ChunkCost(2e-8, 5e-9, 2e-5, 1e-5, 6e-3), random.Random(2)
    measured = [(chunks, cost.microbatch(chunks) * rng.uniform(0.97, 1.03)) for chunks in drawn(3, 60)]
    found = fit(measured)

    def furthest(guess: ChunkCost) -> float:
        return max(abs(guess.microbatch(chunks) / cost.microbatch(chunks) - 1.0) for chunks in drawn(4, 60))

    assert furthest(found) < 0.05
    linear = ChunkCost(0.0, 0.0, found.token_s, found.chunk_s, found.batch_s)
    assert furthest(linear) > 0.3


def test_too_few_passes_or_none_that_took_time_are_refused() -> None:
    chunk = [QueuedChunk(0, 0, 1)]
    for passes in ([(chunk, 1.0)] * 4, [(chunk, 1.0)] * 4 + [(chunk, 0.0)], [(chunk, math.nan)] * 5, [([], 1.0)] * 5):
        with pytest.raises(InvalidArgument) as caught:
            fit(passes)
        assert (caught.value.passes, caught.value.needed) == (len(passes), 5)


def test_bounds_that_are_neighbours_end():
    """Found by a search that hung: the middle of two neighbouring numbers was rounded to the higher one, for ever."""
    asked = 0

    class Counted(ChunkCost):
        def chunk(self, prefix, tokens):
            nonlocal asked
            asked += 1
            assert asked < 100_000, "it goes on for ever"
            return super().chunk(prefix, tokens)

    cost = Counted(0.0, 0.0, 7.123576525162418e-06, 0.0, 0.009036830491131374)
    tokens = [24, 1, 1, 1, 1, 1, 1, 1, 1, 26, 1]
    found = balanced([Waiting(0, count) for count in tokens], cost, 4, 32)
    assert max(sum(chunk.tokens for chunk in each) for each in found) == 26
