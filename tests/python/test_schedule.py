"""`remap.schedule` on known numbers: worked examples, edge cases and refused arguments."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial

import pytest

from remap.errors import InvalidArgument
from remap.policy.maxplus import copied_uses
from remap.policy.schedule import max_remapped, nested, one_shot_delay, period, stall, uniform, uniform_fixed

N = 40


def equal(alpha: int, buffers: int, ratio: float, slots: str = "rotating") -> float:
    return stall(1.0, float(ratio), uniform(N, alpha, buffers), buffers, slots, layers=N)  # type: ignore[arg-type]


def test_uniform_and_slots() -> None:
    assert uniform(40, 4, 1) == (0, 8, 16, 24, 32) == uniform_fixed(40, 4, 1)
    assert uniform(40, 4, 1, phase=7) == (7, 15, 23, 31, 39) == uniform(40, 4, 1, phase=-1)
    assert uniform(40, 0, 3) == uniform(1, 0, 1) == uniform_fixed(40, 0, 2) == ()
    assert uniform(3, 2, 1) == (0, 1, 2)
    assert uniform_fixed(40, 8, 2) == uniform(40, 8, 2) and uniform_fixed(5, 3, 2) == (0, 1, 2, 3, 4)
    chosen = uniform_fixed(40, 9, 2)
    assert len(set(chosen)) == 11 and chosen[-1] == 35
    assert copied_uses(3, 2, "fixed") == [0, 2]  # the second layer has a buffer to itself
    assert copied_uses(2, 4, "fixed") == [] and copied_uses(4, 2, "fixed") == [0, 1, 2, 3]
    assert (nested(1), nested(2), nested(40)[:2]) == ((0,), (0, 1), (0, 23))  # log2(3) - 1 = 0.585 of the circle


def test_edge_cases() -> None:
    assert period([2.0], [9.0], (), 1) == 2.0
    assert period([2.0], [9.0], (0,), 1) == 2.0  # alone in its buffer: it stays
    # Two fixed slots with an odd number of layers, spaced for it.
    assert equal(9, 2, 3.4) == 0.0 and equal(9, 2, 3.4, "fixed") == pytest.approx(0.8)
    assert max_remapped(1.0, 3.4, layers=N) == (8, 2)
    assert max_remapped(1.0, 3.4, layers=N, select=uniform_fixed) == (9, 2)
    assert max_remapped([1.0], [0.0]) == (0, 1)
    assert max_remapped([1.0, 1.0], 0.0) == (1, 1)
    assert max_remapped([1.0, 1.0], 0.0, buffers=2) == (0, 1)
    assert max_remapped([1.0, 1.0], 9.0, slowdown=8.0) == (0, 1)  # two copies of 9 each, neither hidden: 20 s, not 18
    for unit in (0.1, 1e-3, 1 / 3, 7e-5):  # rounding is forgiven, and no more
        assert max_remapped([unit] * N, unit * 4, "auto") == (8, 2)
        assert max_remapped([unit] * N, unit * 4 * (1 + 1e-7), "auto") == (6, 2)


NAN, INF, PAIR = math.nan, math.inf, [1.0, 1.0]


@pytest.mark.parametrize(
    ("field", "function", "arguments"),
    [
        *(("remapped", uniform, (4, value, 1)) for value in (4, -1, 1.0, True)),
        *(("layers", uniform, (0, 0, 1)), ("buffers", uniform, (4, 1, 0)), ("phase", uniform, (4, 1, 1, 0.5))),
        *(("layers", nested, (0,)), ("layers", partial(period, layers=2), ([1.0], 1.0, (), 1))),
        *(("layer", period, (PAIR, 1.0, streamed, 1)) for streamed in ((2,), (0, 0))),
        *(("streamed", period, (PAIR, 1.0, (-1,), 1)), ("buffers", period, (PAIR, 1.0, (0,), 0))),
        ("slots", period, (PAIR, 1.0, (0,), 1, "round")),
        *(("compute_s", period, (compute, 1.0, (), 1)) for compute in ([1.0, NAN], [1.0, "1"], [])),
        *(("transfer_s", period, (PAIR, transfer, (0,), 1)) for transfer in ([1.0, -1.0], INF, [1.0])),
        *(("slowdown", partial(max_remapped, slowdown=value), ([1.0], 1.0)) for value in (-0.1, NAN)),
        ("buffers", max_remapped, ([1.0] * 4, 0.0, "many")),
        ("expected", partial(max_remapped, select=lambda n, a, b: (0,)), ([1.0] * 4, 0.0)),
        ("layer", one_shot_delay, ([1.0], 1.0, (1,))),
    ],
)
def test_refusals_name_the_field(field: str, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    with pytest.raises(InvalidArgument, match="nothing changed") as caught:
        function(*arguments)
    assert field in caught.value.fields


def test_scalars_and_numpy_arguments() -> None:
    with pytest.raises(InvalidArgument, match="layers="):
        period(1.0, 1.0, (0,), 1)
    assert period(1.0, 1.0, (0,), 1, layers=3) == 3.0
    numpy = pytest.importorskip("numpy")
    compute = numpy.ones(N)
    assert period(compute, numpy.float32(4.0), numpy.array(uniform(N, 9, 1)), 1) == 50.0
    assert max_remapped(compute, numpy.full(N, 4.0)) == (8, 2)


def test_it_is_imported_under_its_public_name() -> None:
    """`import remap.schedule` failed when the module had moved: only the attribute was left."""
    public, inside = (importlib.import_module(name) for name in ("remap.schedule", "remap.policy.schedule"))
    assert public.__all__ and all(getattr(public, name) is getattr(inside, name) for name in public.__all__)
