"""KeyboardInterrupt before every line of the schedulers and the loop, one a run: the same call is made again, and everybody is
served on his own KV; nothing is freed twice, and nothing is lost.

The pool is a test's double, where no interrupt comes: what a session does with one is test_interrupts.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from effort import LONG, some
from fakes import ContentPool
from interrupts import Interrupt, interrupted

from remap.errors import DriverError, InvalidArgument
from remap_serve.engine.engine import Engine
from remap_serve.engine.pairs import PAIR
from remap_serve.engine.request import Request, SamplingParams, Sequence
from remap_serve.engine.scheduler import Scheduler
from remap_serve.engine.throughput import ThroughputScheduler

BLOCK = 4


class Sweep:
    """Runs `world(sweep)` once without an interrupt, and then once for each place in `files` that it came to: the first or the
    last time, by turns, and in the long form both. `sweep.act(call)` is where one may come, and makes the call again then."""

    def __init__(self, *files: str) -> None:
        self.files = files
        self.left = -1  # points before the interrupt; -1: none comes
        self.seen: list[str] = []
        self.where = ""

    def act(self, call: Callable[[], Any]) -> Any:
        if self.where:
            return call()
        interrupt, result, error = interrupted(call, self.left, "lines", self.files)
        self.seen += interrupt.seen
        self.where = interrupt.where
        self.left -= interrupt.count if self.left >= 0 else 0
        if isinstance(error, KeyboardInterrupt):
            return call()
        if error is not None:
            raise error
        return result

    def __call__(self, world: Callable[[Sweep], None]) -> int:
        """How many interrupts there were."""
        world(self)
        first = {place: at for at, place in reversed(list(enumerate(self.seen)))}
        last = {place: at for at, place in enumerate(self.seen)}
        tried = 0
        by_turns = {(first, last)[turn % 2][place] for turn, place in enumerate(first)}
        for at in sorted({*first.values(), *last.values()} if LONG else by_turns):
            self.left, self.where = at, ""
            try:
                world(self)
            except BaseException as error:
                error.add_note(f"interrupted at {self.where}") if hasattr(error, "add_note") else None
                raise
            assert self.where
            tried += 1
        return tried


def load(rng: random.Random, most: int = 26) -> list[Sequence]:
    requests = [
        Request(f"r{i}", tuple(range(1, rng.randint(3, most))), SamplingParams(max_tokens=rng.randint(1, 8)))
        for i in range(7)
    ]
    return [Sequence.of(request, order) for order, request in enumerate(requests)]


# -- the scheduler -----------------------------------------------------------------------------------------------------------


def compute(pool: ContentPool, scheduler: Scheduler, chunk: Any) -> None:
    """A pass: it finds the sequence's own tokens in its blocks, and writes new ones."""
    sequence = chunk.sequence
    for index in range(-(-chunk.start // BLOCK)):
        of, at, written = pool.read(sequence.blocks[index])
        assert (of, at) == (sequence.id, index)
        assert written >= min(BLOCK, chunk.start - BLOCK * index)  # more: of a token that is computed again
    for index in range(chunk.start // BLOCK, -(-chunk.end // BLOCK)):
        pool.content[sequence.blocks[index]] = (sequence.id, index, min(BLOCK, chunk.end - BLOCK * index))


def swapping(seed: int) -> Callable[[Sweep], None]:
    """Preemptions, turns that end, blocks that stream, copies that fail."""

    def world(sweep: Sweep) -> None:
        act = sweep.act
        rng = random.Random(seed)
        host = rng.choice([4, 12, 60])
        pool = ContentPool(14, host, rng)
        scheduler = Scheduler(
            block_tokens=BLOCK, max_num_seqs=4, max_batch_tokens=16, chunk_align=4, swap=True, stream=seed % 2 == 0
        )
        pool.streamable_blocks = rng.randint(2, 12)
        waiting = load(rng)
        unfinished = set(waiting)
        for turn in range(400):
            if waiting and turn % 2 == 0:
                scheduler.add(waiting.pop(0))
            pool.loses = pool.loses or turn % 17 == 5
            if turn % 7 == 3 and scheduler.running:
                victim = rng.choice(scheduler.running)
                act(lambda victim=victim: victim in scheduler.running and scheduler.preempt(victim, pool))
            if turn % 5 == 2:
                act(lambda: scheduler.save(pool))
            if turn % 6 == 4:
                act(lambda: scheduler.bring_back(pool))
            if turn % 29 == 11:
                act(lambda: scheduler.leave_host(pool, 1))
            if turn % 9 == 5 and scheduler.waiting:
                last = scheduler.waiting[-1]
                act(lambda last=last: scheduler.put_first([last]))
                assert scheduler.waiting[0] is last
            pool.fails = pool.fails or turn % 23 == 9
            try:
                schedule = act(lambda: scheduler.schedule(pool))
            except DriverError:  # a copy has failed
                continue
            for chunk in schedule.chunks:
                samples = chunk.samples
                compute(pool, scheduler, chunk)
                scheduler.commit(chunk)
                if samples and chunk.sequence.append(5) is not None:
                    act(lambda chunk=chunk: scheduler.finish(chunk.sequence, pool))
                    unfinished.discard(chunk.sequence)
            everywhere = [*scheduler.running, *scheduler.waiting, *scheduler.arriving, *waiting]
            assert len(everywhere) == len(set(everywhere)) and set(everywhere) == unfinished
            if not unfinished:
                break
        assert not unfinished
        scheduler.due.give_surely(pool)
        assert not pool.held and not pool.stored and not pool.shown and len(pool.free_hosts) == host

    return world


@pytest.mark.parametrize("seed", range(6))
def test_the_scheduler_goes_on_after_an_interrupt_at_any_line(seed: int) -> None:
    assert Sweep("remap_serve/engine/scheduler.py", "remap_serve/engine/streaming.py", "remap_serve/engine/due.py")(
        swapping(seed)
    ) > some(100, 200)


# -- offline batches -----------------------------------------------------------------------------------------------------------


class PairPool(ContentPool):
    """Blocks have contents from the start: a pair's staging is written with it."""

    def allocate(self, n: int) -> list[int]:
        ids = super().allocate(n)
        self.content.update((block, ("", 0, 0)) for block in ids)
        return ids


def batching(seed: int) -> Callable[[Sweep], None]:
    """Whatever a sequence has in host memory is its own; nothing is lost, nothing is freed twice."""

    def world(sweep: Sweep) -> None:
        act = sweep.act
        rng = random.Random(seed)
        pool = PairPool(30, 40, rng)
        pool.streamable_blocks = 40
        scheduler = ThroughputScheduler(
            ratio=[(0, 1), (1, 1), (1, 0)][seed % 3],
            host_blocks=40,
            block_tokens=BLOCK,
            max_batch_tokens=24,
            chunk_align=8,
        )
        waiting = load(rng)
        unfinished = set(waiting)
        for sequence in waiting:
            scheduler.add(sequence)
        for turn in range(300):
            pool.loses = pool.loses or turn % 13 == 7
            try:
                schedule = act(lambda: scheduler.schedule(pool))
            except DriverError:  # a copy has failed
                continue
            for chunk in schedule.chunks:
                samples, kept = chunk.samples, scheduler.held[chunk.sequence]
                for number, pair in enumerate(kept.pairs[: kept.out]):
                    assert [pool.stored[block][:2] for block in pair.host] == [(chunk.sequence.id, number)] * len(
                        pair.host
                    )
                for number, pair in enumerate(kept.pairs[kept.out :], kept.out):
                    own = chunk.sequence.blocks[PAIR * number : PAIR * number + PAIR]
                    for block in own if pair.staging is None else [*own, pair.staging]:
                        pool.content[block] = (chunk.sequence.id, number, 0)
                scheduler.commit(chunk)
                if samples and chunk.sequence.append(5) is not None:
                    act(lambda chunk=chunk: scheduler.finish(chunk.sequence, pool))
                    unfinished.discard(chunk.sequence)
            if not unfinished:
                break
        assert not unfinished and not scheduler.held
        scheduler.due.give_surely(pool)
        assert not pool.held and not pool.stored and not pool.shown and len(pool.free_hosts) == 40

    return world


@pytest.mark.parametrize("seed", range(6))
def test_an_offline_batch_goes_on_after_an_interrupt_at_any_line(seed: int) -> None:
    assert Sweep("remap_serve/engine/throughput.py", "remap_serve/engine/scheduler.py", "remap_serve/engine/due.py")(
        batching(seed)
    ) > some(40, 80)


# -- the loop ------------------------------------------------------------------------------------------------------------------


class Loop(Engine):
    """An engine whose runner says 7, and finds each sequence's own KV."""

    def __init__(self, pool: ContentPool, scheduler: Scheduler, session: Any = None) -> None:
        self.pool = pool
        ticks: Iterator[float] = iter(range(1 << 30))
        tenant = SimpleNamespace(kv=pool, name="m", remapped=0)
        super().__init__(tenant, scheduler, self, session=session, clock=lambda: float(next(ticks)))

    def add_request(self, request: Request, *, arrived_s: float | None = None) -> None:
        if request.id not in self._live:
            self._queue(Sequence.of(request, next(self._orders), 0.0))

    def run(self, chunks: Any) -> Any:
        for chunk in chunks:
            compute(self.pool, self.scheduler, chunk)
        samplers = [chunk for chunk in chunks if chunk.samples]
        return samplers, [7] * len(samplers)


class Mover:
    """A session that moves every block that is held, and tells of that once, in every second report."""

    def __init__(self, pool: ContentPool) -> None:
        self.pool, self.calls = pool, 0

    def step(self, demand: Any = None) -> Any:
        self.calls += 1
        pool = self.pool
        if self.calls % 2:
            return SimpleNamespace(moved={}, wanted={})
        old, places = sorted(pool.held), sorted([*pool.held, *pool.free_ids])
        new = random.Random(self.calls).sample(places, len(old))
        contents = [pool.content.pop(block, ("", 0, 0)) for block in old]
        pool.content.update(zip(new, contents))
        pool.held = set(new)
        pool.free_ids = [block for block in places if block not in pool.held]
        return SimpleNamespace(moved={"m": dict(zip(old, new))}, wanted={})


def looping(seed: int) -> Callable[[Sweep], None]:
    def world(sweep: Sweep) -> None:
        act = sweep.act
        rng = random.Random(seed)
        pool = ContentPool(14, 0, rng)
        scheduler = Scheduler(block_tokens=BLOCK, max_num_seqs=4, max_batch_tokens=16, chunk_align=4)
        engine = Loop(pool, scheduler, Mover(pool))
        requests = [sequence.request for sequence in load(rng)]
        ended: dict[str, int] = {}
        for turn in range(300):
            if requests and turn % 2 == 0:
                request = requests.pop()
                act(lambda request=request: engine.add_request(request))
                assert request.id in engine._live
            if turn == 9:
                victim = next(iter(engine._live))
                act(lambda victim=victim: engine.abort(victim) if victim in engine._live else None)
                ended[victim] = 0
            assert engine.unfinished == len(engine._live.keys() | engine._ended.keys())
            for output in act(engine.step).finished:
                assert output.id not in ended
                ended[output.id] = len(output.tokens)
                assert output.finish_reason == "length"
            if not engine.unfinished and not requests:
                break
        assert not engine.unfinished and not pool.held
        for sequence in load(random.Random(seed)):
            # What a step had returned when the interrupt came is lost with the step: nobody else has it.
            assert ended.get(sequence.id, sequence.sampling.max_tokens) in (0, sequence.sampling.max_tokens)
        assert len(ended) >= 6

    return world


@pytest.mark.parametrize("seed", range(3))
def test_the_loop_goes_on_after_an_interrupt_at_any_line(seed: int) -> None:
    files = (
        "remap_serve/engine/engine.py",
        "remap_serve/engine/scheduler.py",
        "remap_serve/engine/request.py",
        "remap_serve/engine/reports.py",
        "remap_serve/engine/due.py",
    )
    assert Sweep(*files)(looping(seed)) > some(75, 150)


def test_an_abort_behind_an_interrupted_step_frees_its_own_blocks() -> None:
    """Blocks had moved, and the report was lost between the session's call and the tables."""
    pool = ContentPool(14, 0, random.Random(3))
    engine = Loop(pool, Scheduler(block_tokens=BLOCK), Mover(pool))
    for name in ("a", "b"):
        engine.add_request(Request(name, tuple(range(1, 12)), SamplingParams(max_tokens=4)))
    engine.step()
    follow, engine.follow = engine.follow, lambda moved: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.follow = follow  # type: ignore[method-assign]
    engine.abort("a")
    outputs = [output for _ in range(8) for output in engine.step().finished]
    assert [output.id for output in outputs] == ["b"] and not pool.held


def test_points_are_of_these_files_alone() -> None:
    sweep = Sweep("remap_serve/engine/due.py")
    swapping(0)(sweep)
    assert sweep.seen and all(where.startswith("remap_serve/engine/due.py") for where in sweep.seen)
    assert Interrupt(-1, "lines").files == ()


def test_an_end_that_no_output_told_of_is_the_run_s_own() -> None:
    """An interrupt came when a request had all its tokens: it counts as unfinished until a step tells of it, or it is aborted, so
    that no later run gets the output of an earlier one's."""
    pool = ContentPool(14, 0, random.Random(0))
    engine = Loop(pool, Scheduler(block_tokens=BLOCK))
    for name in ("a", "b"):
        engine.add_request(Request(name, (1, 2), SamplingParams(max_tokens=1)))
    real, engine._record = engine._record, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine._record = real  # type: ignore[method-assign]
    assert engine.unfinished == 2 and not pool.held
    assert engine.abort("a").finish_reason == "length"
    with pytest.raises(InvalidArgument):
        engine.abort("a")
    assert [output.id for output in engine.step().finished] == ["b"] and engine.unfinished == 0
