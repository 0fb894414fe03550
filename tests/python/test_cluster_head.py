"""The head of a group against a pipeline that only knows tokens: lanes, budgets, and requests that find no blocks."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec")

from remap.cluster.head import Head, Limits
from remap.cluster.messages import Tokens
from remap.cluster.pool import GroupPool
from remap.engine import Request, SamplingParams
from remap.engine.attention import decode_first
from remap.engine.engine import STUCK_STEPS
from remap.errors import InvalidArgument
from remap.policy.cluster.lookahead import ChunkCost

COST = ChunkCost(0.0, 0.0, 1.0, 0.0, 4.0)
LIMITS = Limits(vocabulary=100, positions=400, max_num_seqs=4, max_batch_tokens=256)


class Tenant:
    name = "t"


def token_after(tokens):
    return (sum(tokens) * 7 + len(tokens)) % 100


def expected(request):
    tokens = list(request.prompt)
    for _ in range(request.sampling.max_tokens):
        tokens.append(token_after(tokens))
    return tuple(tokens[len(request.prompt) :])


class Line:
    """As many microbatches on their way as there are lanes; each block holds what its last writer put there."""

    def __init__(self, lanes, blocks):
        self.pool = GroupPool(4, blocks)
        self.head = Head(Tenant(), object(), lanes, LIMITS, COST, kv=self.pool)
        self.memory = {}
        self.flying = deque()
        self.tokens, self.ends, self.most = {}, {}, 0
        self.sizes = []

    def take(self, outputs):
        for output in outputs:
            got = self.tokens.setdefault(output.id, [])
            assert output.first == len(got) and output.id not in self.ends
            got += output.tokens
            if output.finish_reason is not None:
                self.ends[output.id] = output.finish_reason

    def launch(self):
        """False if there was nothing to launch."""
        launch = self.head.launch()
        if launch is not None:
            chunks = decode_first(launch.schedule.chunks)
            for chunk in chunks:
                sequence = chunk.sequence
                for place in range(chunk.start, chunk.end):
                    self.memory[sequence.blocks[place // 4], place % 4] = (sequence.id, sequence.tokens[place])
                seen = [self.memory[sequence.blocks[place // 4], place % 4] for place in range(chunk.end)]
                assert seen == [(sequence.id, token) for token in sequence.tokens[: chunk.end]], "somebody wrote here"
            samplers = [chunk for chunk in chunks if chunk.samples]
            chosen = [token_after(chunk.sequence.tokens) for chunk in samplers]
            self.flying.append((launch.lane, samplers, chosen))
            self.sizes.append(launch.schedule.tokens)
            self.most = max(self.most, len(self.flying))
            assert len({lane for lane, _, _ in self.flying}) == len(self.flying) == self.head.in_flight
        return launch is not None

    def land(self):
        if self.flying:
            self.take(self.head.land(*self.flying.popleft()))

    def run(self):
        for _ in range(100_000):
            if not self.launch():
                if self.head.idle:
                    return
                self.land()
        raise AssertionError("it goes on for ever")


REQUESTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=9)


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(18, 60), REQUESTS, st.data())
def test_every_request_gets_its_tokens_whoever_shares_its_blocks(lanes, blocks, shapes, data):
    line = Line(lanes, blocks)
    requests = [
        Request(f"r{n}", tuple(range(1, prompt + 1)), SamplingParams(max_tokens=tokens))
        for n, (prompt, tokens) in enumerate(shapes)
    ]
    cancelled = set()
    for request in requests:
        line.head.submit(request, 1)
        for _ in range(data.draw(st.integers(0, 3))):
            line.launch() if data.draw(st.booleans()) else line.land()
        if data.draw(st.integers(0, 9)) == 0:
            cancelled.add(request.id)
            line.take(line.head.cancel(request.id))
    line.run()
    assert line.most <= lanes and line.pool.free_blocks == line.pool.usable_blocks
    assert set(line.ends) == {request.id for request in requests}
    for request in requests:
        got, whole = tuple(line.tokens[request.id]), expected(request)
        assert got == whole or (request.id in cancelled and got == whole[: len(got)])
    assert not line.head.requests and line.head.load().requests == 0


def test_as_many_microbatches_as_lanes_and_prompts_in_equal_parts():
    line = Line(3, 300)
    for n, prompt in enumerate((200, 40, 10, 10)):
        line.head.submit(Request(f"r{n}", tuple([1] * prompt), SamplingParams(max_tokens=4)), 1)
    for _ in range(3):
        assert line.launch()
    assert not line.launch() and line.head.in_flight == 3
    assert max(line.sizes) <= 260 / 3  # alone, a lane would take the long prompt at once
    line.run()
    assert set(line.ends.values()) == {"length"}
    one = Line(1, 300)
    one.head.submit(Request("r", (1,) * 200, SamplingParams(max_tokens=4)), 1)
    one.launch()
    assert one.sizes == [200]


def test_a_request_that_finds_no_blocks_waits_and_says_so_and_the_others_go_on():
    line = Line(2, 5)
    line.head.submit(Request("large", (1,) * 40, SamplingParams(max_tokens=2)), 3)
    line.head.submit(Request("small", (1,) * 4, SamplingParams(max_tokens=2)), 1)
    while "small" not in line.ends:
        line.launch()
        line.land()
    tries = 0
    while line.head.stuck is None:
        assert not line.launch()
        tries += 1
    assert STUCK_STEPS <= tries <= STUCK_STEPS + 2
    size = line.pool.block_tokens
    assert line.head.stuck == ("large", -(-40 // size) * size)
    line.head.submit(Request("next", (1,) * 4, SamplingParams(max_tokens=2)), 1)
    assert not line.head.give_up("next")  # it is not stuck
    line.pool.grow(20)  # the group grows in time
    line.run()
    assert line.ends == {"small": "length", "large": "length", "next": "length"} and line.head.stuck is None


def test_a_request_that_is_given_up_ends_and_is_over():
    line = Line(1, 5)
    line.head.submit(Request("large", (1,) * 40, SamplingParams(max_tokens=2)), 3)
    while line.head.stuck is None:
        line.launch()
    assert line.head.give_up("large") == [Tokens("large", 3, 0, (), "out_of_blocks")]
    assert line.head.idle and line.head.stuck is None and not line.head.give_up("large")


def test_shrinking_takes_blocks_from_the_youngest_and_renames_the_others():
    line = Line(2, 40)
    requests = [Request(f"r{n}", tuple(range(1, 30)), SamplingParams(max_tokens=20)) for n in range(4)]
    for request in requests:
        line.head.submit(request, 1)
    for _ in range(6):
        line.launch()
        line.launch()
        line.land()
        line.land()
    line.head.draining = True
    assert not line.launch() and not line.head.in_flight
    before = line.head.load()
    moves = line.head.shrink(20)
    for old, new in moves.items():
        for place in range(4):
            if (old, place) in line.memory:
                line.memory[new, place] = line.memory[old, place]
    after = line.head.load()
    assert line.pool.usable_blocks == 20 and after.running < before.running and after.requests == before.requests
    line.head.draining = False
    line.run()
    assert {id: tuple(got) for id, got in line.tokens.items()} == {one.id: expected(one) for one in requests}


def test_a_request_of_another_head_runs_on_or_waits():
    line = Line(2, 30)
    request = Request("r", tuple(range(1, 10)), SamplingParams(max_tokens=6))
    blocks = line.pool.allocate(3)
    tokens = [*request.prompt, *expected(request)[:2]]
    for place, token in enumerate(tokens[:-1]):
        line.memory[blocks[place // 4], place % 4] = ("r", token)
    line.head.adopt(request, 5, expected(request)[:2], len(tokens) - 1, blocks)
    again = Request("again", tuple(range(1, 10)), SamplingParams(max_tokens=6))
    line.head.adopt(again, 2, expected(again)[:3], 0, [])
    assert dict(line.head.requests) == {"r": 5, "again": 2}
    assert line.head.load().tokens == len(tokens) - 1 and line.head.load().waiting == (12,)
    line.tokens = {"r": list(expected(request)[:2]), "again": list(expected(again)[:3])}
    line.run()
    assert {id: tuple(got) for id, got in line.tokens.items()} == {"r": expected(request), "again": expected(again)}


def test_refused_requests_leave_nothing_behind():
    line = Line(2, 30)
    good = Request("a", (1, 2), SamplingParams(max_tokens=2))
    line.head.submit(good, 1)
    for bad in (good, Request("b", (100,)), Request("c", (1,) * 399, SamplingParams(max_tokens=9))):
        with pytest.raises(InvalidArgument):
            line.head.submit(bad, 2)
    assert line.head.requests == (("a", 1),)
    assert line.head.cancel("nobody") == []
