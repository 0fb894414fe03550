"""The layers of a tenant that has nothing in use come home, whatever the sizes of its layers, pages and pool."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

import remap

PAGE = 4096


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, str, int]:
    """Pages of a layer, of which there are six; bytes of a token's keys in a layer; layout; pages beside the weights."""
    layout = draw(st.sampled_from(["layer_major", "block_major"]))
    group = 12 if layout == "layer_major" else 1  # pages in which the pool grows
    pages = draw(st.integers(2, 40))
    return pages, draw(st.sampled_from([32, 64, 128])), layout, draw(st.integers(group, 3 * group))


@settings(max_examples=60, deadline=None)
@given(sizes())
@example((24, 64, "layer_major", 15))  # half a layer's blocks more than a layer's were never free
def test_an_idle_tenants_layers_come_home(case: tuple[int, int, str, int]) -> None:
    pages, head, layout, spare = case
    config = remap.advanced.Knobs(slowdown=1000, reserve_blocks=0, map_s=1e-9)
    with remap.Session((6 * pages + spare) * PAGE, device="cpu", page_bytes=PAGE, config=config) as session:
        kv = remap.KVSpec(
            layers=6, kv_heads=1, head_dim=head, block_tokens=1, dtype="uint8", layout=layout, min_blocks=1,
            max_blocks=100_000,
        )  # fmt: skip
        tenant = session.attach_bytes([bytes([n + 1]) * (pages * PAGE) for n in range(6)], name="one", kv=kv)

        def passes(count: int, demand: int = 0) -> None:
            for _ in range(count):
                with tenant.forward("decode", 1):
                    for layer in range(6):
                        tenant.wait(layer)
                        tenant.done(layer)
                session.step({"one": remap.Demand(demand)})

        passes(3)
        held = tenant.kv.allocate(tenant.kv.usable_blocks)
        passes(1, demand=8)
        grown = tenant.remapped
        held += tenant.kv.allocate(tenant.kv.usable_blocks - len(held))
        passes(3)
        tenant.kv.free(held)
        passes(60)
        assert tenant.remapped == 0, f"{grown} layers left"
        remap.advanced.check(session)
