"""Detach and close when the model's own memory cannot be had: nothing is lost, and trying again finishes it."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

import remap
from remap.internals import internals

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import Rig, ids_for, logits_of, make  # noqa: E402

from remap import session as session_module  # noqa: E402
from remap.model import bind as modules  # noqa: E402


class FullOnce:
    """modules.restore on a device without room, the first time. Remembers which devices were asked for."""

    def __init__(self, monkeypatch):
        self.devices = []
        self.restore = modules.restore
        monkeypatch.setattr(modules, "restore", self)

    def __call__(self, *arguments, device=None, **named):
        self.devices.append(device)
        if len(self.devices) == 1:
            raise torch.OutOfMemoryError("no room")
        return self.restore(*arguments, device=device, **named)


@pytest.mark.parametrize("leave", ["detach", "close"])
@pytest.mark.parametrize("alpha", [0, 3])
def test_no_room_for_the_model(monkeypatch, alpha, leave):
    model = make("llama")
    ids = ids_for(2, 6)
    expected = logits_of(model, ids)
    with Rig(model) as rig:
        rig.remap(alpha)
        assert torch.equal(logits_of(model, ids), expected)
        rig.hooks.remove()
        full = FullOnce(monkeypatch)
        away = {"detach": lambda **how: rig.session.detach("m", **how), "close": rig.session.close}[leave]
        with pytest.raises(remap.OutOfMemory) as caught:
            away()
        assert caught.value.requested >= sum(p.numel() * p.element_size() for p in model.model.layers.parameters())
        assert caught.value.device == rig.session._device.torch_device
        assert "device='cpu'" in str(caught.value)
        # It is on its way out: what was deferred for it has been dropped, so it must not compute any more.
        for refused in (
            lambda: rig.tenant.forward().__enter__(),
            lambda: remap.advanced.remap(rig.session, "m", 1),
            lambda: rig.session.step({"m": remap.Demand(blocks=1)}),
        ):
            with pytest.raises(remap.InvalidState, match="detach"):
                refused()
        remap.advanced.check(rig.session)
        away(device="cpu")
        assert full.devices == [None, "cpu"]
        assert torch.equal(logits_of(model, ids), expected)
        if leave == "detach":
            assert rig.session.snapshot().pages.free == rig.session.snapshot().pages.total
            assert set(rig.session.snapshot().tenants) == set()


@pytest.mark.parametrize("room", [1 << 40, 1000])
def test_a_session_on_a_full_gpu_closes_with_its_models_on_the_cpu(monkeypatch, room):
    """Weights of more than half of a GPU have no room there a second time; whoever leaves a `with` has asked for nothing."""
    model = make("llama")
    ids = ids_for(2, 6)
    expected = logits_of(model, ids)
    with Rig(model) as rig:
        rig.remap(3)
        rig.hooks.remove()
        full = FullOnce(monkeypatch)
        monkeypatch.setattr(rig.session, "_device", SimpleNamespace(torch_device="cuda:7"))
        monkeypatch.setattr(session_module.devices, "machine_room", lambda: (room, "machine"))
        monkeypatch.setenv("REMAP_HOST_BUDGET", str(1 << 50))  # of page-locked memory: it says nothing here
        if room < 10_000:
            with pytest.raises(remap.OutOfMemory, match="device='cpu'"):
                rig.session.close()
            full.devices.clear()
            full.devices.append(None)
            rig.session.close(device="cpu")
        else:
            with pytest.warns(RuntimeWarning, match=r"'m', .* does not fit onto cuda:7 twice.*model.to\('cuda:7'\)"):
                rig.session.close()
        assert full.devices == [None, "cpu"] and rig.session.closed
        assert torch.equal(logits_of(model, ids), expected)


def test_a_tenant_that_has_left_holds_nothing(monkeypatch):
    """The caller still has it, and its KV cache: streams, events and host memory are gone all the same."""
    rig = Rig(make("opt"))
    rig.remap(3, 2)
    rig.hooks.remove()
    before = rig.session._backend.usage()
    rig.session.detach("m")
    after = rig.session._backend.usage()
    assert after["host_bytes"] == 0
    assert after["streams"] < before["streams"]
    assert after["events"] < before["events"]
    rig.session.close()
    assert set(rig.session._backend.usage().values()) == {0}
    assert rig.tenant.streaming is False
    with pytest.raises(remap.InvalidState):
        rig.tenant.wait(0)
    for gone in (internals(rig.tenant).stats, lambda: internals(rig.tenant).ready(0)):
        with pytest.raises(remap.InvalidState, match="was detached") as caught:
            gone()
        assert caught.value.fields["tenant"] == "m"


def test_a_tenant_keeps_its_session_while_it_is_attached():
    """Somebody may keep the model only, whose hooks keep the tenant: passes finish what a change has left all the same."""
    rig = Rig(make("llama"))
    rig.remap(2, 1)
    tenant, session = rig.tenant, weakref.ref(rig.session)
    del rig
    gc.collect()
    assert session() is not None
    tenant.kv.subscribe(lambda added, withdrawn: None)
    session().detach("m")
    gc.collect()
    assert session() is None and not internals(tenant).in_pass


@pytest.mark.parametrize("error", [None, KeyError])
def test_closing_inside_of_a_pass(error):
    rig = Rig(make("llama"))
    rig.hooks.remove()
    with pytest.raises(error or remap.InvalidState), rig.tenant.forward():
        rig.tenant.wait(0)
        rig.session.close()
        if error is not None:
            raise error
    assert set(rig.session._backend.usage().values()) == {0}


def test_memory_where_a_dropped_session_was_may_be_a_models(monkeypatch):
    from remap.model import source

    model = make("llama")
    tensors = [each for each in (*model.parameters(), *model.buffers()) if each.numel()]
    stale = [(each.data_ptr() - 64, each.data_ptr() + each.nbytes) for each in tensors]
    monkeypatch.setattr(source, "_INSTALLED", stale)
    ids = ids_for(2, 6)
    expected = logits_of(model, ids)
    with Rig(model):
        assert torch.equal(logits_of(model, ids), expected)
        with pytest.raises(remap.InvalidArgument, match="memory already"):
            Rig(model).__enter__()
