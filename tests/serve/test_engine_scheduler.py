"""The scheduler and the metrics: pure bookkeeping, checked by invariants under any load and by cases done by hand."""

from __future__ import annotations

import sys
from collections import Counter
from subprocess import run

import pytest
from effort import examples
from fakes import CountingPool
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument
from remap_serve.engine.metrics import Metrics, StepSample, percentile
from remap_serve.engine.request import Request, RequestState, SamplingParams, Sequence
from remap_serve.engine.scheduler import Scheduler


def sequence(order, prompt, max_tokens=50):
    return Sequence.of(Request(f"r{order}", (7,) * prompt, SamplingParams(max_tokens=max_tokens)), order)


def advance(scheduler, pool):
    """One step with a model that always says 7. Returns the schedule and what finished."""
    schedule = scheduler.schedule(pool)
    return schedule, complete(scheduler, pool, schedule)


def complete(scheduler, pool, schedule):
    finished = []
    for chunk in schedule.chunks:
        samples = chunk.samples
        scheduler.commit(chunk)
        if samples and chunk.sequence.append(7):
            scheduler.finish(chunk.sequence, pool)
            finished.append(chunk.sequence)
    return finished


def shape(schedule):
    return [(chunk.sequence.order, chunk.start, chunk.count) for chunk in schedule.chunks]


def scheduled(prompts, steps, blocks=100, **options):
    """The shapes of so many steps with these prompts waiting."""
    scheduler, pool = Scheduler(block_tokens=4, **options), CountingPool(blocks, 4)
    for order, prompt in enumerate(prompts):
        scheduler.add(sequence(order, prompt))
    return [shape(advance(scheduler, pool)[0]) for _ in range(steps)]


def test_chunked_prefill_shares_the_budget_with_decodes():
    first, second, third = scheduled((5, 10, 2), 3, max_batch_tokens=8, chunk_align=1)
    assert first == [(0, 0, 5), (1, 0, 3)]
    assert second == [(0, 5, 1), (1, 3, 7)]
    assert third == [(0, 6, 1), (1, 10, 1), (2, 0, 2)]


def test_prompts_are_cut_at_multiples_of_chunk_align():
    # 17 tokens are left after the first: 16 of the second, and the last one serves nobody.
    first, second = scheduled((3, 30, 5), 2, max_batch_tokens=20, chunk_align=8)
    assert first == [(0, 0, 3), (1, 0, 16)]
    assert second == [(0, 3, 1), (1, 16, 14), (2, 0, 5)]
    assert scheduled((11,), 3, max_batch_tokens=5, chunk_align=8) == [[(0, 0, 5)], [(0, 5, 3)], [(0, 8, 3)]]


def test_watermark_and_whole_prompt_hold_admission_back():
    held = scheduled((16, 8), 2, blocks=10, watermark=0.5, max_batch_tokens=16)
    assert held == [[(0, 0, 16)], [(0, 16, 1)]]  # 2 + 5 > 5 free
    assert scheduled((60,), 1, blocks=3, max_batch_tokens=8, reserve_full_prompt=False) == [[(0, 0, 8)]]
    assert scheduled((60,), 1, blocks=3, max_batch_tokens=8) == [[]]


def test_the_youngest_is_preempted_and_comes_back_first():
    scheduler = Scheduler(block_tokens=4, max_num_seqs=2)
    pool = CountingPool(4, 4)
    for order in range(3):
        scheduler.add(sequence(order, 7))
    for _ in range(2):  # 0 and 1 take two blocks each, and then both have 8 tokens computed: full
        advance(scheduler, pool)
    schedule, _ = advance(scheduler, pool)
    assert shape(schedule) == [(0, 8, 1)]
    assert [seq.order for seq in schedule.preempted] == [1]
    assert [seq.order for seq in scheduler.waiting] == [1, 2]
    victim = scheduler.waiting[0]
    assert (victim.computed, victim.blocks, victim.high_water, len(victim.tokens)) == (0, [], 8, 9)
    # One block is free, and 1 has nine tokens to compute: it waits for its whole prompt, and nobody overtakes it.
    assert shape(advance(scheduler, pool)[0]) == [(0, 9, 1)]
    scheduler.finish(scheduler.running[0], pool)
    for _ in range(2):  # a pass that failed is scheduled again
        schedule = scheduler.schedule(pool)
        assert shape(schedule) == [(1, 0, 9)] and schedule.chunks[0].recomputed == 8


def test_a_sequence_may_be_its_own_victim():
    scheduler, pool = Scheduler(block_tokens=4), CountingPool(1, 4)
    scheduler.add(sequence(0, 4))
    advance(scheduler, pool)
    schedule, _ = advance(scheduler, pool)
    assert schedule.chunks == () and [seq.order for seq in schedule.preempted] == [0]
    assert pool.free_blocks == 1


def test_demand_is_what_would_let_everything_run():
    scheduler = Scheduler(block_tokens=4, max_num_seqs=3, lookahead_blocks=1)
    assert scheduler.demand() == 0 and not scheduler.goes_on(9)
    pool = CountingPool(3, 4)
    for order, prompt in enumerate((8, 9, 1, 400)):
        scheduler.add(sequence(order, prompt))
    assert scheduler.demand() == (2 + 3 + 1) + 3  # the fourth has no slot
    advance(scheduler, pool)  # 0 runs, its next token needs a third block
    assert scheduler.demand() == (1 + 3 + 1) + 3
    assert (scheduler.goes_on(0), scheduler.goes_on(1)) == (False, True)
    assert len(scheduler.schedule(CountingPool(scheduler.demand(), 4)).chunks) == 3


loads = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 14), st.integers(0, 30)), min_size=1, max_size=12)


@settings(max_examples=examples(150), deadline=None)
@given(
    loads=loads,
    blocks=st.integers(9, 24),
    block_tokens=st.integers(4, 8),
    options=st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 6),
            "max_batch_tokens": st.integers(1, 24),
            "reserve_full_prompt": st.booleans(),
            "watermark": st.sampled_from([0.0, 0.1]),
            "chunk_align": st.sampled_from([1, 4, 32]),
        }
    ),
)
def test_any_load_finishes_and_every_invariant_holds(loads, blocks, block_tokens, options):
    """Ids have one holder; no pass exceeds its limits; running stays in order of arrival; every request ends."""
    pool = CountingPool(blocks, block_tokens)
    scheduler = Scheduler(block_tokens=block_tokens, **options)
    arrivals = sorted((arrival, order) for order, (_, _, arrival) in enumerate(loads))
    sequences = [sequence(order, loads[index][0], loads[index][1]) for order, (_, index) in enumerate(arrivals)]
    total = sum(prompt + tokens - 1 for prompt, tokens, _ in loads)
    recomputed = step = 0
    computed, finished = Counter(), []
    while len(finished) < len(sequences):
        for seq, (arrival, _) in zip(sequences, arrivals, strict=True):
            if arrival == step:
                scheduler.add(seq)
        wanted, free = scheduler.demand(), pool.free_blocks
        schedule = scheduler.schedule(pool)
        cut = [chunk for chunk in schedule.chunks[1:] if not chunk.samples]
        assert all(chunk.end % options["chunk_align"] == 0 for chunk in cut)
        recomputed += sum(chunk.recomputed for chunk in schedule.chunks)
        ended = complete(scheduler, pool, schedule)
        assert schedule.tokens <= options["max_batch_tokens"]
        assert len(scheduler.running) + len(ended) <= options["max_num_seqs"]
        for queue in (scheduler.running, scheduler.waiting):
            assert [seq.order for seq in queue] == sorted(seq.order for seq in queue)
        if wanted <= free:
            assert not schedule.preempted, "enough blocks for the demand, and yet a preemption"
        held = [block for seq in sequences for block in seq.blocks]
        assert len(held) == len(set(held)) == len(pool.held) == scheduler.used_blocks
        for chunk in schedule.chunks:
            assert chunk.count >= 1 and chunk.sequence not in schedule.preempted
            computed.update((chunk.sequence.order, token) for token in range(chunk.start, chunk.end))
        assert all(seq.state is RequestState.WAITING and seq.computed == 0 for seq in schedule.preempted)
        for seq in scheduler.running:
            assert seq.computed < len(seq.tokens) and seq.computed <= len(seq.blocks) * block_tokens
        finished += ended
        step += 1
        assert step < 20_000, "no progress"
    assert recomputed == computed.total() - total == sum(count - 1 for count in computed.values())  # what is done twice
    assert pool.free_blocks == blocks
    assert all(seq.generated == seq.request.sampling.max_tokens for seq in sequences)
    assert recomputed == 0 or any(seq.preemptions for seq in sequences)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Request("a", ()),
        lambda: Request("a", (1,), arrival_s=-1.0),
        lambda: SamplingParams(max_tokens=0),
        lambda: SamplingParams(temperature=-0.1),
        lambda: SamplingParams(top_p=0.0),
        lambda: Scheduler(block_tokens=0),
        lambda: Scheduler(block_tokens=4, watermark=1.0),
        lambda: Scheduler(block_tokens=4, max_num_seqs=0),
    ],
)
def test_bad_arguments_are_refused(bad):
    with pytest.raises(InvalidArgument):
        bad()


@pytest.mark.parametrize("q", [0.0, 1.0, 0.995, 0.001, -0.5, float("nan")])
def test_a_percentile_that_there_is_not_is_refused(q):
    with pytest.raises(InvalidArgument) as caught:
        percentile([1.0, 2.0], q)
    assert caught.value.field == "q"


def test_percentile_interpolates():
    assert percentile([], 0.5) == 0.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert percentile([5.0], 0.99) == 5.0


def test_metrics_by_hand():
    metrics = Metrics(started_s=10.0, kv_blocks_start=4)
    a, b = (Sequence.of(Request(id, (1, 2)), 0, arrived) for id, arrived in (("a", 10.0), ("b", 11.0)))
    for ready, now in (((a,), 10.5), ((a,), 10.7), ((), 11.0), ((b, a), 12.0)):
        metrics.tokens(ready, now)
    metrics.timeline.append(StepSample(0.5, 3, 6, 2, 1, 0, 0, 3, 0.5))
    summary = metrics.summary()
    assert metrics.ttft_s == [0.5, 1.0]
    assert metrics.tbt_s == pytest.approx([0.2, 1.3])
    assert (a.first_s, a.last_s, b.first_s) == (10.5, 12.0, 12.0) and metrics.ended_s == 12.0
    assert summary["tokens_per_s"] == 2.0
    assert (summary["kv_blocks_start"], summary["kv_blocks_peak"]) == (4, 6)
    assert (summary["kv_used_peak"], summary["layers_remapped_peak"]) == (3, 2)


def test_scheduling_needs_no_torch():
    """Nor does the loop, which simulations drive."""
    wanted = "remap_serve.engine, remap_serve.engine.engine, remap_serve.engine.sharing"
    code = f"import sys, {wanted}; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_chunk_is_never_negative():
    """A pass of fewer tokens than a tile cuts within one; what is left of a budget may not reach the tile's end."""
    scheduler = Scheduler(block_tokens=4, max_batch_tokens=16, chunk_align=32)
    sequence = Sequence.of(Request("r", tuple(range(1, 200)), SamplingParams(max_tokens=3)), 0)
    sequence.computed = 20
    assert [scheduler.chunk_tokens(sequence, budget) for budget in (5, 11, 12, 16)] == [0, 0, 12, 12]


def test_finishing_again_after_an_interrupt_finishes(monkeypatch):
    """An interrupt came when the pool had the blocks back: the second call does the rest, and frees nothing twice.
    test_engine_interrupts.py has one at every line."""
    pool, scheduler = CountingPool(8, 4), Scheduler(block_tokens=4)
    sequence = Sequence.of(Request("a", (1, 2, 3), SamplingParams(max_tokens=4)), 0, 0.0)
    scheduler.add(sequence)
    scheduler.schedule(pool)
    real = pool.free

    def interrupted(*args):
        real(*args)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "free", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scheduler.finish(sequence, pool)
    scheduler.finish(sequence, pool)
    assert (
        not scheduler.running
        and not scheduler.waiting
        and pool.live_blocks == 0
        and sequence.state is RequestState.FINISHED
    )
