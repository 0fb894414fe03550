"""CUDA graphs behind their interface: the order of calls, against stand-ins for torch's classes."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from remap_serve.engine.graphs import EagerGraphs, TorchCudaGraphs  # noqa: E402


@pytest.fixture
def log(monkeypatch):
    calls, real = [], inspect.signature(torch.cuda.CUDAGraph.capture_begin)

    def graph():
        return SimpleNamespace(
            capture_begin=lambda **arguments: calls.append(real.bind(None, **arguments) and arguments),
            capture_end=lambda: calls.append("end"),
            replay=lambda: calls.append("replay"),
        )

    @contextmanager
    def stream(entered):
        calls.append(("on", entered))
        yield

    for name, stand_in in (("CUDAGraph", graph), ("graph_pool_handle", lambda: "pool"), ("stream", stream)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return calls


def test_a_capture_warms_up_waits_and_records_in_the_shared_pool(log):
    stream = SimpleNamespace(synchronize=lambda: log.append("synchronize"))
    graphs = TorchCudaGraphs(stream)
    replays = [graphs.capture(lambda: log.append("piece")) for _ in range(2)]
    recorded = {"pool": "pool", "capture_error_mode": "thread_local"}
    assert log == [("on", stream), "piece", "synchronize", recorded, "piece", "end"] * 2
    log.clear()
    for replay in replays:
        replay()
    assert log == ["replay"] * 2


@pytest.mark.parametrize("good_runs", [1, 0])
def test_a_capture_that_fails_is_ended_and_gives_nothing(log, good_runs):
    pieces = iter([lambda: None] * good_runs + [lambda: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        TorchCudaGraphs(SimpleNamespace(synchronize=lambda: None)).capture(lambda: next(pieces)())
    assert (log[-1] == "end") == any(isinstance(call, dict) for call in log) == bool(good_runs)


def test_without_graphs_the_piece_itself_runs_again():
    runs = []
    replay = EagerGraphs().capture(lambda: runs.append(1))
    replay()
    assert len(runs) == 2
