"""The tables of machines and models: what is in them, how names are looked up, and what a user's own table may do."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from remap.errors import InvalidArgument
from remap.policy._tables import table_of
from remap.policy.hardware import Machine, machine, model, namesakes

MACHINES = (
    *("GH200-96GB", "GB200", "B200", "H100-SXM", "H100-PCIe", "H200-SXM", "A100-80GB-SXM", "A800-80GB", "H800-80GB"),
    *("RTX-4090", "L40S", "MI300X"),
)
# Totals of the published checkpoints, which the layers and the rest must add up to.
PARAMETERS = {
    "OPT-6.7b": 6_658_473_984, "OPT-13b": 12_853_473_280, "OPT-30b": 29_974_540_288, "OPT-66b": 65_719_701_504,
    "Llama-2-7b": 6_738_415_616, "Llama-2-13b": 13_015_864_320, "Llama-2-70b": 68_976_648_192,
    "Llama-3-8b": 8_030_261_248, "Llama-3.1-70B": 70_553_706_496,
    "Mistral-7B-v0.3": 7_248_023_552, "Mixtral-8x7B": 46_702_792_704,
    "Qwen2.5-14B": 14_770_033_664, "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360, "Qwen3-14B": 14_768_307_200, "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624, "Qwen3-235B-A22B": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672, "DeepSeek-V3": 671_026_404_352,
}  # fmt: skip


NAN = math.nan


def refused(field: str, call: Any, *arguments: Any, **named: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        call(*arguments, **named)
    assert caught.value.field == field, str(caught.value)
    return caught.value


def test_the_tables_hold_what_they_are_known_for() -> None:
    assert tuple(table_of("machines", None)) == MACHINES
    assert set(table_of("models", None)) == set(PARAMETERS)
    gh200 = machine("GH200-96GB")
    assert gh200.hbm_bytes == 97871 << 20
    assert (gh200.h2d_bytes_per_s, gh200.d2h_bytes_per_s) == (419e9, 371e9)
    assert gh200.ratio == pytest.approx(9.547, abs=1e-3)
    assert gh200.copy_s(41_900_000_000, copies=10) == pytest.approx(0.1 + 10 * gh200.copy_setup_s)


@pytest.mark.parametrize("name", MACHINES)
def test_every_figure_of_a_machine_has_a_source_and_a_grade(name: str) -> None:
    found = machine(name)
    figures = {f.name for f in dataclasses.fields(Machine)} - {"name", "link", "roofline", "sources", "misfit"}
    constants = {f"roofline.{f.name}" for f in dataclasses.fields(type(found.roofline))}
    assert set(found.sources) == figures | constants
    for source in found.sources.values():
        grade, _, text = source.partition(": ")
        assert grade in "PSLDVA" and len(text) > 3
    for thing in (found, model("Mixtral")):  # can be hashed, copied and sent to another process
        assert pickle.loads(pickle.dumps(thing)) == thing == copy.deepcopy(thing)
        assert hash(thing) == hash(copy.deepcopy(thing))


def test_grades_are_explained_and_entries_have_sources() -> None:
    for kind in ("machines", "models"):
        table = json.loads((resources.files("remap.policy") / "tables" / f"{kind}.json").read_text(encoding="utf-8"))
        for entry in table[kind].values():
            of_machine = kind == "machines" and [*entry["figures"].values(), *entry["also"].values(), entry["roofline"]]
            assert all(part["grade"] in table["grades"] and part["source"] for part in of_machine or [entry])


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_a_models_bytes_are_those_of_its_checkpoint(name: str, parameters: int) -> None:
    found, dense = model(name), 0
    experts = sum(k * n * found.experts for op, k, n in found.linear_ops if op in found.expert_ops)
    others = sum(k * n for op, k, n in found.linear_ops if op not in found.expert_ops)
    small = 2 - found.matrix_bytes  # what an element of a matrix takes less than of all else
    if found.dense_layers:  # and their norms and the last one, all in the matrices' dtype
        dense = found.resident_bytes - 2 * (2 * found.vocab * found.hidden)
        assert dense == 3 * (187_105_280 + 3 * 7168 * 18432 + 2 * 7168 + 1536 + 512) + 7168
    saved = found.layers * (others * small + experts * (2 - found.expert_bytes)) + dense * small
    assert found.weight_bytes + saved == parameters * found.dtype_bytes
    rest = found.layer_bytes - others * found.matrix_bytes - experts * found.expert_bytes
    assert 0 < rest < 0.002 * found.layer_bytes + 200_000
    assert found.head == (found.hidden, found.vocab)


def test_published_sizes_of_checkpoints_and_latents() -> None:
    assert model("gpt-oss-20b").weight_bytes == pytest.approx(12.8 * 2**30, rel=0.005)  # as the model card has them
    assert model("gpt-oss-120b").weight_bytes == pytest.approx(60.8 * 2**30, rel=0.005)
    latent = model("DeepSeek-V3")
    assert latent.kv_bytes_per_token == 576 * 2 * 61
    assert latent.layers + latent.dense_layers == 61


def test_kv_bytes_are_the_published_ones() -> None:
    assert model("OPT-13b").kv_bytes_per_token == 800 << 10  # Pie
    assert model("Qwen2.5-14B").kv_bytes_per_token == 192 << 10  # KunServe
    assert model("OPT-30b").kv_bytes_per_token * 16 * 1024 == 21 << 30  # HybridServe, figure 3b: batch 16 x 1024
    assert model("Llama-3-8b").layer_bytes // model("Llama-3-8b").kv_bytes_per_token == 3328


def test_machines_are_found_by_alias_and_by_a_unique_beginning() -> None:
    asked = {"h200": "H200-SXM", "GH200": "GH200-96GB", "a100": "A100-80GB-SXM", "H100": "H100-SXM", "4090": "RTX-4090"}
    asked |= {" gh200-96gb ": "GH200-96GB", "mi300": "MI300X", "h100-p": "H100-PCIe"}
    assert {name: machine(name).name for name in asked} == asked
    assert (model("LLAMA-3-8B").name, model("opt-6").name) == ("Llama-3-8b", "OPT-6.7b")
    assert namesakes("H100") == ("H100-PCIe",) == namesakes(" h100 ")  # a name that could mean another machine
    for clear in ("H100-SXM", "H100-PCIe", "h100-p", "H200", "B200", "GH200", "4090"):
        assert namesakes(clear) == (), clear


@pytest.mark.parametrize(
    ("kind", "written", "candidates"),
    [
        *(("machine", "H100-SMX", ("H100-SXM",)), ("machine", "gh200_96gb", ("GH200-96GB",))),
        *(("model", "lama-3-8b", ("Llama-3-8b",)), ("model", "llama-3", ("Llama-3-8b", "Llama-3.1-70B"))),
        # A10, H20 and L4 are machines of their own: they were answered for by the A100, the H200 and the L40S.
        *(("machine", name, ()) for name in ("A10", "H20", "L4", "mi3", "H900", "", None, 3)),
        *(("model", name, ()) for name in ("zzzz", "llama-9", "qwen2.5-7", "opt-1")),
    ],
)
def test_unknown_names_list_the_known_ones_and_those_that_are_near(kind, written, candidates) -> None:
    error = refused(kind, {"machine": machine, "model": model}[kind], written)
    assert error.candidates[: len(candidates)] == candidates and all(near in str(error) for near in candidates)
    assert set(error.known) == set(MACHINES if kind == "machine" else PARAMETERS)
    assert written not in ("H900", "llama-9") or all(name in str(error) for name in error.known)
    assert written != "zzzz" or error.candidates == ()


def test_a_users_table_adds_and_overrides(tmp_path: Path) -> None:
    measured = {"value": 4e10, "source": "measured", "grade": "L"}
    table = {
        "machines": {
            "my-box": {"aliases": ["Mine"], "like": "H100", "figures": {"h2d_bytes_per_s": measured}},
            "gh200-96gb": {"figures": {"h2d_bytes_per_s": 3.46e11}, "roofline": {"attn_decode_eff": 0.7}},
        },
        "models": {"half": {"like": "Llama-3-8b", "layers": 16}},
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(table))
    for extra in (table, path, str(path)):
        mine, base = machine("MY-BOX", extra), machine("H100-SXM")
        assert tuple(table_of("machines", extra)) == (*MACHINES, "my-box")
        assert mine == base.with_(name="my-box", h2d_bytes_per_s=4e10)
        assert mine == machine("mine", extra)
        assert (mine.sources["h2d_bytes_per_s"], mine.sources["flops"]) == ("L: measured", base.sources["flops"])
        changed = machine("GH200", extra)
        assert changed == machine("GH200").with_(h2d_bytes_per_s=3.46e11, attn_decode_eff=0.7)
        assert changed.sources["h2d_bytes_per_s"] == "user's table"
        assert model("half", extra).layers == 16
    assert machine("H100").name == "H100-SXM", "an alias is not inherited, and nothing built in has changed"
    assert machine("GH200").h2d_bytes_per_s == 419e9


def h200(**changes: Any) -> dict[str, Any]:
    return {"like": "H200", **changes}


@pytest.mark.parametrize(
    ("field", "entry"),
    [
        *(("machines.x", 3), ("machine", {"like": "nobody"}), ("x.like", {"like": 3}), ("x.figures", {"link": "l"})),
        *(("x.aliases", h200(aliases=wrong)) for wrong in (7, [7])),
        *(("x.hbm_bytes", {"figures": {}, "roofline": {}}), ("x.flops", h200(figures={"flops": {"source": "?"}}))),
        *(("x.figures", h200(figures=wrong)) for wrong in ({"warp": 9}, 9)),
        *(("hbm_bytes", h200(figures={"hbm_bytes": wrong})) for wrong in (NAN, math.inf, None, 1.5)),
        *(("flops", h200(figures={"flops": wrong})) for wrong in ("many", 0, NAN, True)),
        *(("duplex", h200(figures={"duplex": 1.5})), ("copy_setup_s", h200(figures={"copy_setup_s": -1}))),
        *(("roofline.p", h200(roofline={"p": 0.5})), ("roofline.eff_bw", h200(roofline={"eff_bw": 0}))),
        *(("x.roofline", h200(roofline={"warp": 9})), ("link", h200(link=""))),
    ],
)
def test_a_malformed_machine_is_refused_by_its_field(field: str, entry: Any) -> None:
    refused(field, machine, "x", {"machines": {"x": entry}})


@pytest.mark.parametrize(
    ("field", "like", "changes"),
    [
        *(("x", "OPT-13b", {"wheels": 4}), ("layers", "OPT-13b", {"layers": 0})),
        ("kv_heads", "OPT-13b", {"kv_heads": 2.5}),
        *(("linear_ops", "OPT-13b", {"linear_ops": ops}) for ops in ("qkv", [], [["qkv", 3]], [["a", 3, 3]] * 2, [3])),
        *(("head", "OPT-13b", {"head": wrong}) for wrong in ([1], 7)),
        *(("expert_ops", "OPT-13b", {"expert_ops": ["nobody"]}), ("active_experts", "OPT-13b", {"active_experts": 2})),
        # Sizes of two models in one: what was left out came from the model that the entry is like.
        ("x.layer_bytes", "Mixtral-8x7B", {"layers": 48, "experts": 128, "active_experts": 8}),
        *(("x.layer_bytes", "OPT-13b", {"matrix_bytes": 1}), ("x.layer_bytes", "gpt-oss-20b", {"expert_bytes": 0})),
        *(("expert_bytes", "gpt-oss-20b", {"expert_bytes": wrong}) for wrong in (-1, "4 bits", NAN)),
        ("dense_layers", "DeepSeek-V3", {"dense_layers": -1}),
        ("x.linear_ops", "Mixtral-8x7B", {"layers": 48, "hidden": 2048}),
        ("x.linear_ops", "Llama-3-8b", {"kv_heads": 4}),
    ],
)
def test_a_malformed_model_is_refused_by_its_field(field: str, like: str, changes: Any) -> None:
    refused(field, model, "x", {"models": {"x": {"like": like, **changes}}})


def test_unreadable_tables_are_refused(tmp_path: Path) -> None:
    refused("machines", machine, "x", {"machines": []})
    refused("machines.3", machine, "x", {"machines": {3: {}}})
    refused("x.layers", model, "x", {"models": {"x": {}}})
    refused("extra", machine, "H200", tmp_path / "missing.json")
    for text in ("{", "[]", '{"something": 1}'):
        (tmp_path / "bad.json").write_text(text)
        refused("extra", machine, "H200", tmp_path / "bad.json")
    refused("extra", machine, "H200", 3)


def test_with_changes_figures_and_says_so() -> None:
    base = machine("H200")
    changed = base.with_(name="slow", h2d_bytes_per_s=1e9, p=2.0)
    assert (changed.name, changed.h2d_bytes_per_s, changed.roofline.p) == ("slow", 1e9, 2.0)
    assert changed.sources["h2d_bytes_per_s"] == changed.sources["roofline.p"] == "changed by the caller"
    assert base.with_() == base and base != changed
    assert "h2d" in refused("name of a figure", base.with_, h2d=1).args[0]
    refused("roofline.p", base.with_, p=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.flops = 1.0  # type: ignore[misc]
