"""Who runs in a simulated pass: vLLM V0's order by hand and by a slow model; sequences of lengths against sequences of values."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument
from remap_serve.engine.engine import Engine
from remap_serve.engine.request import Request as RealRequest
from remap_serve.engine.request import RequestState, SamplingParams
from remap_serve.engine.request import Sequence as RealSequence
from remap_serve.engine.scheduler import Schedule, Scheduler
from remap_serve.sim.engine import SimEngine
from remap_serve.sim.passes import Pass
from remap_serve.sim.pools import CountedPool, VirtualClock
from remap_serve.sim.scheduling import PrefillFirst, make_scheduling
from remap_serve.sim.sequences import SimSequence as Request
from remap_serve.sim.sequences import Work
from remap_serve.sim.workload import Item

BLOCK = 4  # tokens


class HostPool(CountedPool):
    """With host memory for everybody. Counts the blocks that are copied."""

    out = back = 0

    def copy_out(self, ids: list[int]) -> list[int]:
        self.out += len(ids)
        return [-1] * len(ids)

    def copy_in(self, host_ids: list[int], ids: list[int]) -> int:
        assert len(host_ids) == len(ids)
        self.back += len(ids)
        return 0

    def kept(self, host_ids: list[int]) -> bool:
        return True

    def arrived(self, ticket: int) -> bool:
        return True

    def join(self, ticket: int | None = None) -> None: ...

    def free_host(self, host_ids: list[int]) -> None: ...


def first(pool_blocks: int, **options: Any) -> tuple[PrefillFirst, HostPool]:
    return PrefillFirst(block_tokens=BLOCK, **options), HostPool(pool_blocks, BLOCK)


def ask(scheduler: Any, *lengths: tuple[int, int]) -> list[Request]:
    """Requests of (prompt, output) tokens, all queued."""
    made = [Request(order, prompt, output) for order, (prompt, output) in enumerate(lengths)]
    for one in made:
        scheduler.add(one)
    return made


def land(scheduler: Any, pool: CountedPool, schedule: Schedule) -> None:
    """The pass is over: every sampled sequence has a token more."""
    for chunk in schedule.chunks:
        scheduler.commit(chunk)
        if chunk.samples and chunk.sequence.append(0):
            scheduler.finish(chunk.sequence, pool)


def shape(schedule: Schedule) -> tuple[list[tuple[int, int]], list[int]]:
    """([(order, prompt tokens)], orders that decoded)."""
    prompts = [(one.sequence.order, one.count) for one in schedule.chunks if not one.decodes]
    return prompts, [one.sequence.order for one in schedule.chunks if one.decodes]


def step(scheduler: Any, pool: CountedPool) -> tuple[list[tuple[int, int]], list[int]]:
    """One pass, run."""
    schedule = scheduler.schedule(pool)
    seen = shape(schedule)
    assert schedule.tokens == sum(one.count for one in schedule.chunks)
    land(scheduler, pool, schedule)
    return seen


def test_the_session_may_take_anybody_who_comes_back_in_the_place_of_their_age() -> None:
    """The watermark of 1 %, rounded down, is left free by who comes beside others, not by who comes alone."""
    for blocks, expected in ((102, [(0, 200), (1, 204)]), (101, [(0, 200)])):
        scheduler, pool = first(blocks)
        ask(scheduler, (200, 4), (204, 4))
        assert step(scheduler, pool)[0] == expected
    scheduler, pool = first(100)
    one, two, three = ask(scheduler, (8, 9), (8, 9), (8, 9))
    step(scheduler, pool)
    scheduler.preempt(one, pool)
    assert list(scheduler.waiting) == [one] and pool.live_blocks == 4
    scheduler.preempt(three, pool)
    assert list(scheduler.waiting) == [one, three]
    assert step(scheduler, pool) == ([(0, 9), (2, 9)], [])
    assert scheduler.running == [one, two, three]  # the latest is still the last


def test_settings_of_a_scheduler_reach_it() -> None:
    few = make_scheduling("prefill-first", block_tokens=16, context=100, max_num_seqs=3, max_batch_tokens=500)
    assert isinstance(few, PrefillFirst) and (few.max_num_seqs, few.max_batch_tokens) == (3, 500)


def test_relocated_blocks() -> None:
    scheduler, pool = first(10)
    (one,) = ask(scheduler, (12, 4))
    step(scheduler, pool)
    one.blocks = [3, 7, 1]
    scheduler.relocate({7: 2, 5: 9})
    assert one.blocks == [3, 2, 1]


class SlowModel:
    """What V0 does, without a pool and in one long function: who has KV is written down, everything else is counted from it."""

    def __init__(self, blocks: int, budget: int, most: int, spare: int) -> None:
        self.blocks, self.budget, self.most, self.spare = blocks, budget, most, spare
        self.tokens: dict[int, int] = {}  # known tokens of everybody unfinished
        self.ends: dict[int, int] = {}
        self.held: dict[int, int] = {}  # order -> blocks of who runs, in order
        self.existed: dict[int, int] = {}  # tokens whose KV ever existed
        self.preempted = self.recomputed = 0

    def add(self, order: int, prompt: int, output: int) -> None:
        self.tokens[order], self.ends[order], self.existed[order] = prompt, prompt + output, 0

    def _free(self) -> int:
        return self.blocks - sum(self.held.values())

    def step(self) -> tuple[list[tuple[int, int]], list[int]]:
        prefills: list[tuple[int, int]] = []
        for order in sorted(set(self.tokens) - set(self.held)):
            need = -(-self.tokens[order] // BLOCK)
            full = sum(count for _, count in prefills) + self.tokens[order] > self.budget
            spare = self.spare if self.held else 0
            if len(self.held) >= self.most or full or self._free() - need < spare:
                break
            self.held[order] = need
            prefills.append((order, self.tokens[order]))
            self.recomputed += min(self.tokens[order], self.existed[order])
        rows: list[int] = []
        if not prefills:
            for order in sorted(self.held):
                while order in self.held and -(-self.tokens[order] // BLOCK) > self.held[order]:
                    if self._free():
                        self.held[order] += 1
                    else:
                        del self.held[max(self.held)]
                        self.preempted += 1
            rows = sorted(self.held)
        for order in [order for order, _ in prefills] + rows:
            self.existed[order] = max(self.existed[order], self.tokens[order])
            self.tokens[order] += 1
            if self.tokens[order] >= self.ends[order]:
                del self.held[order], self.tokens[order]
        return prefills, rows


lengths = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 20)), min_size=1, max_size=12)
gaps = st.lists(st.integers(0, 6), min_size=12, max_size=12)  # passes between two arrivals


@given(lengths, gaps, st.integers(11, 30), st.integers(1, 6), st.sampled_from([44, 60]), st.sampled_from([0.0, 0.1]))
@settings(max_examples=examples(150), deadline=None)
def test_every_pass_is_that_of_the_slow_model(requests, waits, blocks, most, budget, watermark) -> None:
    scheduler, pool = first(blocks, max_num_seqs=most, max_batch_tokens=budget, watermark=watermark)
    slow = SlowModel(blocks, budget, most, int(watermark * blocks))
    recomputed = preempted = 0
    arriving = deque(Request(order, *one) for order, one in enumerate(requests))
    everybody = list(arriving)
    admitted: list[int] = []
    next_at = 0
    for at in range(4000):
        while arriving and at >= next_at:
            one = arriving.popleft()
            next_at += waits[one.order]
            scheduler.add(one)
            slow.add(one.order, one.prompt_tokens, one.end - one.prompt_tokens)
        before = list(scheduler.running)
        batch = scheduler.schedule(pool)
        preempted += len(batch.preempted)
        work = Work.of(batch.chunks)
        lost = [one for one in before if one not in scheduler.running]
        assert all(kept.order < gone.order for gone in lost for kept in scheduler.running)
        # Blocks: what is held is what is live, and each has exactly what its tokens take.
        assert pool.live_blocks == sum(len(one.blocks) for one in everybody) <= blocks
        assert all(len(one.sequence.blocks) == -(-one.sequence.length // BLOCK) for one in batch.chunks)
        assert scheduler.used_blocks == pool.live_blocks
        recomputed += sum(one.recomputed for one in batch.chunks)
        seen = shape(batch)
        admitted += [order for order, _ in seen[0] if everybody[order].preemptions == 0]
        assert work.decode_context == sum(everybody[order].length for order in seen[1])
        assert (work.prefill_tokens, work.decode_rows) == (sum(count for _, count in seen[0]), len(seen[1]))
        land(scheduler, pool, batch)
        assert seen == slow.step()
        if not arriving and not scheduler.running and not scheduler.waiting:
            break
    assert all(one.state is RequestState.FINISHED and one.length == one.end for one in everybody)
    assert admitted == sorted(admitted)  # first come, first served
    assert (preempted, recomputed) == (slow.preempted, slow.recomputed) and pool.live_blocks == 0


@given(lengths, st.integers(11, 30), st.integers(1, 6))
@settings(max_examples=examples(100), deadline=None)
def test_nothing_that_is_swapped_is_computed_twice(requests: list[tuple[int, int]], blocks: int, most: int) -> None:
    scheduler, pool = first(blocks, max_num_seqs=most, swap=True, watermark=0.05)
    everybody = ask(scheduler, *requests)
    computed = dict.fromkeys(range(len(everybody)), 0)
    for _ in range(4000):
        batch = scheduler.schedule(pool)
        assert pool.out - pool.back == sum(len(one.host) for one in scheduler.swapped)
        assert pool.live_blocks == scheduler.used_blocks
        for one in batch.chunks:
            assert one.start == computed[one.sequence.order] and (one.decodes or one.start == 0)
            computed[one.sequence.order] += one.count
            assert len(one.sequence.blocks) == -(-one.sequence.length // BLOCK)
            assert not one.sequence.host
        assert list(scheduler.swapped) == sorted(scheduler.swapped, key=lambda one: one.order)
        land(scheduler, pool, batch)
        if not scheduler.running and not scheduler.waiting and not scheduler.swapped:
            break
    assert pool.out == pool.back and pool.live_blocks == 0
    assert all(computed[one.order] == one.end - 1 for one in everybody)  # the last token is never fed back


def test_swapped_sequences_come_back_before_anything_new_and_are_demanded_first() -> None:
    scheduler, pool = first(5, watermark=0.0, swap=True, max_num_seqs=2)
    ask(scheduler, (8, 6), (7, 6), (4, 2))
    for _ in range(3):
        step(scheduler, pool)
    assert [one.order for one in scheduler.swapped] == [1]
    # 0: 3 blocks for 11 tokens, one ahead; 1: 9 tokens, 3 blocks and one; 2 could not run besides.
    assert scheduler.running[0].length == 11 and scheduler.swapped[0].length == 9
    assert scheduler.demand() == 1 + (3 + 1)
    seen = [step(scheduler, pool) for _ in range(5)]
    assert seen[:3] == [([], [0])] * 3  # 2 would fit, but whoever was swapped out goes before it
    assert seen[3] == ([], [1]) and seen[4] == ([(2, 4)], [])


class Values(Engine):
    """The loop with sequences of tokens, and a runner that computes nothing: it says which tokens of whom it was given."""

    def __init__(self, pool: CountedPool, **scheduling: int) -> None:
        tenant = SimpleNamespace(name="t", kv=pool, remapped=0)
        super().__init__(tenant, Scheduler(block_tokens=BLOCK, **scheduling), self, clock=lambda: 0.0)  # type: ignore[arg-type]
        self.passes: list[tuple[tuple[int, int, int], ...]] = []

    def add_request(self, request: RealRequest, *, arrived_s: float | None = None) -> None:
        self._queue(RealSequence.of(request, next(self._orders)))

    def run(self, chunks: Sequence[Any]) -> tuple[list[Any], list[int]]:
        self.passes.append(tuple((one.sequence.order, one.start, one.count) for one in chunks))
        samplers = [one for one in chunks if one.samples]
        return samplers, [7] * len(samplers)


class Instant(Pass):
    """Passes that take no time; notes what each computes, as the runner above."""

    stall_s = 0.0
    copied_bytes = copied_out_bytes = 0

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock, None, None)  # type: ignore[arg-type]
        self.seen: list[tuple[tuple[int, int, int], ...]] = []

    def start(self, chunks: Sequence[Any]) -> float:
        self.seen.append(tuple((one.sequence.order, one.start, one.count) for one in chunks))
        return 0.0

    def _enqueue(self, work: Work, layer_s: float, ends_s: float) -> float:
        raise NotImplementedError


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 25), st.integers(0, 20)), min_size=1, max_size=10),
    st.integers(22, 50),
    st.sampled_from([{}, {"decode_cost": 3}, {"chunk_align": 8}, {"max_num_seqs": 2}, {"max_batch_tokens": 70}]),
)
@settings(max_examples=examples(100), deadline=None)
def test_lengths_are_served_as_values_are(requests, blocks, given_settings) -> None:
    """The same requests at the same steps: the same batches, preemptions and recomputed tokens, pass by pass."""
    options = {"max_num_seqs": 4, "max_batch_tokens": 32, "chunk_align": 4, "decode_cost": 0, **given_settings}
    clock, pool = VirtualClock(), CountedPool(blocks, BLOCK)
    real = Values(CountedPool(blocks, BLOCK), **options)
    scheduler = make_scheduling("chunked", block_tokens=BLOCK, context=1000, **options)
    tenant = SimpleNamespace(name="t", kv=pool, remapped=0)
    passes = Instant(clock)
    engine = SimEngine(tenant, scheduler, passes, clock, session=None, gap_s=0.0, most_blocks=blocks, context=1000)
    for at in range(3000):
        for number, (prompt, output, when) in enumerate(requests):
            if when == at:
                sampling = SamplingParams(max_tokens=output)
                real.add_request(RealRequest(str(number), tuple(range(prompt)), sampling))
                engine.add_request(Item("t", 0.0, prompt, output), arrived_s=0.0)
        if real.unfinished:
            real.step()
        if engine.unfinished:
            engine.advance()
        assert real.unfinished == engine.unfinished
        assert min(real.scheduler.demand(), blocks) == engine.demand().blocks
        if at > 20 and not real.unfinished:
            break
    assert passes.seen == real.passes
    found = engine.result()
    assert (found.preemptions, found.recomputed_tokens) == (real.metrics.preemptions, real.metrics.recomputed_tokens)
    assert found.output_tokens == real.metrics.generated_tokens == sum(output for _, output, _ in requests)
    assert found.finished == len(requests) and pool.live_blocks == 0


def test_the_last_token_of_a_prompt_is_prefill_even_alone() -> None:
    scheduler, pool = Scheduler(block_tokens=BLOCK, max_batch_tokens=4, chunk_align=4), CountedPool(20, BLOCK)
    ask(scheduler, (5, 3))
    shapes = []
    for _ in range(3):
        batch = scheduler.schedule(pool)
        work = Work.of(batch.chunks)
        shapes.append((work.prefill_tokens, work.prefill_pairs, work.decode_rows, work.decode_context, work.phase))
        land(scheduler, pool, batch)
    assert shapes == [(4, 10, 0, 0, "prefill"), (1, 5, 0, 0, "prefill"), (0, 0, 1, 6, "decode")]


@pytest.mark.parametrize(
    ("kind", "settings_given", "fields"),
    [
        ("fifo", {}, {"scheduler": "fifo"}),
        ("chunked", {"budget": 3}, {"scheduling": {"budget": 3}}),
        ("prefill-first", {"decode_cost": 3}, {"scheduling": {"decode_cost": 3}}),
        ("chunked", {"decode_cost": -1}, {"decode_cost": -1}),
    ],
)
def test_wrong_schedulers(kind: str, settings_given: dict[str, int], fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_scheduling(kind, block_tokens=16, context=2048, **settings_given)
    assert caught.value.fields == fields
