"""The demo with more models than memory: its runs, the models that come and go whole, its refusals and its report."""

from __future__ import annotations

import importlib.util
import random
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
from remap.errors import InvalidArgument, InvalidState
from remap.internals import internals
from remap_serve.cli import demo, demo_cold
from remap_serve.cli.demo_config import FITTING_MODELS, MOST_MODELS, DemoConfig
from remap_serve.cli.demo_html import page
from remap_serve.cli.demo_report import RunResult, closing_sentence, is_better, table, table_rows, to_json
from remap_serve.cli.demo_rounds import rounds_rows
from remap_serve.cli.shared_world import ModelSpec
from remap_serve.cli.whole_models import LRUModels, SleepingModels
from remap_serve.engine import Request, SamplingParams

SHAPE = {"hidden": 128, "intermediate": 384, "heads": 4, "kv_heads": 2, "vocabulary": 512, "positions": 512}
SMALL = tuple(ModelSpec(name, layers=12 - place, **SHAPE) for place, name in enumerate("abcde"))
CONFIG = DemoConfig(tenants=5, budget_bytes=0, dtype="float32", page_bytes=64 << 10)
COLD = {
    "models": 8,
    "models_fitting": 3,
    "requests_of_others": 21,
    "cold_starts": 20,
    "cold_begin_s": 0.2,
    "cold_first_pass_s": 0.6,
    "warm_starts": 9,
    "warm_begin_s": 0.001,
    "warm_first_pass_s": 0.4,
    "copied_bytes": 1 << 30,
}


@pytest.fixture
def world(monkeypatch):
    """The demo's models as five small random ones."""
    monkeypatch.setattr(demo_cold, "MODELS", SMALL)
    monkeypatch.setattr(demo_cold, "MIN_BLOCKS", 4)
    return demo_cold.build_cold_world(CONFIG)


def requests_of(world, each):
    rng = random.Random(3)
    made = {name: [] for name in world.names}
    for number in range(each * len(world.names)):
        prompt = tuple(rng.randrange(3, 512) for _ in range(rng.randrange(8, 40)))
        made[world.names[number % len(world.names)]].append(Request(f"{number}", prompt, SamplingParams(max_tokens=5)))
    return made


def test_all_models_are_served_in_memory_for_three_with_the_tokens_of_ample_memory(world):
    budget, requests, reports = demo_cold.budget_of(world, CONFIG), requests_of(world, 3), []
    assert demo_cold.fitting(world, budget) == ("a", "b", "c")
    runs = {
        kind: demo_cold.serve_cold(kind, world, requests, budget, reports.append)
        for kind in ("unconstrained", "baseline", "remap")
    }
    asked = [(world._models[name], one) for name in world.names for one in requests[name]]
    near = [Near(*one, tokens) for one, tokens in zip(asked, runs["unconstrained"].tokens, strict=True)]
    for kind, run in runs.items():
        assert RunResult.from_dict(run.to_dict()) == run
        assert list(run.tokens) == near
        assert len(run.ttft_s) == len(asked) and set(run.tenants) == set(world.names)
        assert run.cold["models"] == 5 and run.cold["models_fitting"] == 3 and run.cold["requests_of_others"] == 6
        assert run.capacity_bytes > budget if kind == "unconstrained" else run.capacity_bytes == budget
        # Ample memory copies nothing; otherwise at least two models are away at any time.
        away = [point.layers_remapped for point in run.timeline]
        assert run.layers_remapped_peak == max(away)
        if kind == "unconstrained":
            assert run.cold["copied_bytes"] == run.cold["cold_starts"] == max(away) == 0
        else:
            assert run.cold["copied_bytes"] > 0 and min(away) > 0
    assert runs["baseline"].cold["cold_starts"] > 0
    assert reports[-1].generated == reports[-1].total == runs["remap"].generated_tokens


@pytest.mark.parametrize(("kind", "stay"), [(LRUModels, ["b", "c", "d"]), (SleepingModels, ["d"])])
def test_whole_models_leave_until_there_is_room(world, kind, stay):
    budget, page = demo_cold.budget_of(world, CONFIG), CONFIG.page_bytes
    with kind(budget, device="cpu", page_bytes=page) as session:
        world.attach(session, world.start_blocks, dict.fromkeys(world.names), False, True, 4, pages="none")
        for name in "abcd":
            report = session.activate(name, alone=True)
            assert report.activated and all(
                internals(session.tenants[name]).ready(n) for n in range(world.layers(name))
            )
            assert session.expect("e") == ()
        cold = {name: one.cold for name, one in session.snapshot().tenants.items()}
        assert [name for name in world.names if not cold[name]] == stay
        assert all(len(cold[name]) in (0, world.layers(name)) for name in world.names)  # whole
        with pytest.raises(InvalidState) as caught:
            session.activate("e")
        assert caught.value.tenant == "e" and len(session.snapshot().tenants["e"].cold) == world.layers("e")


def test_what_does_not_fit_is_refused(world):
    assert len(demo_cold.MODELS) < MOST_MODELS
    for tenants in (FITTING_MODELS, MOST_MODELS + 1):
        with pytest.raises(InvalidArgument) as caught:
            demo_cold.build_cold_world(replace(CONFIG, tenants=tenants))
        assert caught.value.tenants == tenants
    assert CliRunner().invoke(app, ["demo", "--tenants", str(MOST_MODELS + 1)]).exit_code == 2
    with pytest.raises(InvalidArgument) as caught:
        demo_cold.build_cold_world(replace(CONFIG, budget_bytes=1 << 20))
    assert caught.value.budget == 1 << 20 < caught.value.least
    least = replace(CONFIG, budget_bytes=caught.value.least)
    alone = {name: [one[0]] for name, one in requests_of(demo_cold.build_cold_world(least), 1).items()}
    demo_cold.serve_cold("remap", world, alone, demo_cold.budget_of(world, least), lambda progress: None)


def cold_result(**remap):
    tenants = {
        "SmolLM2": {"ttft_p99_s": 2.0, "weight_bytes": 530 << 20},
        "small": {"ttft_p99_s": 0.5, "weight_bytes": 156 << 20},
    }
    plain = make_result()
    return replace(
        plain,
        settings=demo._settings(replace(CONFIG, tenants=8)),
        unconstrained=replace(plain.unconstrained, tenants=tenants, cold={**COLD, "cold_starts": 0}),
        baseline=replace(plain.baseline, tenants=tenants, cold=COLD),
        remap=replace(
            plain.remap, tenants=tenants, cold={**COLD, "cold_begin_s": 0.05, "cold_first_pass_s": 0.45, **remap}
        ),
    )


def test_the_report_says_what_has_room_and_how_soon_a_cold_model_answers():
    result = cold_result()
    assert is_better(result)
    sentence = closing_sentence(result)
    assert sentence.startswith(
        "In the same 512 MiB, which holds 3 of 8 models at once (21 of 48 requests are for the others), remap served all; "
        "a cold model's first pass had ended 450 ms after its turn began (2.2 times its load), where whole models that leave "
        "and come back take 600 ms, 200 ms of it to load; throughput rose by 50%"
    )
    assert sentence.endswith("the tokens of all 48 requests are identical to the unconstrained run's.")
    assert not is_better(cold_result(cold_first_pass_s=0.7))
    assert "no model had to leave" in closing_sentence(
        replace(result, baseline=replace(result.baseline, cold={**COLD, "cold_begin_s": 0.0}))
    )
    rows = {row[0]: row[1:] for row in table_rows(result)}
    assert rows["turn to pass ended P50"] == ("400 ms", "600 ms", "450 ms", "-25%")
    assert rows["small (156 MiB) TTFT P99"][0] == "500 ms"
    assert "layers without memory (peak)" in rows and "layers remapped (peak)" not in rows
    assert "random weights" in str(table(result).caption)
    assert "cold start to pass" in {row[0] for row in rounds_rows([result, result])}
    data = to_json(result)
    assert data["remap"]["cold_begin_s"] == 0.05 and data["remap"]["tenants"]["small"]["weight_bytes"] == 156 << 20


def test_the_page_says_that_models_come_and_go():
    shown = page(cold_result())
    assert "8 models in memory for 3" in shown and "Layers without memory" in shown
    assert "whole models leave and come back" in shown and "random weights" in shown
    assert "Poisson, 1 a second" in shown
    assert "Weights become KV cache" not in shown and "Weights become KV cache" in page(make_result())
    assert make_run("remap").cold == {}


@pytest.mark.model
def test_every_model_is_asked_and_most_requests_are_for_few():
    if importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip(f"the model's package is not installed: {smollm2.INSTALL}")
    config = DemoConfig(tenants=MOST_MODELS, budget_bytes=0, dtype="float32")
    world = demo_cold.build_cold_world(config)
    requests = demo_cold.make_requests(world, config)
    assert demo_cold.fitting(world, demo_cold.budget_of(world, config)) == world.names[:FITTING_MODELS]
    counts = [len(mine) for mine in requests.values()]
    assert sum(counts) == config.requests and min(counts) >= 1
    assert counts[0] == max(counts) and sum(counts[:FITTING_MODELS]) > config.requests / 2
    arrivals = sorted((one.arrival_s, int(one.id)) for mine in requests.values() for one in mine)
    assert [number for _, number in arrivals] == list(range(config.requests))
    for name, mine in requests.items():
        assert all(max(one.prompt) < world.vocabulary(name) for one in mine)
        assert all(bool(one.sampling.stop_token_ids) == (name == "SmolLM2") for one in mine)
