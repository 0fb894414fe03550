"""`remap advise`: what it concludes from which figures, what it says, and settings that fit the device."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from remap.cli.main import app
from remap.errors import InvalidArgument
from remap.policy.hardware import machine
from remap_serve.cli.advise import settings
from remap_serve.sim import serving
from remap_serve.sim.advice import POLICIES, SAME, Figures, advise, decide
from remap_serve.sim.policies import find
from remap_serve.sim.results import PolicyResult, TenantResult
from remap_serve.sim.setup import Setup, evenly
from remap_serve.sim.workload import Item

QUICK = Figures(0.1, 1.0, 0.01, 0.05, 0.02, 1000.0, 4.0, 0.0, 0.0, 900.0, 3.0)
SLOW = replace(QUICK, ttft_p99_s=40.0, goodput_per_s=2.0, preemptions=300.0)


def figures(
    recompute: Figures, pool: Figures, swap: Figures, ours: Figures, ideal: Figures = QUICK
) -> dict[str, Figures]:
    return dict(zip(POLICIES, (recompute, pool, swap, ours, ideal)))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (figures(QUICK, QUICK, QUICK, QUICK), "not needed"),
        (figures(SLOW, QUICK, QUICK, QUICK), "sharing KV suffices"),
        (figures(SLOW, SLOW, QUICK, QUICK), "sharing KV suffices"),
        (figures(SLOW, SLOW, SLOW, QUICK), "weights pay"),
        (figures(SLOW, SLOW, SLOW, SLOW), "does not help"),
        (figures(SLOW, SLOW, SLOW, replace(SLOW, ttft_p99_s=60.0)), "does not help"),
        # As soon at the 99th percentile, but fewer requests within their targets: not as good.
        (figures(replace(QUICK, goodput_per_s=3.0), QUICK, QUICK, QUICK), "sharing KV suffices"),
        (figures(SLOW, replace(QUICK, goodput_per_s=3.0), SLOW, QUICK), "weights pay"),
        (figures(replace(QUICK, ttft_p99_s=1 + 0.9 * SAME), QUICK, QUICK, QUICK), "not needed"),
    ],
)
def test_what_is_concluded(found: dict[str, Figures], verdict: str) -> None:
    assert decide(found) == verdict


def two() -> Setup:
    on = machine("H100-PCIe")
    return Setup(on, evenly(["Llama-3-8b", "Qwen3-14B"], on, int(0.9 * on.hbm_bytes)))


LOADS = [[Item("Llama-3-8b", 1.0 * seed, 10, 5), Item("Qwen3-14B", 1.0 * seed + 1, 10, 5)] for seed in range(3)]


def pretended(setup: Setup, items, policy: str, on_progress=None) -> PolicyResult:
    """Recomputing takes 40 s and one more for each seed, everything else one."""
    seconds = 40.0 + items[0].time_s if policy == "recompute" else 1.0
    tenants = [
        TenantResult(one.name, 1, 1, 5, (seconds,), ((0.02, 4),), 3, 0, 0, 10, 20, 0.0, 1.0, 0.0, 9, (0.02,))
        for one in setup.tenants
    ]
    return PolicyResult(policy, tuple(tenants), (), 10.0, 0.0, 9, 0)


def test_the_answer_has_five_lines_of_medians_over_all_loads() -> None:
    asked: list[str] = []
    found = advise(two(), LOADS, pretended, on_run=asked.append)
    assert asked == [policy for policy in POLICIES for _ in LOADS]
    assert found.verdict == "sharing KV suffices" and len(found.lines) == 5
    assert found.figures["recompute"].ttft_p99_s == 41.0  # of 40, 41 and 42
    assert "41 s to 1 s" in found.lines[0] and "nothing" in found.lines[2] and "3 seeds" in found.lines[4]
    assert [one.policy for one in found.results] == list(POLICIES)


def test_no_load_is_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        advise(two(), [], pretended)
    assert caught.value.field == "loads"


@pytest.mark.parametrize("policy", POLICIES)
def test_its_policies_are_known_to_the_simulator(policy: str) -> None:
    assert find(policy).name == policy


def test_the_strongest_alternatives_move_no_layer() -> None:
    assert [find(policy).config.max_layers for policy in POLICIES[1:4]] == [0, 0, None]
    assert len({find(policy).pooled for policy in POLICIES[1:4]}) == 1
    assert [find(policy).swaps for policy in POLICIES[1:4]] == [False, True, True]


def test_models_get_the_same_number_of_tokens_and_no_more_than_is_given() -> None:
    on = machine("A100")
    given = int(0.9 * on.hbm_bytes)
    made = Setup(on, evenly(["Llama-3-8b", "OPT-6.7b", "Llama-3-8b"], on, given))
    assert [one.name for one in made.tenants] == ["Llama-3-8b", "OPT-6.7b", "Llama-3-8b-2"]
    assert len({made.kv_blocks(one) for one in made.tenants}) == 1
    total = sum(one.memory_bytes for one in made.tenants)
    assert given - sum(one.model.kv_bytes_per_token for one in made.tenants) < total <= given


def test_weights_that_leave_no_kv_are_refused_with_both_sizes() -> None:
    on = machine("RTX-4090")
    with pytest.raises(InvalidArgument) as caught:
        evenly(["OPT-13b"], on, on.hbm_bytes)
    assert caught.value.requested > caught.value.available == on.hbm_bytes


@pytest.mark.parametrize(
    ("verdict", "most", "empty"),
    [
        ("not needed", None, True),
        ("does not help", None, True),
        ("weights pay", None, False),
        ("sharing KV suffices", "0", False),
    ],
)
def test_settings_are_one_block_that_fits_the_device(verdict: str, most: str | None, empty: bool) -> None:
    setup = two()
    block = settings(setup, verdict)
    assert bool(block) is not empty and block.get("REMAP_MAX_LAYERS") == most
    if not empty:
        weights = sum(one.model.weight_bytes for one in setup.tenants)
        assert weights < int(block["REMAP_CAPACITY"]) <= 0.9 * setup.machine.hbm_bytes
        assert block["REMAP_ARENA"] == "shared"


def test_the_command_prints_five_lines_and_json_of_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "simulate", pretended)
    command = ["advise", "--machine", "H100-PCIe", "--models", "Llama-3-8b,Qwen3-14B", "--rate", "4", "--memory", "90%"]
    told = CliRunner().invoke(app, [*command, "--requests", "20"])
    assert told.exit_code == 0, told.output
    found = json.loads(CliRunner().invoke(app, [*command, "--requests", "20", "--json"]).stdout)
    assert found["verdict"] == "sharing KV suffices"
    assert told.stdout.splitlines()[:5] == found["lines"]
    assert all(f"  {name}={value}" in told.stdout for name, value in found["settings"].items())


def test_an_unknown_model_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "simulate", lambda *_: pytest.fail("it ran"))
    told = CliRunner().invoke(app, ["advise", "--machine", "H100-PCIe", "--models", "Lama-3-8b", "--rate", "4"])
    assert told.exit_code == 2 and "Llama-3-8b" in told.output


def test_simulate_and_advise_take_a_checkpoints_config(tmp_path) -> None:
    shape = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = {
        "model_type": "llama",
        "intermediate_size": 2048,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        **shape,
    }
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    on = machine("H100-PCIe")
    (one,) = evenly([str(folder)], on, 10**9)
    (other,) = serving.tenants(f"{folder}/config.json:10%", on)
    assert one.model == other.model and one.model.layers == 4
    assert one.assumed == other.assumed and "16 bit" in one.assumed[0]
