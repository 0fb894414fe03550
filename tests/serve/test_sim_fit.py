"""Fitting a machine: constants that made the points come back, and what is not a measurement is refused."""

from __future__ import annotations

import copy
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from remap.errors import InvalidArgument, InvalidState
from remap.policy.hardware import Machine, Model, machine, model
from remap_serve.cli.fit import fit_command
from remap_serve.policy.least_squares import line, minimise
from remap_serve.sim import fit as fitting
from remap_serve.sim.fit import GROUPS, MOST_MISFIT, POOR_MISFIT, Misfit, fit
from remap_serve.sim.roofline import Roofline, prefill_pairs

pytest.importorskip("scipy", reason="curves are fitted with scipy, of the extra `sim`")

SHAPES = ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096), (8192, 8192))
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096)
ALIKE = 0.02


def shaped(heads: int, kv_heads: int, head_dim: int, hidden: int) -> Model:
    return replace(model("OPT-13b"), heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden)


def measured(of: Machine, noise: float = 0.0) -> dict[str, Any]:
    """What `python -m bench.lab machine` would write on that machine, by its own roofline."""
    rng = random.Random(3)
    roof = Roofline(of, shaped(32, 8, 128, 4096))
    constants = of.roofline
    other_s = constants.other_ops_s_per_token_per_khidden * 4096 / 1000
    sizes = [1 << power for power in range(18, 29)]

    def out_s(size: int) -> float:
        return of.copy_setup_s + size / of.d2h_bytes_per_s

    def decode_s(rows: int, context: int) -> float:
        return roof.layer_s(0, 0, rows, rows * context) - roof.layer_s(rows, 0, 0, 0) + constants.op_overhead_s

    def prefill_s(tokens: int) -> float:
        return roof.layer_s(tokens, prefill_pairs(tokens), 0, 0) - roof._linear[tokens]

    def both(size: int) -> dict[str, float]:
        return {"bytes": size, "h2d_seconds": of.copy_s(size) / of.duplex, "d2h_seconds": out_s(size) / of.duplex}

    def row(seconds: float, **named: int) -> dict[str, float]:
        return {**named, "seconds": seconds}

    groups = {
        "linear": [row(roof.op_s(k, n, t), k=k, n=n, tokens=t) for k, n in SHAPES for t in TOKENS],
        "h2d": [row(of.copy_s(size), bytes=size) for size in sizes],
        "d2h": [row(out_s(size), bytes=size) for size in sizes],
        "both_ways": [both(size) for size in sizes[-3:]],
        "decode_attention": [
            row(decode_s(rows, context), rows=rows, context=context, kv_heads=8, head_dim=128)
            for rows in (1, 8, 64)
            for context in (512, 2048)
        ],
        "prefill_attention": [row(prefill_s(t), tokens=t, heads=32, head_dim=128) for t in (512, 1024, 2048)],
        "other_ops": [row(constants.other_ops_s + other_s * t, tokens=t, hidden=4096) for t in (1, 64, 1024)],
    }
    for points in groups.values():
        for point in points:
            for name in point.keys() & {"seconds", "h2d_seconds", "d2h_seconds"}:
                point[name] *= 1 + noise * rng.uniform(-1, 1)
    figures = {
        "memory_bytes": of.hbm_bytes,
        "memory_bytes_per_s": of.hbm_bytes_per_s,
        "flops": of.flops,
        "link": of.link,
    }
    pages = {name: getattr(of, name) for name in ("create_page_s", "map_page_s", "set_access_s", "unmap_page_s")}
    about = {"kind": "remap machine", "version": 1, "dtype_bytes": 2, "about": {"device": "a made-up one"}}
    return {**about, **figures, **groups, "pages": pages}


@pytest.mark.parametrize("name", ["H100-SXM", "A100-80GB-SXM", "GH200-96GB", "RTX-4090"])
def test_constants_come_back_from_points_that_they_made(name: str) -> None:
    of = machine(name)
    found = fit(measured(of), "back")
    assert all(error < 0.01 for error in found.errors.values()), found.errors
    assert found.points["linear"] == len(SHAPES) * len(TOKENS)
    back = machine("back", found.document())
    for figure in (
        *("hbm_bytes", "h2d_bytes_per_s", "d2h_bytes_per_s", "duplex", "copy_setup_s", "create_page_s", "map_page_s"),
        *("set_access_s", "unmap_page_s", "hbm_bytes_per_s", "flops"),
    ):
        assert getattr(back, figure) == pytest.approx(getattr(of, figure), rel=ALIKE), figure
    for constant, value in vars(of.roofline).items():
        assert getattr(back.roofline, constant) == pytest.approx(value, rel=ALIKE), constant
    assert back.link == of.link
    assert back.sources["h2d_bytes_per_s"] == "L: measured by bench.lab machine on a made-up one"
    assert back.sources["iteration_gap_s"].startswith("A: not measured")
    layer = Roofline(back, model("Llama-3-8b")).layer_s(0, 0, 16, 16 * 512)
    assert layer == pytest.approx(Roofline(of, model("Llama-3-8b")).layer_s(0, 0, 16, 16 * 512), rel=0.01)


def test_operators_beyond_the_nominal_figures_raise_them() -> None:
    """A bandwidth measured too low must not give efficiencies above 1."""
    points = measured(machine("H100"))
    points["memory_bytes_per_s"] = points["flops"] = 1.0
    back = machine("b", fit(points, "b").document())
    assert back.roofline.eff_bw <= 1 and back.roofline.eff_flops <= 1
    assert back.hbm_bytes_per_s * back.roofline.eff_bw == pytest.approx(0.95 * 3350e9, rel=ALIKE)


def test_what_was_not_measured_comes_from_a_named_machine() -> None:
    of = machine("GH200")
    points = measured(of)
    for group in ("d2h", "both_ways", "decode_attention", "prefill_attention", "other_ops", "pages", "link"):
        del points[group]
    assert "--like" in str(refused("d2h", points, "x"))
    back = machine("x", fit(points, "x", like="gh200").document())
    assert back.d2h_bytes_per_s == of.d2h_bytes_per_s
    assert back.sources["d2h_bytes_per_s"] == "P: not measured, as GH200-96GB: Pie Fig 1"
    assert back.roofline.attn_decode_eff == of.roofline.attn_decode_eff
    assert "attn_decode_eff" in back.sources["roofline.eff_bw"]
    assert back.link == of.link
    assert refused("machine", points, "x", like="nobody").known


def refused(field: str, measurements: Any, name: Any = "x", **named: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        fit(measurements, name, **named)
    assert caught.value.field == field, str(caught.value)
    return caught.value


@pytest.mark.parametrize("group", GROUPS)
def test_malformed_groups_are_refused_by_name(group: str) -> None:
    points = measured(machine("H100"))
    for bad in ("text", {}, [3], [{}]):
        refused(group, {**points, group: bad})
    for value in (0, float("nan"), "1"):
        changed = copy.deepcopy(points)
        changed[group][1][GROUPS[group][-1]] = value
        refused(group, changed)


def test_other_bad_input_is_refused() -> None:
    points = measured(machine("H100"))
    for field in ("dtype_bytes", "memory_bytes", "memory_bytes_per_s", "flops"):
        refused(field, {**points, field: -1})
    refused("measurements", [])
    refused("name", points, "  ")
    refused("pages", {**points, "pages": 3})
    refused("map_page_s", {**points, "pages": {"map_page_s": 0}})
    refused("linear", {**points, "linear": points["linear"][:7]})
    refused("linear and h2d", {**points, "h2d": []}, like="H100")
    backwards = copy.deepcopy(points)
    for point, seconds in zip(backwards["h2d"], reversed([each["seconds"] for each in points["h2d"]]), strict=True):
        point["seconds"] = seconds
    refused("h2d", backwards)


def test_lines_and_minima() -> None:
    assert line([(x, 3 + 2 * x) for x in (0.0, 1.0, 5.0)]) == pytest.approx((3, 2))
    assert line([(1.0, 2.0), (2.0, 3.9)])[0] == pytest.approx(0.1)
    assert line([(1.0, 2.0), (2.0, 4.4)]) == (0.0, pytest.approx(2.1, rel=0.05))
    assert line([(4.0, 8.0)]) == (0.0, 2.0)
    # Squares of these leave the range of a float.
    assert line([(x * 1e200, (3 + 2 * x) * 1e-200) for x in (0.0, 1.0, 5.0)]) == pytest.approx((3e-200, 0.0), rel=1e-6)
    wide = [(-5.0, 5.0)] * 2
    found = minimise(lambda v: [10 * (v[1] - v[0] ** 2), 1 - v[0]], [(-1.2, 1.0)], wide)
    assert found == pytest.approx([1, 1], rel=1e-5)
    assert minimise(lambda v: [v[0] - 2, 0.0], [(0.0, 4.0)], wide) == pytest.approx([2, 4])
    outside = minimise(lambda v: [v[0] - 7], [(9.0,)], [(-5.0, 5.0)])
    assert outside == pytest.approx([5]), "within the bounds, from outside"


app = typer.Typer()
app.command()(fit_command)


def run_fit(folder: Path, name: str, text: str | None) -> Any:
    """Fit a machine "mine" to a file of that text, into mine.json."""
    if text is not None:
        (folder / name).write_text(text)
    return CliRunner().invoke(app, [str(folder / name), "--name", "mine", "--out", str(folder / "mine.json")])


def test_the_command_writes_a_table_that_the_others_read(tmp_path: Path) -> None:
    for name, text, said in (("bad.json", "{", "fitted"), ("bad.json", "[]", "fitted"), ("no.json", None, "be read")):
        done = run_fit(tmp_path, name, text)
        assert done.exit_code == 2 and said in done.output and not (tmp_path / "mine.json").exists()
    done = run_fit(tmp_path, "m.json", json.dumps(measured(machine("A100"))))
    assert done.exit_code == 0 and "linear" in done.output and "%" in done.output, done.output
    assert machine("mine", tmp_path / "mine.json").h2d_bytes_per_s == pytest.approx(25e9, rel=ALIKE)


def test_powers_of_seconds_that_leave_the_range_of_a_float() -> None:
    """A search for the power tried one at which seconds to that power are no float any more: OverflowError."""
    point = {"k": 1024.0, "n": 1024.0, "tokens": 1.0}
    slow = fitting._Linear(bandwidth=1e-3, flops=1e-3, p=64.0, overhead_s=0.5)
    assert slow.seconds(point, 2.0) == pytest.approx(2 * (1024 * 1024 + 2048) / 1e-3 + 0.5, rel=0.02)
    assert fitting._Linear(1e300, 1e300, 64.0, 0.5).seconds(point, 2.0) == pytest.approx(0.5)
    for scale in (1e-150, 1e150):
        points = [{**each, "seconds": each["seconds"] * scale} for each in measured(machine("H100"))["linear"]]
        fitting._fit_linear(points, 2.0)


def spread(points: dict[str, Any], factor: float, group: str = "linear") -> dict[str, Any]:
    """Every other point of a group took `factor` times as long: no machine of the model's form does that."""
    found = copy.deepcopy(points)
    for point in found[group][::2]:
        point["seconds"] *= factor
    return found


def test_a_fit_that_is_far_off_is_an_error_and_one_that_is_off_a_warning(tmp_path: Path) -> None:
    points = measured(machine("A100"))
    with pytest.raises(Misfit) as caught:
        fit(spread(points, 30.0), "far")
    assert caught.value.group == "linear" and caught.value.misfit > caught.value.limit == MOST_MISFIT
    assert caught.value.errors["linear"] == caught.value.misfit
    off = fit(spread(points, 1.8), "off")
    assert POOR_MISFIT < off.errors["linear"] < MOST_MISFIT and set(off.poor) == {"linear"}
    assert fit(points, "near").poor == {}
    # A table carries its misfit.
    assert machine("off", off.document()).misfit == off.errors and machine("A100").misfit == {}
    with pytest.raises(InvalidArgument) as wrong:
        machine("x", {"machines": {"x": {"like": "A100", "misfit": {"linear": "much"}}}})
    assert wrong.value.field == "x.misfit.linear"
    for factor, code, told in ((30.0, 1, "Misfit"), (1.8, 0, "warning")):
        done = run_fit(tmp_path, "m.json", json.dumps(spread(points, factor)))
        assert done.exit_code == code and told in done.output, done.output
        assert (tmp_path / "mine.json").exists() == (code == 0)


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(InvalidState) as caught:
        fit(measured(machine("H100")), "x")
    assert caught.value.extra == "sim"
