"""Certificates of tenants that share the host link, against a simulation of such a link."""

from __future__ import annotations

import sys

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.link_des import Tenant, pass_ends
from remap.policy import schedule
from remap.policy.link import Neighbour, delayed, spared

PASSES = 30


@st.composite
def tenants(draw: st.DrawFn) -> Tenant:
    n = draw(st.integers(2, 8))
    top = draw(st.sampled_from([3, 20, 200]))
    compute = draw(st.lists(st.integers(1, top), min_size=n, max_size=n))
    transfer = draw(st.lists(st.integers(1, top * 3), min_size=n, max_size=n))
    streamed = sorted(draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n)))
    chunk = draw(st.sampled_from([0, 0, max(1, top // 20), 7 + top // 20, top]))  # few enough pieces to simulate each
    begins = draw(st.integers(0, 100))
    return Tenant(compute, transfer, streamed, draw(st.integers(1, 3)), "fixed", chunk=chunk, begins=begins)


def pieces(tenant: Tenant) -> list[int]:
    return [-(-copy // tenant.chunk) if tenant.chunk else 1 for copy in tenant.transfer]


def longest(tenant: Tenant) -> int:
    copies = [tenant.transfer[layer] for layer in tenant.streamed]
    return min(max(copies, default=0), tenant.chunk or sys.maxsize)


def neighbour(tenant: Tenant, others_s: float, allowed_s: float = 0.0) -> Neighbour:
    compute, copies = tuple(map(float, tenant.compute)), tuple(map(float, tenant.transfer))
    streamed = tuple(tenant.streamed)
    return Neighbour("x", compute, copies, tuple(pieces(tenant)), streamed, tenant.buffers, others_s, allowed_s)


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(tenants(), min_size=1, max_size=4))
def test_the_certificate_bounds_every_tenant_of_a_shared_link(machines: list[Tenant]) -> None:
    ends = pass_ends(machines, PASSES)
    for who, tenant in enumerate(machines):
        others = sum(longest(other) for at, other in enumerate(machines) if at != who)
        certificate = sum(tenant.compute) + neighbour(tenant, 0.0).stall(others)
        # The simulation begins with empty buffers, which costs a few copies once.
        start = (len(tenant.streamed) + 1) * (max(tenant.transfer) + max(pieces(tenant)) * others)
        measured = (ends[who][-1] - tenant.begins - start) / len(ends[who])
        assert measured <= certificate * (1 + 1e-9)


@settings(deadline=None, max_examples=examples(100))
@given(tenants())
def test_alone_it_is_the_exact_stall(tenant: Tenant) -> None:
    alone = schedule.stall(tenant.compute, tenant.transfer, tenant.streamed, tenant.buffers)
    assert neighbour(tenant, 0.0).stall(0.0) == alone
    assert delayed(tenant.transfer, pieces(tenant), 0.0) == tuple(tenant.transfer)


@settings(deadline=None, max_examples=examples(200))
@given(tenants(), st.integers(0, 50), st.integers(0, 200), st.integers(0, 200), st.integers(0, 400))
def test_growth_never_breaks_a_neighbours_certificate(
    tenant: Tenant, others_s: int, present: int, more: int, allowed: int
) -> None:
    beside = neighbour(tenant, others_s, allowed)
    before, after = beside.stall(present), beside.stall(more)
    if spared([beside], present, more):
        assert after <= max(allowed, before)
    else:
        assert more > present and after > allowed and after > before
    assert spared([], present, more)
