"""The head of a group against a pipeline that only knows tokens: lanes, allowances, and requests that find no blocks."""

from __future__ import annotations

from collections import deque

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec")

from msgspec.structs import replace

from remap.errors import InvalidArgument, InvalidState
from remap_serve.cluster.head import Head, HeadLimits
from remap_serve.cluster.messages import Tokens
from remap_serve.cluster.pool import GroupPool
from remap_serve.cluster.wire import Handed
from remap_serve.engine import Request, SamplingParams, TokenLogprobs
from remap_serve.engine.attention import decode_first
from remap_serve.engine.engine import STUCK_STEPS
from remap_serve.policy.cluster.lookahead import ChunkCost, QueuedChunk

COST = ChunkCost(0.0, 0.0, 1.0, 0.0, 4.0)
LIMITS = HeadLimits(vocabulary=100, positions=400, max_num_seqs=4, max_batch_tokens=256)


class Tenant:
    name = "t"


def token_after(tokens):
    return (sum(tokens) * 7 + len(tokens)) % 100


def handed(request, attempt, tokens=()):
    return Handed(request.id, attempt, 0, list(request.prompt), request.sampling, list(tokens), 0, [])


def tokens_of(chunks):
    return sum(chunk.count for chunk in chunks)


def expected(request):
    tokens = list(request.prompt)
    for _ in range(request.sampling.max_tokens):
        tokens.append(token_after(tokens))
    return tuple(tokens[len(request.prompt) :])


class Line:
    """Two stages of a pipeline of so many lanes: the first one computes a microbatch when it is launched, the last one before it
    lands. In both, each block holds what its last writer put there."""

    def __init__(self, lanes, blocks, limits=LIMITS):
        self.pool = GroupPool(4, blocks)
        self.head = Head(Tenant(), object(), lanes, limits, COST, kv=self.pool)
        self.first, self.last = {}, {}
        self.flying = deque()
        self.tokens, self.ends, self.most = {}, {}, 0
        self.launched = []

    def take(self, outputs):
        for output in outputs:
            got = self.tokens.setdefault(output.id, [])
            assert output.first == len(got) and output.id not in self.ends
            got += output.tokens
            if output.finish_reason is not None:
                self.ends[output.id] = output.finish_reason

    def compute(self, memory, id, tokens, start, blocks, whole=True):
        """KV of tokens from `start` on. whole: that of those before it has to be there."""
        for place in range(start, len(tokens)):
            memory[blocks[place // 4], place % 4] = (id, tokens[place])
        seen = [memory.get((blocks[place // 4], place % 4)) for place in range(len(tokens))]
        assert not whole or seen == [(id, token) for token in tokens], "somebody wrote here"

    def launch(self):
        """False if there was nothing to launch."""
        launch = self.head.launch()
        if launch is not None:
            chunks, parts = decode_first(launch.schedule.chunks), []
            for chunk in chunks:
                sequence = chunk.sequence
                part = (sequence.id, sequence.tokens[: chunk.end], chunk.start, sequence.blocks[:])
                self.compute(self.first, *part)
                parts.append((part, chunk.samples))
            samplers = [chunk for chunk in chunks if chunk.samples]
            chosen = [token_after(chunk.sequence.tokens) for chunk in samplers]
            self.flying.append((launch.lane, parts, samplers, chosen))
            self.launched.append(chunks)
            self.most = max(self.most, len(self.flying))
            assert len({lane for lane, *_ in self.flying}) == len(self.flying) == self.head.in_flight
        return launch is not None

    def land(self):
        if self.flying:
            lane, parts, samplers, chosen = self.flying.popleft()
            for part, yields in parts:  # of a request that lost its blocks, the KV of earlier parts may be gone
                self.compute(self.last, *part, whole=yields)
            self.take(self.head.land(lane, samplers, chosen))

    def run(self):
        for _ in range(100_000):
            if not self.launch():
                if self.head.idle:
                    return
                self.land()
        raise AssertionError("it goes on for ever")

    def arrive(self, request, done):
        """KV of a request that comes from another head, with its first `done` tokens: its blocks, or None."""
        tokens = [*request.prompt, *expected(request)[:done]][:-1]
        blocks = self.head.room(-(-len(tokens) // 4))
        if blocks is not None:
            for memory in (self.first, self.last):
                self.compute(memory, request.id, tokens, 0, blocks)
        return blocks

    def resume(self, request, done, blocks):
        """It runs on."""
        known = expected(request)[:done]
        self.tokens[request.id] = list(known)
        self.head.adopt(handed(request, 1, known), len(request.prompt) + done - 1, blocks)


PROMPTS = st.one_of(st.integers(1, 20), st.integers(60, 130))
REQUESTS = st.lists(st.tuples(PROMPTS, st.integers(1, 12)), min_size=1, max_size=9)


def test_a_request_that_comes_brings_what_was_noted_of_its_prompt():
    line = Line(1, 40)
    asked = SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=True)
    noted = {place: TokenLogprobs(place, -1.0 * place, ()) for place in range(1, 7)}
    line.head.adopt(replace(handed(Request("r", tuple(range(7)), asked), 2), noted={1: noted[1], 2: noted[2]}), 0, [])
    launch = line.head.launch()
    (chunk,) = launch.schedule.chunks
    chunk.sequence.noted.update({place: one for place, one in noted.items() if place > 2})
    chunk.sequence.noted[7] = TokenLogprobs(5, -0.5, ())
    (found,) = line.head.land(launch.lane, [chunk], [5])
    assert (found.tokens, found.noted, found.finish_reason) == ((5,), (TokenLogprobs(5, -0.5, ()),), "length")
    assert found.prompt == tuple(noted.values())


@settings(max_examples=examples(150))
@given(st.integers(1, 4), st.integers(36, 90), REQUESTS, REQUESTS, st.data())
def test_every_request_gets_its_tokens_whoever_shares_its_blocks(lanes, blocks, shapes, moving, data):
    """Requests come, are preempted and cancelled; others come with their KV, which does not pass through the pipeline."""
    line = Line(lanes, blocks)
    requests, others = (
        [
            Request(f"{name}{n}", tuple(1 + k % 99 for k in range(prompt)), SamplingParams(max_tokens=tokens))
            for n, (prompt, tokens) in enumerate(kind)
        ]
        for name, kind in (("r", shapes), ("m", moving))
    )
    cancelled, coming = set(), []
    for request in requests:
        line.head.submit(request, 1)
        for _ in range(data.draw(st.integers(0, 4))):
            line.launch() if data.draw(st.booleans()) else line.land()
        if data.draw(st.integers(0, 5)) == 0:
            cancelled.add(request.id)
            line.take(line.head.cancel(request.id))
        if others and data.draw(st.booleans()):
            other = others.pop()
            done = data.draw(st.integers(1, other.sampling.max_tokens))
            room = line.arrive(other, done) if done < other.sampling.max_tokens else None
            if room is not None:
                requests = [*requests, other]
                coming.append((other, done, room))
        line.head.exchanging = bool(coming)
        if coming and data.draw(st.booleans()):
            line.resume(*coming.pop(0))
    for each in coming:
        line.resume(*each)
    line.head.exchanging = False
    line.run()
    assert line.most <= lanes and line.pool.free_blocks == line.pool.usable_blocks
    assert set(line.ends) == {request.id for request in requests}
    for request in requests:
        got, whole = tuple(line.tokens[request.id]), expected(request)
        assert got == whole or (request.id in cancelled and got == whole[: len(got)])
    assert not line.head.requests and line.head.load().requests == 0


def test_a_prompt_goes_on_in_the_next_lane_while_its_last_part_is_in_flight():
    line = Line(3, 300)
    line.head.submit(Request("r", (1,) * 200, SamplingParams(max_tokens=4)), 1)
    for _ in range(3):
        assert line.launch()
    assert [[(chunk.start, chunk.end) for chunk in chunks] for chunks in line.launched] == [
        [(0, 32)],
        [(32, 64)],
        [(64, 96)],
    ]
    line.run()
    # It decodes in one lane: its next token needs the last one.
    assert line.most == 3 and line.tokens["r"] == list(expected(Request("r", (1,) * 200, SamplingParams(max_tokens=4))))


def test_a_prompt_that_loses_its_blocks_while_a_part_is_in_flight_begins_anew():
    line = Line(2, 26)
    old, young = (
        Request("old", (2,) * 4, SamplingParams(max_tokens=6)),
        Request("young", (1,) * 100, SamplingParams(max_tokens=3)),
    )
    line.head.submit(old, 1)
    line.head.submit(young, 1)
    assert line.launch() and line.launch() and not line.launch()
    line.land()
    assert line.launch() and not line.launch()
    assert [[(each.sequence.id, each.start, each.end) for each in chunks] for chunks in line.launched] == [
        [("old", 0, 4), ("young", 0, 32)],
        [("young", 32, 64)],
        [("old", 4, 5), ("young", 64, 96)],
    ]
    assert line.pool.free_blocks == 0
    line.land()
    assert not line.launch()  # there is no block for its last part
    assert line.head.in_flight == 1 and line.head.load().waiting == (100,)
    line.run()
    assert {id: tuple(got) for id, got in line.tokens.items()} == {"old": expected(old), "young": expected(young)}


def test_blocks_that_a_part_in_flight_may_write_to_are_no_room_for_kv_of_others():
    line = Line(2, 20)
    line.head.submit(Request("gone", (1,) * 64, SamplingParams(max_tokens=4)), 1)
    assert line.launch()
    line.take(line.head.cancel("gone"))  # no token of it is on its way, so it ends at once
    assert line.ends == {"gone": "abort"} and line.pool.free_blocks == 20 and not line.head.idle
    other = Request("other", tuple(range(1, 38)), SamplingParams(max_tokens=9))
    assert line.head.room(13) is None and line.pool.free_blocks == 20  # eight may still be written to
    blocks = line.arrive(other, 3)
    line.land()
    line.resume(other, 3, blocks)
    assert line.head.room(11) is None
    line.pool.free(line.head.room(10))
    line.run()
    assert tuple(line.tokens["other"]) == expected(other)


def test_load_is_in_whole_blocks_of_what_runs_and_of_what_waits():
    """In tokens, many short requests never ask for more than there is, while they wait for blocks."""
    line = Line(1, 9)
    for n in range(12):
        line.head.submit(Request(f"r{n}", (1,) * 5, SamplingParams(max_tokens=3)), 1)
    line.launch()
    load = line.head.load()
    assert (load.running, load.tokens) == (4, 32) and load.waiting == (8,) * 8
    assert load.demand == 40 > line.pool.usable_blocks * 4 > sum(5 for _ in range(5))
    # Those whose KV has not come yet hold blocks, too.
    assert line.head.load([3, 9]) == type(load)(6, 32 + 4 + 12, load.waiting, 12)


def bubbles(lanes, arrivals):
    """The share of the time that stages wait for each other, until the last request is answered. arrivals: (second, prompt,
    tokens). Each of the equal stages takes its share of what a microbatch costs."""
    line = Line(lanes, 10_000, HeadLimits(vocabulary=100, positions=4000, max_num_seqs=64, max_batch_tokens=512))
    coming = deque(
        (at, Request(f"r{n}", (1,) * prompt, SamplingParams(max_tokens=tokens)))
        for n, (at, prompt, tokens) in enumerate(arrivals)
    )
    free, ends, now, busy, idle = [0.0] * lanes, deque(), 0.0, 0.0, 0.0
    while coming or not line.head.idle:
        while ends and ends[0] <= now:
            ends.popleft()
            line.land()
        while coming and coming[0][0] <= now:
            line.head.submit(coming.popleft()[1], 1)
        if free[0] <= now and line.launch():
            cost = COST.microbatch(QueuedChunk(0, each.start, each.count) for each in line.launched[-1])
            end = now
            for stage in range(lanes):
                free[stage] = end = max(free[stage], end) + cost / lanes
            ends.append(end)
            busy += cost
            continue
        later = [*list(ends)[:1], *(at for at, _ in list(coming)[:1])] + ([free[0]] if free[0] > now else [])
        if later:
            if not ends:
                idle += min(later) - now
            now = min(later)
    return 1.0 - busy / (lanes * (now - idle))


@pytest.mark.parametrize(("lanes", "most"), [(2, 0.1), (4, 0.17)])
def test_stages_do_not_wait_for_a_lane_with_a_long_prompt(lanes, most):
    """Of prompts that are tied to a lane, the long ones left 0.15 and 0.28."""
    assert bubbles(lanes, [(0.0, 1500 if n % 3 == 0 else 40, 30) for n in range(12)]) < most


@pytest.mark.parametrize(("lanes", "most"), [(2, 0.05), (4, 0.09)])
def test_what_rounding_leaves_of_the_prompts_is_no_microbatch_of_its_own(lanes, most):
    """Rounded down, equal parts left 0.09 with two lanes."""
    assert bubbles(lanes, [(0.0, 1500 if n < 4 else 4, 30) for n in range(8)]) < most


def test_as_many_microbatches_as_lanes_and_prompts_in_equal_parts():
    line = Line(3, 300)
    for n, prompt in enumerate((200, 40, 10, 10)):
        line.head.submit(Request(f"r{n}", tuple([1] * prompt), SamplingParams(max_tokens=4)), 1)
    for _ in range(3):
        assert line.launch()
    assert not line.launch() and line.head.in_flight == 3
    assert max(map(tokens_of, line.launched)) <= 260 / 3  # alone, a lane would take the long prompt at once
    line.run()
    assert set(line.ends.values()) == {"length"}
    one = Line(1, 300)
    one.head.submit(Request("r", (1,) * 200, SamplingParams(max_tokens=4)), 1)
    one.launch()
    assert list(map(tokens_of, one.launched)) == [200]


def test_a_request_that_finds_no_blocks_waits_and_says_so_and_the_others_go_on():
    line = Line(2, 5)
    line.head.submit(Request("small", (1,) * 4, SamplingParams(max_tokens=2)), 1)
    line.head.submit(Request("large", (1,) * 40, SamplingParams(max_tokens=2)), 3)
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
        for memory in (line.first, line.last):
            for place in range(4):
                if (old, place) in memory:
                    memory[new, place] = memory[old, place]
    after = line.head.load()
    assert line.pool.usable_blocks == 20 and after.running < before.running and after.requests == before.requests
    line.head.draining = False
    line.run()
    assert {id: tuple(got) for id, got in line.tokens.items()} == {one.id: expected(one) for one in requests}


def test_a_request_of_another_head_runs_on_or_waits():
    line = Line(2, 30)
    request = Request("r", tuple(range(1, 10)), SamplingParams(max_tokens=6))
    line.resume(request, 2, line.arrive(request, 2))
    again = Request("again", tuple(range(1, 10)), SamplingParams(max_tokens=6))
    line.head.adopt(handed(again, 2, expected(again)[:3]), 0, [])
    with pytest.raises(InvalidState):  # another attempt of what is here
        line.head.adopt(handed(request, 3), 0, [])
    assert dict(line.head.requests) == {"r": 1, "again": 2}
    assert line.head.load().tokens == 12 and line.head.load().waiting == (12,)
    line.tokens["again"] = list(expected(again)[:3])
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
