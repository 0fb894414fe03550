"""What an engine's author reads: the names of the package, of a tenant and of its KV cache; and names that have moved."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

import remap
from remap import advanced
from remap.kv.public import HostKV, KVCache

LAYERS = 4


@pytest.fixture
def tenant() -> Iterator[remap.Tenant]:
    with remap.Session("4MiB", device="cpu", page_bytes=4096) as session:
        spec = remap.KVSpec(
            layers=LAYERS, kv_heads=2, head_dim=8, block_tokens=4, dtype="float32", min_blocks=8, max_blocks=16
        )
        yield session.attach_bytes([bytes(4096)] * LAYERS, name="a", kv=spec)


def names(found: object) -> set[str]:
    return {name for name in dir(found) if not name.startswith("_")}


def test_the_packages_names() -> None:
    values = {"Config", "Demand", "KVSpec", "Snapshot", "StallShare", "StepReport", "TenantSnapshot"}
    errors = {
        *("ArenaBroken", "DriverError", "Error", "ForkedProcess", "InvalidArgument", "InvalidState", "LimitExceeded"),
        *("OutOfBlocks", "OutOfMemory", "StalePlan"),
    }
    assert set(remap.__all__) == {
        *values, *errors, "Session", "Tenant", "attach", "advanced", "schedule", "__version__",
    }  # fmt: skip


def test_a_tenant_has_twelve_names(tenant: remap.Tenant) -> None:
    attached = {"name", "priority", "layers", "kv"}
    passes = {"forward", "wait", "done", "active", "streaming"}
    assert names(tenant) == {*attached, *passes, "remapped", "streamed", "written"}


def test_a_kv_cache_has_twelve_names_and_so_has_its_host_memory(tenant: remap.Tenant) -> None:
    calls = {"allocate", "free", "subscribe", "returned"}
    numbers = {"usable_blocks", "free_blocks", "live_blocks", "max_blocks"}
    assert isinstance(tenant.kv, KVCache)
    assert names(tenant.kv) == {*calls, *numbers, "spec", "tensors", "memory", "host"}
    copies = {"copy_out", "copy_in", "arrived", "join", "kept", "free", "stream", "offer", "open"}
    assert isinstance(tenant.kv.host, HostKV)
    assert names(tenant.kv.host) == {*copies, "total", "free_blocks", "streamable_blocks"}


def test_a_name_that_has_moved_works_and_says_where_it_is(tenant: remap.Tenant) -> None:
    within = advanced.internals(tenant)
    for asked, name, place, now in (
        (tenant, "pinned", "remap.advanced.internals(tenant).pinned", within.pinned),
        (tenant, "stats", "remap.advanced.internals(tenant).stats", within.stats),
        (tenant.kv, "copy_out", "tenant.kv.host.copy_out", tenant.kv.host.copy_out),
        (tenant.kv, "free_host", "tenant.kv.host.free", tenant.kv.host.free),
        (tenant.kv, "address", "advanced.internals(tenant).kv.address", within.kv.address),
    ):
        with pytest.warns(DeprecationWarning, match="goes with the next release") as told:
            assert getattr(asked, name) == now
        assert place in str(told[0].message) and told[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"HostKV\.on_reclaim .* use offer") as told:
        tenant.kv.host.on_reclaim(pytest.fail, lambda: pytest.fail("nothing calls an engine"))
    assert told[0].filename == __file__ and tenant.kv.host.total > 0 and not within.kv.reclaims
    for asked in (tenant, tenant.kv, tenant.kv.host):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(AttributeError, match="nothing_of_the_kind"):
                asked.nothing_of_the_kind  # noqa: B018


def test_waiting_goes_by_the_same_function_wherever_it_is_asked_for(tenant: remap.Tenant) -> None:
    """The handle's `wait` and `done` are those of the hooks, also after they were exchanged."""
    within = advanced.internals(tenant)
    assert tenant.wait == within.wait and tenant.done == within.done
    within.expect_whole_pass()
    assert tenant.wait is within.wait
    within.retire()
    assert tenant.wait is within.wait and tenant.done is within.done
    with pytest.raises(remap.InvalidState):
        tenant.wait(0)
