"""How long a request that has begun waits for its next token, whatever else comes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from effort import some
from fakes import ContentPool
from test_engine_interrupts import BLOCK, Loop

from remap_serve.cli.simulate import Options, prepare
from remap_serve.engine.request import Request, SamplingParams
from remap_serve.engine.scheduler import Scheduler
from remap_serve.engine.sharing import LONGEST_S
from remap_serve.sim.serving import simulate

H100 = ("H100-SXM", "Llama-3-8b:25%,Llama-2-13b:37%,Qwen2.5-14B:37%")


@pytest.mark.parametrize("sharing", ["epochs", "temporal"])
@pytest.mark.parametrize(
    ("machine", "models", "rate", "requests", "seed"),
    [
        ("GH200-96GB", "C2", 20, 200, 2),  # 26 s when the youngest waited for all older ones
        ("GH200-96GB", "C2", 6, 150, 3),  # 24 s when a turn was over while its tenant was getting its blocks
        *some([], [("GH200-96GB", "C2", 20, 200, seed) for seed in range(3, 9)]),
        *some([], [("GH200-96GB", "C2", 10, 150, seed) for seed in range(6)]),
        (*H100, 30, 150, 1),
        *some([], [(*H100, 30, 200, seed) for seed in range(2, 6)]),
    ],
)
def test_no_request_that_has_begun_waits_for_longer_than_is_said(
    machine: str, models: str, rate: float, requests: int, seed: int, sharing: str
) -> None:
    """`LONGEST_S`, then for its tenant's turn: each other's, and as long again for what turns cost."""
    options = Options(machine, models, rate=f"{rate}", requests=requests, seed=seed, policies="remap", sharing=sharing)
    inputs = prepare(options)
    result = simulate(inputs.setup, inputs.items, "remap")
    longest = max(gap for tenant in result.tenants for gap in tenant.longest_gap_s if gap is not None)
    assert result.requests_finished == requests
    assert longest <= LONGEST_S + 2 * len(inputs.setup.tenants) * inputs.setup.quantum_s


class Alone(Loop):
    """At most three requests of two blocks fit."""

    def __init__(self, swap: bool = True) -> None:
        pool: Any = ContentPool(6, 40, random.Random(1))
        pool.offer, pool.host = lambda blocks: None, SimpleNamespace(free_blocks=40)
        scheduler = Scheduler(block_tokens=BLOCK, max_num_seqs=8, max_batch_tokens=64, chunk_align=4, swap=swap)
        super().__init__(pool, scheduler)
        self.now = 0.0
        self._clock = lambda: self.now
        for name in "abcde":
            self.add_request(Request(name, (1,) * 5, SamplingParams(max_tokens=3)))

    def turn(self) -> list[str]:
        self.now += 1.0
        return [one.id for one in self.advance().sampled]

    def ids(self) -> tuple[str, str]:
        scheduler = self.scheduler
        return "".join(one.id for one in scheduler.running), "".join(one.id for one in scheduler.waiting)


def test_who_has_begun_goes_first_when_it_has_waited_and_the_youngest_others_give_it_room() -> None:
    engine = Alone()
    engine.turn()
    assert engine.ids() == ("abc", "de")
    engine.release(2)
    engine.scheduler.closed = True
    engine.turn()
    assert engine.ids() == ("ab", "cde")
    engine.rotate(1.0)  # c has waited for a second, not for longer; d and e have not begun
    assert engine.ids() == ("ab", "cde")
    engine.now += 0.5
    engine.add_request(Request("f", (1,) * 5, SamplingParams(max_tokens=3)))
    engine.rotate(1.0)
    assert engine.ids() == ("ab", "cdef") and engine.pool.free_blocks == 2  # there is room for it
    engine.release(4)
    engine.now += 9.0
    engine.rotate(1.0)
    assert engine.ids() == ("", "cabdef")  # who waits longest first; then by age
    engine.scheduler.closed = False
    order = []
    while engine.unfinished:
        order += engine.turn()
        for ticket in list(engine.pool.flying):
            engine.pool.join(ticket)
    assert sorted(set(order)) == list("abcdef") and not engine.pool.held


def test_the_youngest_others_give_as_much_as_is_lacking() -> None:
    engine = Alone()
    engine.turn()
    engine.release(2)
    engine.pool.allocate(2)  # others have these blocks now
    engine.now += 9.0
    engine.turn()  # a and b get their tokens
    engine.rotate(4.0)
    assert engine.ids() == ("a", "cbde")


def test_nobody_is_moved_where_its_kv_would_be_computed_again() -> None:
    engine = Alone(swap=False)
    engine.turn()
    engine.preempt(2)
    engine.now += 9.0
    engine.rotate(1.0)
    assert engine.ids() == ("ab", "cde")
