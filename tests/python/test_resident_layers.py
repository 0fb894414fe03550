"""Models that are larger than their session: layers without pages of their own stream for good."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
from arena_worlds import PAGE, forward, make_backend, make_layers, make_spec, session_on
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing_worlds import attempt

import remap
from remap import _core
from remap.errors import InvalidArgument, InvalidState, OutOfMemory

MODES = pytest.mark.parametrize("mode", ["aliased", "strict"])
SIZES = [3, 2, 3, 1, 2, 3, 2, 3]


def session_of(pages: int, mode: str = "aliased", **settings) -> remap.Session:
    return remap.Session(pages * PAGE, page_bytes=PAGE, mode=mode, **settings)


def attached(session: remap.Session, sizes: list[int], resident: int | None, name: str = "m", tag: int = 0, **spec):
    layers = make_layers(sizes, tag)
    tenant = session.attach_bytes(layers, name=name, kv=make_spec(len(sizes), **spec), resident_layers=resident)
    return layers, tenant


@MODES
@given(
    sizes=st.lists(st.integers(1, 4), min_size=3, max_size=9),
    resident=st.integers(0, 6),
    buffers=st.sampled_from([1, 2, "auto"]),
    data=st.data(),
)
@settings(max_examples=examples(40), deadline=None)
def test_every_pass_reads_every_layers_own_bytes(mode, sizes, resident, buffers, data) -> None:
    ring = 2 if buffers == "auto" else buffers
    resident = min(resident, len(sizes) - ring - 1)
    if resident < 0:
        return
    spec = make_spec(len(sizes), min_blocks=2, max_blocks=64)
    kv_pages = -(-64 * spec.block_bytes // PAGE)
    capacity = sum(sorted(sizes)[::-1][:resident]) + ring * max(sizes) + kv_pages
    with session_of(capacity, mode, config=remap.advanced.Knobs(buffers=buffers)) as session:
        layers = make_layers(sizes, 5)
        tenant = session.attach_bytes(layers, name="m", kv=spec, resident_layers=resident)
        assert len(tenant.streamed) == len(sizes) - resident and tenant.remapped == 0
        for _ in range(data.draw(st.integers(1, 4))):
            forward(session, tenant, layers)
            if data.draw(st.booleans()):
                session.step({"m": data.draw(st.integers(0, 80))})
            if data.draw(st.booleans()):
                session.deactivate("m")
                session.activate("m")
            remap.advanced.check(session)
        pages = session.snapshot().tenants["m"]
        assert pages.streamed == tenant.streamed and tenant.remapped == 0
        session.detach("m")
        assert session.snapshot().pages.free == capacity


@MODES
def test_beside_other_tenants_its_pages_stay(mode: str) -> None:
    """A tenant with much demand takes what others can give, and nothing of one whose layers stream for good."""
    with session_of(40, mode, config=remap.advanced.Knobs(slowdown=1e6, dwell=1)) as session:
        layers, tenant = attached(session, SIZES, 2)
        others, other = attached(session, [3, 3, 3, 3], None, "other", 9, min_blocks=2, max_blocks=200)
        streamed = tenant.streamed
        for active in (True, False, True):
            (session.activate if active else session.deactivate)("m")
            for _ in range(5):
                forward(session, other, others)
                session.step({"other": 150})
            assert other.remapped > 0
            assert (tenant.streamed, tenant.remapped) == (streamed, 0)
            remap.advanced.check(session)
        forward(session, tenant, layers)


@pytest.mark.parametrize("wrong", [-1, True, "2", 2.0, 6, 7])
def test_numbers_that_cannot_be_are_refused(wrong: object) -> None:
    with session_of(60) as session:
        with pytest.raises(InvalidArgument) as caught:
            attached(session, SIZES, wrong)
        fields = caught.value.fields
        assert fields["layers"] == 8 if wrong in (6, 7) else fields["field"] == "resident_layers"
        assert session.snapshot().pages.free == 60
        for resident in (5, 8):  # 8: as without
            assert len(attached(session, SIZES, resident)[1].streamed) == 8 - resident
            session.detach("m")


def test_what_streams_for_good_changes_by_nobodys_hand() -> None:
    with session_of(12) as session:
        with pytest.raises(OutOfMemory, match="resident_layers"):  # the error names the way out
            attached(session, SIZES, None)
        layers, tenant = attached(session, SIZES, 0)
        forward(session, tenant, layers)
        streamed = tenant.streamed
        for amount, selection in itertools.product((0, 1, 3), ("uniform", "nested", "slices")):
            with pytest.raises((InvalidState, InvalidArgument)):
                remap.advanced.remap(session, "m", amount, 1, selection)
        with pytest.raises((InvalidState, InvalidArgument)):
            remap.advanced.lend(session, "m", 1)
        assert tenant.streamed == streamed
        forward(session, tenant, layers)


@pytest.mark.parametrize(("mode", "forever"), [("aliased", True), ("strict", False), ("strict", True)])
def test_attaching_fails_whole(mode: str, forever: bool) -> None:
    """Every backend call of the attachment fails in turn."""
    for nth in itertools.count(1):
        fault = _core.make_fault_backend(make_backend(40 * PAGE))
        with session_on(fault, 40 * PAGE, mode=mode) as session:
            last = fault.calls() + nth
            fault.arm_any(nth, forever, _core.ErrorKind.driver)
            error = attempt(partial(attached, session, SIZES, 2))
            reached = fault.calls() >= last
            fault.disarm()
            if isinstance(error, remap.errors.ArenaBroken):  # undoing it failed too
                assert forever
                continue
            if error is not None:
                assert isinstance(error, remap.errors.DriverError) and session.snapshot().pages.free == 40
                attached(session, SIZES, 2)
            forward(session, session.tenants["m"], make_layers(SIZES))
            remap.advanced.check(session)
        if not reached:
            return


def test_a_larger_model_generates_the_same_tokens_and_comes_back_whole() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from attached_models import llama, prompts

    model, given = llama(layers=8), prompts(2, 9)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}

    def generated() -> Any:
        with torch.inference_mode():
            return model.generate(**given, max_new_tokens=12, do_sample=False)

    def is_whole() -> bool:
        same = all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
        return same and torch.equal(generated(), expected)

    expected = generated()
    weights = sum(value.numel() * value.element_size() for value in wanted.values())
    spec = remap.KVSpec(layers=8, kv_heads=2, head_dim=16, block_tokens=4, min_blocks=1, max_blocks=8, dtype="float32")
    capacity = int(0.6 * weights) // 4096 * 4096
    with remap.Session(capacity, page_bytes=4096) as session:
        with pytest.raises(OutOfMemory):
            session.attach(model, kv=spec)
        tenant = session.attach(model, kv=spec, resident_layers=1)
        assert len(tenant.streamed) == 7
        assert torch.equal(generated(), expected) and is_whole()
        session.detach("model")
        assert is_whole()
