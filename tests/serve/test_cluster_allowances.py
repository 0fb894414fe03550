"""What each microbatch may take of the prompts that wait."""

from __future__ import annotations

import pytest

from remap_serve.policy.cluster.allowances import Allowances
from remap_serve.policy.cluster.lookahead import ChunkCost, Waiting, lookahead

COST = ChunkCost(0.0, 0.0, 1.0, 0.0, 4.0)
PROMPTS = [Waiting(0, 1000), Waiting(64, 500)]


def taken(decode_s: list[float], count: int, prompts: list[Waiting] = PROMPTS) -> list[float | None]:
    """By lane 0 of as many as decode_s has, so many times."""
    allowances = Allowances(COST, len(decode_s), 600, 10)
    return [allowances.take(0, decode_s, lambda most: prompts[:most]) for _ in range(count)]


def test_parts_are_taken_in_turn_and_all_is_divided_anew_after_two_for_each_lane() -> None:
    parts = [COST.microbatch(part) - 4.0 for part in lookahead(PROMPTS, COST, 2, 10)]
    assert len(parts) > 4 and taken([0.0, 0.0], 6) == [*parts[:4], *parts[:2]]


def test_no_part_costs_more_than_the_largest_prompt_of_a_microbatch() -> None:
    assert taken([1e4, 1e4], 2) == [600.0, 600.0] == taken([0.0, 0.0], 2, [])


def test_decoding_counts_as_what_a_microbatch_costs_once() -> None:
    """The more of it there is, the fewer parts: as if weights took longer to load."""
    heavy = ChunkCost(0.0, 0.0, 1.0, 0.0, 4.0 + 36.0)
    (largest,) = {COST.microbatch(part) - 4.0 for part in lookahead(PROMPTS, heavy, 2, 10)[:1]}
    assert taken([36.0, 36.0], 1) == [largest] and largest > (taken([0.0, 0.0], 1)[0] or 0.0)


@pytest.mark.parametrize("own", [6.0, 66.0])
def test_a_lane_takes_as_much_less_as_its_decoding_takes_longer_than_the_mean(own: float) -> None:
    (even,), (uneven,) = taken([36.0, 36.0], 1), taken([own, 72.0 - own], 1)
    assert even is not None and uneven == pytest.approx(even + 36.0 - own)
