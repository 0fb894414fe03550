"""`bench.lab machine` on the CPU: every group is measured and fits; wrong results and devices are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="the operators are torch's")

from bench.lab.commands import app  # noqa: E402
from bench.lab.machine import measure as bench  # noqa: E402
from bench.lab.machine.copies import backend_of, measure_copies, measure_pages  # noqa: E402
from bench.lab.machine.operators import Operators, flops_of  # noqa: E402

from remap.errors import DriverError, InvalidArgument, InvalidState, OutOfMemory  # noqa: E402
from remap.policy.hardware import machine  # noqa: E402
from remap_serve.sim.fit import GROUPS, PAGE_CALLS, fit  # noqa: E402

MIB = 1 << 20
OPERATORS = {"shapes": ((64, 96), (128, 64), (256, 256)), "tokens": (1, 16, 64), "decode": ((1, 64), (4, 256))}
SIZES = {"prefill": (32, 64), "other": (1, 32), "heads": 4, "head_dim": 16, "cache_bytes": MIB, "stream_bytes": 4 * MIB}
SMALL = replace(bench.CPU_QUICK, **OPERATORS, **SIZES, least_s=0.001)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CPU_QUICK", SMALL)
    monkeypatch.setattr(bench, "COPY_SIZES", {True: (1, 2, 4)})


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_every_group_is_measured_and_fits(small: None, dtype: str | None) -> None:
    told: list[str] = []
    found = bench.measure("cpu", quick=True, dtype=dtype, say=told.append)
    json.dumps(found, allow_nan=False)
    assert found["dtype"] == (dtype or "float32")
    assert found["dtype_bytes"] == (2 if dtype else 4)
    for group, names in GROUPS.items():
        assert found[group], group
        assert all(set(names) == set(point) and all(value > 0 for value in point.values()) for point in found[group])
    assert [(p["k"], p["n"], p["tokens"]) for p in found["linear"]] == [
        (k, n, t) for k, n in SMALL.shapes for t in SMALL.tokens
    ]
    assert [point["bytes"] for point in found["h2d"]] == [MIB, 2 * MIB, 4 * MIB]
    assert set(found["pages"]) == set(PAGE_CALLS)
    assert found["flops"] == flops_of(found["linear"])
    assert "cores" in found["about"] and "date" in found["about"]
    assert len(told) >= 6
    pytest.importorskip("scipy", reason="the fit needs it")
    # What an operator took, a busy machine decides; that it is in the form of a fit, it does not. So the times are made up.
    for point in found["linear"]:
        point["seconds"] = 1e-5 + point["k"] * point["n"] * (1 + point["tokens"] / 16) * 1e-9
    for group, size in {
        "decode_attention": lambda p: p["rows"] * p["context"],
        "prefill_attention": lambda p: p["tokens"] * (p["tokens"] + 1),
        "other_ops": lambda p: p["tokens"] * p["hidden"],
        "h2d": lambda p: p["bytes"],
        "d2h": lambda p: p["bytes"],
    }.items():
        for point in found[group]:
            point["seconds"] = 1e-5 + size(point) * 1e-9
    assert machine("here", fit(found, "here").document()).hbm_bytes == found["memory_bytes"]


def test_a_wrong_result_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    operators, functions = Operators("cpu", "float32", SMALL), torch.nn.functional
    for name, measured, said in (
        ("linear", operators.linear, "linear"),
        ("scaled_dot_product_attention", operators.decode_attention, "decode attention"),
        ("scaled_dot_product_attention", operators.prefill_attention, "prefill attention"),
        ("rms_norm", operators.other_ops, "norm"),
    ):
        real = getattr(functions, name)
        with monkeypatch.context() as patch:
            patch.setattr(functions, name, lambda *given, real=real, **named: real(*given, **named) + 1)
            with pytest.raises(DriverError, match=said):
                measured()


class Forgetful:
    """A backend that loses one byte of each copy to the host."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def copy(self, stream: Any, to: int, source: int, size: int) -> None:
        self.inner.copy(stream, to, source, size - 1)


def test_copies_are_verified_and_give_everything_back() -> None:
    backend = backend_of("cpu", 16 * MIB)
    assert set(measure_pages(backend, 8)) == set(PAGE_CALLS)
    with pytest.raises(OutOfMemory):
        measure_pages(backend, 9)
    for _ in range(5):  # 2 x 4 MiB of 16: more would not fit if anything stayed
        groups = measure_copies(backend, [MIB, 4 * MIB], repeats=3)
        assert [point["bytes"] for point in groups["d2h"]] == [MIB, 4 * MIB]
        assert all(point["seconds"] > 0 for point in (*groups["h2d"], *groups["d2h"]))
        assert all(point["h2d_seconds"] > 0 and point["d2h_seconds"] > 0 for point in groups["both_ways"])
    with pytest.raises(DriverError, match="different"):
        measure_copies(Forgetful(backend), [MIB], repeats=1)
    assert all(seconds > 0 for seconds in measure_pages(backend, 8).values())


def test_copies_and_driver_calls_of_a_cuda_device(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the emulated driver: the calls are right, and their times are not a GPU's."""
    monkeypatch.setenv("REMAP_LIBCUDA", emulated.path)
    backend = backend_of("cuda:0", 16 * MIB)
    groups = measure_copies(backend, [MIB, 3 * MIB], repeats=3)
    assert [point["bytes"] for point in groups["both_ways"]] == [MIB, 3 * MIB]
    assert set(measure_pages(backend, 4)) == set(PAGE_CALLS)
    assert emulated.pageable() == 0, "the copies were of page-locked memory"
    assert not {"pages", "mappings", "registrations", "streams", "events", "reservations"} & set(emulated.live())


def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument) as caught:
        bench.measure("cpu", quick=True, dtype="int8")
    assert caught.value.field == "dtype"
    with pytest.raises(InvalidArgument):
        bench.measure("gpu", quick=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidState, match="GPU"):
        bench.measure("cuda:0", quick=True)


def test_the_command_end_to_end(small: None, tmp_path: Path) -> None:
    out = tmp_path / "new" / "m.json"
    done = CliRunner().invoke(app, ["machine", "--out", str(out), "--quick", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert "remap fit" in done.output.replace("\n", " ")
    assert json.loads(out.read_text())["kind"] == "remap machine"
    done = CliRunner().invoke(app, ["machine", "--out", str(out), "--device", "tpu"])
    assert done.exit_code == 2 and "device must be" in done.output
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["machine", "--out", str(tmp_path / "file" / "m.json"), "--quick"])
    assert done.exit_code == 2 and "cannot be written" in done.output
    with pytest.raises(InvalidArgument) as caught:  # a folder that vanished while it was measured
        bench.write(tmp_path / "file" / "m.json", {})
    assert caught.value.field == "out"
