"""The certificate of passes over streamed blocks: against the exact period of weights alone, an obvious recurrence of blocks
alone, and the library itself in virtual time."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import remap
from remap import _core
from remap.internals import internals
from remap.policy import schedule
from remap.policy.kv_stream import most_blocks, pass_seconds
from remap_serve.sim.worlds import masters

SECONDS = st.floats(0.1, 8.0)
Weights = tuple[list[float], list[float], list[int], int]


@st.composite
def weights(draw: st.DrawFn) -> Weights:
    layers = draw(st.integers(1, 12))
    ring = draw(st.integers(1, 2))
    compute = draw(st.lists(st.one_of(st.just(1.0), SECONDS), min_size=layers, max_size=layers))
    copies = draw(st.lists(SECONDS, min_size=layers, max_size=layers))
    streamed = sorted(draw(st.sets(st.integers(0, layers - 1))))
    return compute, copies, streamed if len(streamed) > ring else [], ring


@given(weights())
def test_without_blocks_it_is_the_exact_period(case: Weights) -> None:
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
def test_as_many_blocks_as_the_limit_allows(case: Weights, block: float, slack: float, most: int) -> None:
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

LAYER = 16 << 20
RATE = 400e9
COMPUTE_S = 1e-4


def opened(capacity: str, layers: int, blocks: int, tokens: int) -> tuple[Any, remap.Session, remap.KVSpec]:
    """A device in virtual time and a session on it; of its KV, so many blocks may be in host memory and stream."""
    made = _core.make_sim_backend(
        capacity_bytes=8 << 30, h2d_bytes_per_s=RATE, d2h_bytes_per_s=RATE, hbm_bytes_per_s=4e12, contention=False
    )
    shape = {"layers": layers, "kv_heads": 1, "head_dim": 64, "block_tokens": tokens, "layout": "layer_major"}
    in_host = {"host_blocks": blocks, "streamed_blocks": blocks}
    spec = remap.KVSpec(**shape, **in_host, min_blocks=blocks, max_blocks=2048)
    return made, remap.Session(capacity, platform=remap.advanced.Platform(backend=made)), spec


def passes(
    made: Any, work: list[tuple[remap.Tenant, int, list[int]]], count: int, compute_s: float = COMPUTE_S
) -> list[float]:
    """Seconds of the longest of each tenant's passes, which run beside each other; work: tenant, stream, streamed blocks."""
    longest = [0.0] * len(work)
    for _ in range(count):
        begun = made.now
        with contextlib.ExitStack() as stack:
            for tenant, stream, shown in work:
                stack.enter_context(tenant.forward(phase="decode", tokens=4, stream=stream, streamed=shown))
            for layer in range(work[0][0].layers):
                for tenant, stream, _ in work:
                    tenant.wait(layer)
                    made.compute(stream, compute_s)
                    tenant.done(layer)
        ends = [made.stream_end(stream) for _, stream, _ in work]
        for _, stream, _ in work:
            made.finish(stream)
        longest = [max(known, end - begun) for known, end in zip(longest, ends, strict=True)]
    return longest


CASES = [(8, 0, 1, 1e-5), (64, 2, 1, 5e-5), (8, 3, 2, 1e-5), (64, 1, 1, 1e-4)]


@pytest.mark.parametrize(("blocks", "remapped", "buffers", "compute_s"), CASES)
def test_passes_take_as_long_as_predicted(blocks: int, remapped: int, buffers: int, compute_s: float) -> None:
    layers = 8
    made, session, spec = opened("512MiB", layers, 64, 128)
    with session:
        tenant = session.attach_bytes(masters([LAYER] * layers), kv=spec)
        shown = tenant.kv.host.stream(tenant.kv.host.copy_out(tenant.kv.allocate(64)))[:blocks]
        if remapped:
            remap.advanced.remap(session, "model", layers=remapped, buffers=buffers)
        stream = made.create_stream()
        ends = []
        for _ in range(12):
            passes(made, [(tenant, stream, shown)], 1, compute_s)
            ends.append(made.now)
        seconds = max(late - early for early, late in itertools.pairwise(ends[-5:]))
        predicted = pass_seconds(
            [compute_s] * layers,
            [LAYER / RATE] * layers,
            tenant.streamed,
            max(1, internals(tenant).buffers),
            blocks * 2 * internals(tenant).kv.geometry.unit_bytes / RATE,
            layers,
            2,
        )
        assert seconds == pytest.approx(predicted, rel=1e-6)


# -- beside other tenants -----------------------------------------------------------------------------------------------

LAYERS = 32


def pair_of_tenants(slowdown: float) -> tuple[Any, remap.Session, list[remap.Tenant]]:
    """Two active tenants whose decode passes have been measured, in virtual time."""
    made, session, spec = opened("6GiB", LAYERS, 256, 1024)
    own, config = masters([LAYER // 4] * LAYERS), remap.Config(slowdown=slowdown)
    return made, session, [session.attach_bytes(own, kv=spec, name=name, config=config) for name in ("one", "two")]


@pytest.mark.parametrize(("slowdown", "share"), [(0.02, 0.1), (0.02, 1.0), (0.3, 0.5)])
def test_tenants_that_stream_keep_each_others_certificates(slowdown: float, share: float) -> None:
    made, session, (one, two) = pair_of_tenants(slowdown)
    with session:
        streams = [made.create_stream() for _ in range(2)]
        passes(made, [(one, streams[0], []), (two, streams[1], [])], 6)
        taken = int(share * one.kv.host.streamable_blocks)
        first = one.kv.host.stream(one.kv.host.copy_out(one.kv.allocate(250))[:taken])
        assert first
        session.deactivate("one")
        unhindered = two.kv.host.streamable_blocks
        session.activate("one")
        # What one copies keeps two waiting, and two may not keep one waiting for longer than one may.
        beside = two.kv.host.streamable_blocks
        assert beside < unhindered and (beside > 0 or share > 0.1)
        second = two.kv.host.stream(two.kv.host.copy_out(two.kv.allocate(250))[:beside])
        allowed = (1 + slowdown) * LAYERS * COMPUTE_S
        work = [(one, streams[0], first), (two, streams[1], second)]
        passes(made, work, 2)  # these wait for the copies out
        took = passes(made, work, 8)
        assert max(took) <= allowed * (1 + 1e-6)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_layers_stream_only_as_far_as_streamed_blocks_leave_time(share: float) -> None:
    made, session, (one, _) = pair_of_tenants(0.02)
    with session:
        session.detach("two")
        stream = made.create_stream()
        passes(made, [(one, stream, [])], 6)
        taken = int(share * one.kv.host.streamable_blocks)
        shown = one.kv.host.stream(one.kv.host.copy_out(one.kv.allocate(250))[:taken])
        for _ in range(20):
            one.kv.allocate(one.kv.free_blocks)
            session.step({"one": 200})
        passes(made, [(one, stream, shown)], 4)
        (took,) = passes(made, [(one, stream, shown)], 8)
        assert took <= 1.02 * LAYERS * COMPUTE_S * (1 + 1e-6)
        assert one.remapped > 0 or share == 1.0


def test_a_pass_and_a_copy_in_wait_for_the_copies_of_their_own_host_blocks_only() -> None:
    made, session, (one, _) = pair_of_tenants(0.02)
    with session:
        stream = made.create_stream()
        ids = one.kv.allocate(250)
        hosts = one.kv.host.copy_out(ids[:2])
        shown = one.kv.host.stream(hosts[:1])
        (quiet,) = passes(made, [(one, stream, shown)], 4)
        one.kv.host.copy_out(ids[2:242])
        begun = made.now
        ticket = one.kv.host.copy_in(hosts[1:], ids[249:])
        (beside,) = passes(made, [(one, stream, shown)], 1)
        assert beside <= quiet * (1 + 1e-6)
        assert one.kv.host.arrived(ticket)
        out_s = 240 * one.kv.spec.block_bytes / RATE
        assert made.now - begun < out_s  # those are still on their way
