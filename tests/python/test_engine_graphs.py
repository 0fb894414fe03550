"""CUDA graphs behind their interface: the order of calls, against stand-ins for torch's classes."""

from __future__ import annotations

import inspect
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from remap.engine.graphs import EagerGraphs, TorchCudaGraphs  # noqa: E402


@pytest.fixture
def log(monkeypatch):
    calls = []

    class Graph:
        def capture_begin(self, pool=None, capture_error_mode="global"):
            calls.append(("begin", pool, capture_error_mode))

        def capture_end(self):
            calls.append("end")

        def replay(self):
            calls.append("replay")

    @contextmanager
    def stream(entered):
        calls.append(("on", entered))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return calls


class Stream:
    def __init__(self, log):
        self.log = log

    def synchronize(self):
        self.log.append("synchronize")


def test_a_capture_warms_up_waits_and_records_in_the_shared_pool(log):
    stream = Stream(log)
    graphs = TorchCudaGraphs(stream)
    replays = [graphs.capture(lambda: log.append("piece")) for _ in range(2)]
    one = [("on", stream), "piece", "synchronize", ("begin", "pool", "thread_local"), "piece", "end"]
    assert log == one * 2
    log.clear()
    for replay in replays:
        replay()
    assert log == ["replay"] * 2


def test_a_capture_that_fails_is_ended_and_gives_nothing(log):
    pieces = iter([lambda: None, lambda: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        TorchCudaGraphs(Stream(log)).capture(lambda: next(pieces)())
    assert log[-1] == "end"
    log.clear()
    with pytest.raises(ZeroDivisionError):
        TorchCudaGraphs(Stream(log)).capture(lambda: 1 / 0)
    assert "end" not in log
    assert not any(call[0] == "begin" for call in log)


def test_torch_takes_these_arguments():
    parameters = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    assert {"pool", "capture_error_mode"} <= set(parameters)


def test_without_graphs_the_piece_itself_runs_again():
    runs = []
    replay = EagerGraphs().capture(lambda: runs.append(1))
    replay()
    assert len(runs) == 2
