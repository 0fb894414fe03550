"""Names of devices, options that belong to one of them, tensors over their memory, and the stream computed on by default."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from arena_worlds import PAGE
from subprocesses import expect_ok

import remap
from remap import _core, nvtx
from remap.errors import InvalidArgument
from remap.memory import device as devices
from remap.memory.device import Device, DeviceName


def test_names():
    names = {text: devices.parse(text) for text in ("cpu", "cuda", "cuda:0", "cuda:11")}
    assert list(names.values()) == [DeviceName("cpu"), *(DeviceName("cuda", index) for index in (0, 0, 11))]
    assert list(map(str, names.values())) == ["cpu", "cuda:0", "cuda:0", "cuda:11"]
    for text in ("", "gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:1.0", "cuda: 1", "CUDA", "cpu:0", "cuda:0 ", 0, None):
        with pytest.raises(InvalidArgument) as caught:
            devices.parse(text)
        assert caught.value.device == text


def test_the_environment_names_the_defaults(monkeypatch):
    monkeypatch.delenv("REMAP_DEVICE", raising=False)
    monkeypatch.delenv("REMAP_MODE", raising=False)
    seen = [devices.default_name()]
    for given in ("", "cuda:3", "cpu"):
        monkeypatch.setenv("REMAP_DEVICE", given)
        seen.append(devices.default_name())
    assert seen == ["cpu", "cpu", "cuda:3", "cpu"]
    modes = (
        (None, None, "aliased"),
        ("", None, "aliased"),
        ("strict", None, "strict"),
        ("strict", "aliased", "aliased"),
    )
    for given, asked, mode in modes:
        if given is not None:
            monkeypatch.setenv("REMAP_MODE", given)
        with remap.Session(PAGE, page_bytes=PAGE, mode=asked) as session:
            assert (session.device, session._arena.mode.name) == ("cpu", mode)
    for name, field, wrong in (("REMAP_MODE", "mode", "fast"), ("REMAP_DEVICE", "device", "nonsense")):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(InvalidArgument) as caught:
            remap.Session(PAGE, page_bytes=PAGE)
        assert caught.value.fields == {field: wrong}
        monkeypatch.delenv(name)


READY = remap.advanced.Platform(backend=_core.make_host_backend(PAGE, PAGE, 1))


@pytest.mark.parametrize(
    ("device", "options", "fields", "word"),
    [
        ("cpu", {"platform": remap.advanced.Platform(shareable="posix_fd")}, {"device": "cpu"}, "shareable"),
        ("cpu", {"platform": remap.advanced.Platform(gpu_direct_rdma=True)}, {"device": "cpu"}, "gpu_direct_rdma"),
        ("cpu", {"host_budget": "1GiB"}, {"device": "cpu"}, "host_budget"),
        ("cuda:0", {"host_budget": 0}, {"host_budget": 0}, ""),
        ("cuda", {"platform": READY}, {"device": "cuda", "backend": "cpu"}, ""),
    ],
    ids=["shareable", "gpu_direct_rdma", "host_budget", "nothing", "other backend"],
)
def test_options_that_a_device_does_not_have_are_refused(device, options, fields, word):
    with pytest.raises(InvalidArgument, match=word or None) as caught:
        remap.Session(PAGE, device, page_bytes=PAGE, **options)
    assert fields.items() <= caught.value.fields.items()


def test_a_ready_backend_says_which_device_it_is(monkeypatch):
    monkeypatch.setenv("REMAP_DEVICE", "cuda:0")  # not asked: the backend is there already
    for device in (None, "cpu"):
        platform = remap.advanced.Platform(backend=_core.make_host_backend(PAGE, PAGE, 1))
        with remap.Session(PAGE, device, page_bytes=PAGE, platform=platform) as session:
            assert session.device == "cpu"


# --- what only a GPU does, as far as it can be asked without one ------------------------------------------------------


def gpu(index=1, *, emulated=False):
    """The device of a backend whose memory the processor cannot reach, unless the device is emulated."""
    return Device(SimpleNamespace(device_kind="cuda", device_index=index, host_addressable=emulated))


def test_where_tensors_and_models_go():
    host = Device(_core.make_host_backend(PAGE, PAGE, 1))
    assert [each.torch_device for each in (gpu(), gpu(0, emulated=True), host)] == ["cuda:1", "cpu", "cpu"]
    assert host.default_stream() is gpu(0, emulated=True).default_stream() is None  # the processor computes


def test_the_default_stream_is_torchs_current_one_on_that_device(monkeypatch):
    streams = {3: SimpleNamespace(cuda_stream=0x1003)}
    ready = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, current_stream=streams.get))
    idle = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
    for torch, stream in ((ready, SimpleNamespace(cuda_stream=0x1003)), (idle, 1)):
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert gpu(3).default_stream() == stream
    monkeypatch.delitem(sys.modules, "torch")
    assert gpu(3).default_stream() == 1
    assert "torch" not in sys.modules  # asking has not loaded it


# --- profiler ranges --------------------------------------------------------------------------------------------------


def test_ranges_go_to_the_first_library_that_works_if_they_are_asked_for(monkeypatch):
    calls = []

    def broken(name):
        raise RuntimeError("NVTX functions not installed")

    working = SimpleNamespace(push_range=calls.append, pop_range=lambda: calls.append("pop"))
    monkeypatch.setitem(sys.modules, "nvtx", working)
    for asked in (False, True):
        assert calls == []
        push, pop = nvtx.load(asked)
        push("a")
        pop()
    assert calls[-2:] == ["a", "pop"]
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(push_range=broken, pop_range=None))
    monkeypatch.setitem(sys.modules, "torch.cuda.nvtx", None)  # torch here has no CUDA, or is not there
    assert nvtx.load(True) == nvtx.load(False)


def test_a_session_marks_its_steps_and_passes():
    """In a process of its own: the library is chosen when the package is imported."""
    expect_ok("""
import os, sys, types
calls = []
recorder = types.ModuleType("nvtx")
recorder.push_range = calls.append
recorder.pop_range = lambda: calls.append("pop")
sys.modules["nvtx"] = recorder
os.environ["REMAP_NVTX"] = "1"
import remap
from arena_worlds import PAGE, forward, make_layers, make_spec

layers = make_layers([2] * 4)
with remap.Session(30 * PAGE, page_bytes=PAGE) as session:
    tenant = session.attach_bytes(layers, name="m", kv=make_spec(4, max_blocks=200))
    calls.clear()
    session.step({"m": remap.Demand(blocks=40)})
    assert calls[0] == "remap.step" and calls[-1] == "pop", calls
    assert calls.count("remap.apply") == calls.count("remap.settle") > 0, calls
    calls.clear()
    forward(session, tenant, layers)
    assert calls == ["remap.pass", "pop"], calls
    calls.clear()
    try:
        with tenant.forward():
            raise KeyError
    except KeyError:
        pass
    assert calls == ["remap.pass", "pop"], calls
    calls.clear()
    try:
        session.step({"nobody": remap.Demand(blocks=1)})
    except remap.InvalidArgument:
        pass
    assert calls == ["remap.step", "pop"], calls
""")
