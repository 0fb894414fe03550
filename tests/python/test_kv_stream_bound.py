"""The certificate of passes over streamed blocks: against the exact period of weights alone, an obvious recurrence of blocks
alone, and the library itself in virtual time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import remap
from remap import _core
from remap.policy import schedule
from remap.policy.kv_stream import most_blocks, pass_seconds
from remap.sim.masters import masters

SECONDS = st.floats(0.1, 8.0)


@st.composite
def weights(draw: st.DrawFn) -> tuple[list[float], list[float], list[int], int]:
    layers = draw(st.integers(1, 12))
    ring = draw(st.integers(1, 2))
    compute = draw(st.lists(st.one_of(st.just(1.0), SECONDS), min_size=layers, max_size=layers))
    copies = draw(st.lists(SECONDS, min_size=layers, max_size=layers))
    streamed = sorted(draw(st.sets(st.integers(0, layers - 1))))
    return compute, copies, streamed if len(streamed) > ring else [], ring


@given(weights())
def test_without_blocks_it_is_the_exact_period(case: tuple[list[float], list[float], list[int], int]) -> None:
    compute, copies, streamed, ring = case
    exact = schedule.period(compute, copies, streamed, ring) if streamed else sum(compute)
    assert pass_seconds(compute, copies, streamed, ring, 0.0, len(compute), 2) == pytest.approx(exact)


@given(st.lists(SECONDS, min_size=1, max_size=12), SECONDS, st.integers(1, 3), st.data())
def test_blocks_alone_follow_the_recurrence(
    compute: list[float], copy: float, buffers: int, data: st.DataObject
) -> None:
    kv_layers = data.draw(st.integers(1, len(compute)))
    come, done = list[float](), list[float]()
    for layer, own in enumerate(compute):
        if layer < kv_layers:
            free = done[layer - buffers] if layer >= buffers else 0.0
            come.append(max(come[-1] if come else 0.0, free) + copy)
        done.append(max(done[-1] if done else 0.0, come[layer] if layer < kv_layers else 0.0) + own)
    assert pass_seconds(compute, compute, [], 1, copy, kv_layers, buffers) == pytest.approx(done[-1])


@given(weights(), st.floats(0.001, 0.4), st.floats(1.0, 2.0), st.integers(0, 40))
def test_as_many_blocks_as_the_limit_allows(
    case: tuple[list[float], list[float], list[int], int], block: float, slack: float, most: int
) -> None:
    compute, copies, streamed, ring = case
    layers = len(compute)

    def seconds(blocks: int) -> float:
        return pass_seconds(compute, copies, streamed, ring, blocks * block, layers, 2)

    limit = slack * seconds(0)
    found = most_blocks(seconds, limit, most)
    assert 0 <= found <= most
    assert found == 0 or seconds(found) <= limit
    assert found == most or seconds(found + 1) > limit


# -- the library itself, in virtual time ---------------------------------------------------------------------------------

SMALL = 16 << 20
RATE = 400e9


@pytest.mark.parametrize("blocks", [0, 8, 64])
@pytest.mark.parametrize(("remapped", "buffers", "compute_s"), [(0, 1, 1e-5), (2, 1, 5e-5), (3, 2, 1e-5), (1, 1, 1e-4)])
def test_passes_take_as_long_as_predicted(blocks: int, remapped: int, buffers: int, compute_s: float) -> None:
    layers = 8
    made = _core.make_sim_backend(
        capacity_bytes=8 << 30, h2d_bytes_per_s=RATE, d2h_bytes_per_s=RATE, hbm_bytes_per_s=4e12, contention=False
    )
    spec = remap.KVSpec(
        layers=layers,
        kv_heads=1,
        head_dim=64,
        block_tokens=128,
        min_blocks=64,
        max_blocks=2048,
        layout="layer_major",
        host_blocks=64,
        streamed_blocks=64,
    )
    with remap.Session("512MiB", platform=remap.advanced.Platform(backend=made)) as session:
        tenant = session.attach_bytes(masters([SMALL] * layers), kv=spec)
        shown = tenant.kv.stream(tenant.kv.copy_out(tenant.kv.allocate(64)))[:blocks]
        if remapped:
            remap.advanced.remap(session, "model", layers=remapped, buffers=buffers)
        stream = made.create_stream()
        ends = []
        for _ in range(12):
            with tenant.forward(stream=stream, streamed=shown):
                for layer in range(layers):
                    tenant.wait(layer)
                    made.compute(stream, compute_s)
                    tenant.done(layer)
            made.finish(stream)
            ends.append(made.now)
        seconds = max(late - early for early, late in itertools.pairwise(ends[-5:]))
        predicted = pass_seconds(
            [compute_s] * layers,
            [SMALL / RATE] * layers,
            tenant.streamed,
            max(1, tenant.buffers),
            blocks * 2 * tenant.kv.geometry.unit_bytes / RATE,
            layers,
            2,
        )
        assert seconds == pytest.approx(predicted, rel=1e-6)
