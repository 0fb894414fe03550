"""Names of devices, options that belong to one of them, tensors over their memory, and the stream computed on by default."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from arena_worlds import PAGE

import remap
from remap import _core, nvtx
from remap.errors import InvalidArgument
from remap.memory import device as devices
from remap.memory.device import Device, DeviceName


@pytest.mark.parametrize(
    ("text", "name", "shown"),
    [
        ("cpu", DeviceName("cpu"), "cpu"),
        ("cuda", DeviceName("cuda", 0), "cuda:0"),
        ("cuda:0", DeviceName("cuda", 0), "cuda:0"),
        ("cuda:11", DeviceName("cuda", 11), "cuda:11"),
    ],
)
def test_names(text, name, shown):
    assert devices.parse(text) == name
    assert str(name) == shown


@pytest.mark.parametrize(
    "text",
    ["", "gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:1.0", "cuda: 1", "CUDA", "cpu:0", "cuda:0 ", 0, None, ["cpu"]],
)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(InvalidArgument) as caught:
        devices.parse(text)
    assert caught.value.device == text


def test_the_environment_names_the_default(monkeypatch):
    monkeypatch.delenv("REMAP_DEVICE", raising=False)
    assert devices.default_name() == "cpu"
    monkeypatch.setenv("REMAP_DEVICE", "")
    assert devices.default_name() == "cpu"
    monkeypatch.setenv("REMAP_DEVICE", "cuda:3")
    assert devices.default_name() == "cuda:3"
    monkeypatch.setenv("REMAP_DEVICE", "nonsense")
    with pytest.raises(InvalidArgument):
        remap.Session(PAGE, page_bytes=PAGE)
    monkeypatch.setenv("REMAP_DEVICE", "cpu")
    with remap.Session(PAGE, page_bytes=PAGE) as session:
        assert session.device == "cpu"


def test_the_environment_names_the_default_mode(monkeypatch):
    seen = []
    for given in (None, "", "strict"):
        if given is None:
            monkeypatch.delenv("REMAP_MODE", raising=False)
        else:
            monkeypatch.setenv("REMAP_MODE", given)
        with remap.Session(PAGE, "cpu", page_bytes=PAGE) as session:
            seen.append(session._arena.mode.name)
    assert seen == ["aliased", "aliased", "strict"]
    with remap.Session(PAGE, "cpu", page_bytes=PAGE, mode="aliased") as session:
        assert session._arena.mode.name == "aliased"
    monkeypatch.setenv("REMAP_MODE", "fast")
    with pytest.raises(InvalidArgument) as caught:
        remap.Session(PAGE, "cpu", page_bytes=PAGE)
    assert caught.value.fields == {"mode": "fast"}


@pytest.mark.parametrize(
    "option",
    [
        {"platform": remap.advanced.Platform(shareable="posix_fd")},
        {"platform": remap.advanced.Platform(gpu_direct_rdma=True)},
        {"host_budget": "1GiB"},
    ],
    ids=["shareable", "gpu_direct_rdma", "host_budget"],
)
def test_options_of_cuda_are_refused_on_the_cpu(option, request):
    with pytest.raises(InvalidArgument) as caught:
        remap.Session(PAGE, "cpu", page_bytes=PAGE, **option)
    assert caught.value.device == "cpu"
    assert request.node.callspec.id in str(caught.value)


def test_a_host_budget_of_nothing_makes_no_sense_anywhere():
    for device in ("cpu", "cuda:0"):
        with pytest.raises(InvalidArgument) as caught:
            remap.Session(PAGE, device, page_bytes=PAGE, host_budget=0)
        assert caught.value.fields == {"host_budget": 0}


def test_a_ready_backend_says_which_device_it_is(monkeypatch):
    monkeypatch.setenv("REMAP_DEVICE", "cuda:0")  # not asked: the backend is there already
    for device in (None, "cpu"):
        backend = _core.make_host_backend(PAGE, PAGE, 1)
        with remap.Session(PAGE, device, page_bytes=PAGE, platform=remap.advanced.Platform(backend=backend)) as session:
            assert session.device == "cpu"
    with pytest.raises(InvalidArgument) as caught:
        remap.Session(
            PAGE,
            "cuda",
            page_bytes=PAGE,
            platform=remap.advanced.Platform(backend=_core.make_host_backend(PAGE, PAGE, 1)),
        )
    assert caught.value.fields == {"device": "cuda", "backend": "cpu"}


# --- what only a GPU does, as far as it can be asked without one ------------------------------------------------------


def gpu(index=1):
    """The device of a backend whose memory the processor cannot reach."""
    return Device(SimpleNamespace(device_kind="cuda", device_index=index, host_addressable=False))


def test_where_tensors_and_models_go():
    assert gpu().torch_device == "cuda:1"
    assert Device(_core.make_host_backend(PAGE, PAGE, 1)).torch_device == "cpu"
    emulated = SimpleNamespace(device_kind="cuda", device_index=0, host_addressable=True)
    assert (Device(emulated).torch_device, str(Device(emulated).name)) == ("cpu", "cuda:0")


def test_the_default_stream_is_torchs_current_one_on_that_device(monkeypatch):
    asked = []

    def current_stream(index):
        asked.append(index)
        return SimpleNamespace(cuda_stream=0x1000 + index)

    ready = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, current_stream=current_stream))
    idle = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", ready)
    assert gpu(3).default_stream().cuda_stream == 0x1003
    assert asked == [3]
    monkeypatch.setitem(sys.modules, "torch", idle)
    assert gpu(3).default_stream() == 1
    monkeypatch.delitem(sys.modules, "torch")
    assert gpu(3).default_stream() == 1
    assert "torch" not in sys.modules  # asking has not loaded it


def test_where_the_processor_computes_there_is_no_default_stream():
    assert Device(_core.make_host_backend(PAGE, PAGE, 1)).default_stream() is None
    emulated = SimpleNamespace(device_kind="cuda", device_index=0, host_addressable=True)
    assert Device(emulated).default_stream() is None


# --- profiler ranges --------------------------------------------------------------------------------------------------


class Recorder:
    """A module of ranges that writes down what is called."""

    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def push_range(self, name):
        if self.error is not None:
            raise self.error
        self.calls.append(name)

    def pop_range(self):
        self.calls.append("pop")


def test_ranges_are_off_unless_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", Recorder())
    push, pop = nvtx.load(False)
    push("a")
    pop()
    assert sys.modules["nvtx"].calls == []

    def function():
        return 3

    assert nvtx.annotated("a")(function) is function  # as the module was imported here: without the variable


def test_ranges_go_to_the_first_library_that_works(monkeypatch):
    first, second = Recorder(), Recorder(RuntimeError("NVTX functions not installed"))
    monkeypatch.setitem(sys.modules, "nvtx", first)
    push, pop = nvtx.load(True)
    push("a")
    pop()
    assert first.calls[-2:] == ["a", "pop"]
    monkeypatch.setitem(sys.modules, "nvtx", second)  # and torch here has no CUDA, or is not there
    monkeypatch.setitem(sys.modules, "torch.cuda.nvtx", None)
    assert nvtx.load(True) == nvtx.load(False)


def test_a_range_ends_when_its_function_raises(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(nvtx, "push", recorder.push_range)
    monkeypatch.setattr(nvtx, "pop", recorder.pop_range)

    @nvtx.annotated("remap.test")
    def function(value):
        recorder.calls.append(value)
        raise KeyError(value)

    with pytest.raises(KeyError):
        function("inside")
    assert recorder.calls == ["remap.test", "inside", "pop"]


def test_a_session_marks_its_steps_and_passes():
    """In a process of its own: the library is chosen when the package is imported."""
    from subprocesses import expect_ok

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
""")
