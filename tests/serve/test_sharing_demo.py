"""The demo with several models: who gets which prompts and how much memory, and how their runs are added up."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("typer")

from near_tokens import Near
from test_demo_report import make_result, make_run
from typer.testing import CliRunner

from remap.cli import smollm2
from remap.cli.main import app
from remap.errors import InvalidArgument
from remap_serve.cli import demo, demo_tenants
from remap_serve.cli.demo_config import FITTING_MODELS, DemoConfig
from remap_serve.cli.demo_html import page
from remap_serve.cli.demo_report import RunResult, table_rows
from remap_serve.cli.shared_world import LARGE, SMALL, SharedWorld, Wiring
from remap_serve.sim.workload import ALPACA, Arrivals, Load, generate

NUMBERS = {"ttft_p99_s": 2.0, "tbt_p99_s": 0.2, "kv_blocks_start": 40, "kv_blocks_peak": 40, "preemptions": 3}


@pytest.fixture
def small(monkeypatch):
    """The demo's several models as three small random ones."""
    monkeypatch.setattr(demo_tenants, "LARGE", SMALL)
    return DemoConfig(tenants=3, budget_bytes=0, dtype="float32", page_bytes=SMALL.page_bytes, block_tokens=8)


def test_the_command_line_knows_how_many_models_there_are():
    assert len(LARGE.models) == FITTING_MODELS


def test_a_budget_is_dealt_out_by_weight(small):
    world = demo_tenants.build_world(small)
    assert world.names == tuple(model.name for model in SMALL.models)
    assert demo_tenants.build_world(replace(small, tenants=2)).names == world.names[:2]
    weights = sum(map(world.weight_bytes, world.names))
    assert weights < world.budget_bytes < 1.15 * weights
    wide = demo_tenants.build_world(replace(small, budget_bytes=2 * weights))
    assert 1.9 * weights < wide.budget_bytes <= 2 * weights
    for name in wide.names:
        kv = wide.start_blocks[name] * wide.block_bytes(name)
        assert kv == pytest.approx(wide.weight_bytes(name), rel=0.1)


def test_refusals(small):
    weights = sum(map(demo_tenants.build_world(small).weight_bytes, ("even", "wide", "deep")))
    with pytest.raises(InvalidArgument) as caught:
        demo_tenants.build_world(replace(small, budget_bytes=weights))
    assert caught.value.budget == weights < caught.value.least
    demo_tenants.build_world(replace(small, budget_bytes=caught.value.least))
    for tenants in (1, 9):
        with pytest.raises(InvalidArgument) as caught:
            demo_tenants.build_world(replace(small, tenants=tenants))
        assert caught.value.tenants == tenants
    assert CliRunner().invoke(app, ["demo", "--tenants", "9"]).exit_code == 2


def test_runs_of_several_tenants_add_up(small):
    world = SharedWorld(SMALL, kv_share=0.06)
    items = generate([Load(name, Arrivals(8.0), world.lengths(ALPACA, 1.0)) for name in world.names], 1.0, 3)
    requests = world.requests(items, at_once=True)
    reports = []
    runs = {}
    for kind in ("baseline", "remap"):
        wiring = Wiring(controller={} if kind == "remap" else None)
        on_step = demo_tenants.reporter(requests, reports.append)
        result = world.serve(requests, wiring, quantum_s=0.05, on_step=on_step)
        run = runs[kind] = demo_tenants.summed(kind, world, requests, result)
        assert RunResult.from_dict(run.to_dict()) == run
        assert run.generated_tokens == sum(item.output_tokens for item in items)
        assert len(run.ttft_s) == len(run.tokens) == len(items)
        assert len(run.tbt_s) == run.generated_tokens - len(items)
        assert run.capacity_bytes == world.budget_bytes
        # With remap a tenant begins with a part of its own, and what its warm-up needed.
        everything = sum(world.start_blocks.values())
        assert run.kv_blocks_start == everything if kind == "baseline" else 0 < run.kv_blocks_start <= everything
        assert run.layers == sum(map(world.layers, world.names))
        assert run.preemptions == sum(one["preemptions"] for one in run.tenants.values())
        assert run.timeline[-1].preemptions == run.preemptions
        assert reports[-1].generated == reports[-1].total == run.generated_tokens
        assert reports[-1].finished == len(items)
    asked = [(world._models[name], request) for name in world.names for request in requests[name]]
    near = [Near(*one, tokens) for one, tokens in zip(asked, runs["baseline"].tokens, strict=True)]
    assert list(runs["remap"].tokens) == near
    assert runs["remap"].kv_blocks_peak > runs["baseline"].kv_blocks_peak == runs["baseline"].kv_blocks_start


def test_each_tenant_has_rows_of_its_own():
    alone = make_result()
    tenants = {"SmolLM2": NUMBERS, "wide": {**NUMBERS, "tbt_p99_s": 0.0}}
    better = {"SmolLM2": {**NUMBERS, "ttft_p99_s": 1.0, "kv_blocks_peak": 60}, "wide": tenants["wide"]}
    result = replace(
        alone,
        unconstrained=replace(alone.unconstrained, tenants=tenants),
        baseline=replace(alone.baseline, tenants=tenants),
        remap=replace(alone.remap, tenants=better),
    )
    rows = table_rows(result)
    assert rows[: -len(tenants) * 3] == table_rows(alone)
    assert rows[-6] == ("SmolLM2 KV blocks", "40 to 40", "40 to 40", "40 to 60", "+50%")
    assert rows[-5] == ("SmolLM2 first token P99", "2 s", "2 s", "1 s", "-50%")
    assert rows[-1][-1] == ""  # nothing to compare with
    assert "wide next token P99" in page(result)
    assert make_run("remap").tenants == {}


def test_settings_say_how_the_models_share():
    shown = demo._settings(DemoConfig(tenants=3, budget_bytes=0))
    assert shown["sharing"] == "in turns of 2 s"
    assert shown["budget"].startswith("weights and 10% of them")
    assert "sharing" not in demo._settings(DemoConfig())
    assert demo_tenants.model_name(2) == "SmolLM2-135M-Instruct and 1 random Llama in turns"


@pytest.mark.model
def test_prompts_are_dealt_out_in_turn():
    if importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip(f"the model's package is not installed: {smollm2.INSTALL}")
    config = DemoConfig(tenants=3, budget_bytes=0, dtype="float32", requests=7)
    world = demo_tenants.build_world(config)
    requests = demo_tenants.make_requests(world, config)
    assert [len(mine) for mine in requests.values()] == [3, 2, 2]
    for name, mine in requests.items():
        assert all(max(one.prompt) < world.vocabulary(name) for one in mine)
        assert all(bool(one.sampling.stop_token_ids) == (name == "SmolLM2") for one in mine)


def longest(name, world, blocks):
    from remap_serve.engine import Request, SamplingParams

    return {name: [Request("long", (5,) * (blocks * world.preset.block_tokens - 4), SamplingParams(max_tokens=4))]}


def test_every_model_has_room_for_its_longest_request(small):
    world = demo_tenants.build_world(small)
    before = dict(world.start_blocks)
    requests = {name: [] for name in world.names} | longest("deep", world, before["deep"] + 9)
    demo_tenants.make_room(world, requests, small)
    assert world.start_blocks == {**before, "deep": before["deep"] + 9}
    world.serve(requests, Wiring(controller=None))


def test_a_budget_that_is_given_is_kept_when_a_request_is_long(small):
    budget = demo_tenants.build_world(small).budget_bytes + (3 * small.page_bytes)
    config = replace(small, budget_bytes=budget)
    world = demo_tenants.build_world(config)
    need = world.start_blocks["deep"] + 1
    while world.capacity({**world.start_blocks, "deep": need}) <= budget:
        need += 1
    requests = {name: [] for name in world.names} | longest("deep", world, need)
    demo_tenants.make_room(world, requests, config)
    assert world.budget_bytes <= budget
    assert world.start_blocks["deep"] >= need
    before = dict(world.start_blocks)
    with pytest.raises(InvalidArgument) as caught:
        demo_tenants.make_room(world, {name: [] for name in world.names} | longest("deep", world, 100 * need), config)
    assert caught.value.budget == budget < caught.value.least
    assert world.start_blocks == before


@pytest.mark.model
@pytest.mark.parametrize("tenants", [2, 3])
def test_the_default_demo_can_serve_its_prompts(tenants):
    if importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip(f"the model's package is not installed: {smollm2.INSTALL}")
    config = DemoConfig(tenants=tenants, budget_bytes=0, dtype="float32")
    world = demo_tenants.build_world(config)
    requests = demo_tenants.make_requests(world, config)
    demo_tenants.make_room(world, requests, config)
    for name, mine in requests.items():
        room = world.start_blocks[name] * world.preset.block_tokens
        assert all(one.max_kv_tokens <= room for one in mine)
