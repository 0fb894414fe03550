"""Memory: never more than the capacity as the driver counts it, all of it given back, and registered ranges left alone."""

from __future__ import annotations

from typing import Any

import pytest
from bench.gpu.machine import gpu_state
from bench.gpu.tenants import device_tenant

import remap
from remap.internals import internals

LAYERS = 8
LAYER_BYTES = 4 << 20
# What the driver may take for page tables and the like beside an arena: it is not said how much.
SLACK = 32 << 20


def _used(context: Any) -> int:
    with context.driver as driver:
        free, total = driver.memory()
    return int(total - free)


def _warm(context: Any) -> None:
    """A session once: what the context keeps for good is not the next one's."""
    with device_tenant(context, 2, 2 << 20) as (tenant, marks):
        tenant.verify(marks)


def test_the_driver_counts_no_more_than_the_capacity(context: Any) -> None:
    _warm(context)
    before = _used(context)
    # On a GPU large enough for the slack to be small beside it.
    layer_bytes, slack = (LAYER_BYTES, 0) if context.emulated else (64 << 20, SLACK)
    with device_tenant(context, LAYERS, layer_bytes) as (tenant, marks):
        for alpha, buffers in ((0, 1), (3, 1), (6, 2), (1, 1), (0, 1)):
            remap.advanced.remap(tenant.session, "raw", alpha, buffers)
            tenant.run()
            assert 0 < _used(context) - before <= tenant.capacity + slack
            remap.advanced.settle(tenant.session)
            tenant.verify(marks)
            assert 0 < _used(context) - before <= tenant.capacity + slack


def test_closing_gives_all_memory_back(context: Any) -> None:
    _warm(context)
    before = _used(context)
    for _ in range(3):
        with device_tenant(context, LAYERS, LAYER_BYTES) as (tenant, _):
            remap.advanced.remap(tenant.session, "raw", 5, 2)
            tenant.run()  # nobody waits for it: close() does
        assert tenant.session.closed
        assert abs(_used(context) - before) <= (0 if context.emulated else SLACK)
        assert set(tenant.backend.usage().values()) == {0}


def test_torchs_memory_is_not_touched(real_gpu: Any, context: Any) -> None:
    import torch

    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with device_tenant(context, LAYERS, LAYER_BYTES) as (tenant, marks):
        tenant.remap(4)
        tenant.verify(marks)
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (allocated, reserved)


def test_nvidia_smi_sees_the_capacity_and_no_more(real_gpu: Any, context: Any) -> None:
    before = gpu_state(context.probe["pcie"]).get("memory_used_mib")
    if not isinstance(before, float):
        pytest.skip("nvidia-smi does not say how much memory is used")
    with device_tenant(context, LAYERS, 64 << 20) as (tenant, marks):
        tenant.remap(4)
        tenant.verify(marks)
        after = gpu_state(context.probe["pcie"])["memory_used_mib"]
        assert tenant.capacity / 2**20 - 2 <= after - before <= (tenant.capacity + SLACK) / 2**20


def test_a_registered_layer_stays_where_it_is(raw: Any) -> None:
    tenant, marks = raw
    session = tenant.session

    def address(layer: int) -> int:
        return remap.advanced.layer_address(session, "raw", layer)

    remap.advanced.declare_registered(session, address(2), LAYER_BYTES)
    assert internals(tenant.tenant).pinned == (2,)
    remap.advanced.remap(session, "raw", 5, 2)
    assert 2 not in tenant.tenant.streamed
    with pytest.raises(remap.InvalidArgument):
        remap.advanced.remap(session, "raw", 6, 2)  # that would take all eight
    tenant.verify(marks)
    with pytest.raises(remap.InvalidState):
        session.detach("raw")
    remap.advanced.withdraw_registered(session, address(2), LAYER_BYTES)
    with pytest.raises(remap.InvalidState):  # a streamed one cannot be
        remap.advanced.declare_registered(session, address(tenant.tenant.streamed[0]), 1)
    assert internals(tenant.tenant).pinned == ()
    remap.advanced.remap(session, "raw", 0)
