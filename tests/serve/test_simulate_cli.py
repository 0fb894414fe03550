"""`remap simulate` with an engine that only pretends: what is asked of it, table, JSON, page, pictures, refusals."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages_seen import Page

pytest.importorskip("typer", reason="the command line needs typer")
pytest.importorskip("rich", reason="the command line needs rich")

import typer
from typer.testing import CliRunner

from reference.simulated_results import from_report
from remap.cli import errors
from remap.errors import InvalidState
from remap.extras import install
from remap_serve.cli import simulate_plots
from remap_serve.cli.simulate import Options, prepare, simulate
from remap_serve.cli.simulate_html import page
from remap_serve.cli.simulate_report import change, part, seconds, table_rows
from remap_serve.cli.simulate_verdict import limited_by, verdict, worse
from remap_serve.sim import serving
from remap_serve.sim.results import HEADLINE, PolicyResult, Sample, TenantResult, ascending
from remap_serve.sim.workload import Item


def pretend(setup: serving.Setup, items: Sequence[Item], policy: str, on_progress: Any = None) -> PolicyResult:
    """Something of the shape of a result. "recompute" has preemptions and a tail, others have remapped layers instead."""
    rng, slow = random.Random(policy), policy == "recompute"
    tenants, timeline = [], []
    end = items[-1].time_s + 20.0
    for number, tenant in enumerate(setup.tenants):
        mine = [item for item in items if item.tenant == tenant.name]
        blocks = setup.kv_blocks(tenant)
        gaps: dict[float, int] = {}
        for _ in range(2000):
            tail = slow and rng.random() < 0.02
            gap = round(rng.uniform(0.5, 9.0), 3) if tail else round(rng.lognormvariate(-4.2, 0.25), 5)
            gaps[gap] = gaps.get(gap, 0) + rng.randint(1, 8)
        preemptions, stall = 0, 0.0
        for step in range(600):
            busy = max(0.0, min(1.0, 0.5 + 0.5 * rng.uniform(-1, 1) + 0.3 * (step // 100 % 2)))
            alpha = 0.0 if slow else float((step // 60) % 5)
            usable = blocks + int(alpha * 48)
            preemptions += int(slow and busy > 0.98)
            stall += 0.002 * alpha
            seen = (usable, int(usable * busy), alpha, int(usable * busy) // 40, int(9 * busy), preemptions, stall)
            timeline.append(Sample(end * step / 600, tenant.name, *seen))
        ttft = tuple(rng.lognormvariate(0.5 if slow else -1.0, 1.2) for _ in mine)
        served = (len(mine), len(mine), sum(item.output_tokens for item in mine), ttft, ascending(gaps))
        peak = 0.0 if slow else 4.0
        kept = (preemptions, 100 * preemptions, 0, blocks, blocks + int(peak * 48), peak, 30.0 + number, stall, 5000)
        tenants.append(TenantResult(tenant.name, *served, *kept, tuple(0.1 * seconds for seconds in ttft)))
        if on_progress:
            on_progress(sum(len(t.ttft_s) for t in tenants), len(items))
    timeline.sort(key=lambda sample: sample.time_s)
    return PolicyResult(policy, tuple(tenants), tuple(timeline), end, 1.5, 15000, 0 if slow else 40)


@pytest.fixture
def engine(monkeypatch) -> list[tuple[Any, ...]]:
    """The pretended engine in the place of the real one; the list gets what each call was asked."""
    calls: list[tuple[Any, ...]] = []

    def called(setup, items, policy, on_progress=None):
        calls.append((setup, tuple(items), policy))
        return pretend(setup, items, policy, on_progress)

    monkeypatch.setattr(serving, "simulate", called)
    return calls


app = typer.Typer(pretty_exceptions_enable=False)
app.command()(simulate)


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["--machine", "GH200-96GB", "--models", "C1", "--requests", "90", *arguments])


def test_every_policy_serves_the_same_requests(engine, tmp_path) -> None:
    result = invoke("--rate", "3", "--seed", "5", "--quantum", "0.5")
    assert result.exit_code == 0, result.output
    assert [policy for _, _, policy in engine] == ["recompute", "kv-pool+swap", "remap"]
    assert len({items for _, items, _ in engine}) == 1
    setup, items, _ = engine[0]
    assert len(items) == 90 and items[-1].time_s < 30.0
    assert [tenant.name for tenant in setup.tenants] == ["OPT-13b", "Llama-2-13b", "Llama-3-8b"]
    assert {item.tenant for item in items} == {tenant.name for tenant in setup.tenants}
    given = (setup.machine.name, setup.sharing, setup.scheduler, setup.quantum_s)
    assert given == ("GH200-96GB", "epochs", "prefill-first", 0.5)
    assert all(word in result.output for word in ("recompute", "kv-pool+swap", "remap", "TTFT P99", "stalled", "90"))


def test_options_reach_the_setup_and_the_loads(engine, tmp_path) -> None:
    sharing = ("--sharing", "spatial", "--scheduler", "chunked", "--policies", "remap", "--rate", "3,2,1")
    loads = ("--arrivals", "poisson,bursty:5:0.3,azure-conv", "--lengths", "fixed:40:7,alpaca,short")
    assert invoke(*sharing, *loads).exit_code == 0
    setup, items, _ = engine.pop()
    assert (setup.sharing, setup.scheduler) == ("spatial", "chunked")
    by_tenant = {tenant.name: [item for item in items if item.tenant == tenant.name] for tenant in setup.tenants}
    assert [len(mine) for mine in by_tenant.values()] == [45, 30, 15]
    assert {(item.prompt_tokens, item.output_tokens) for item in by_tenant["OPT-13b"]} == {(40, 7)}
    # Machines and models of one's own.
    tables = tmp_path / "tables.json"
    figures = {"like": "H100-SXM", "figures": {"h2d_bytes_per_s": 4.2e10}}
    half = {"like": "Llama-3-8b", "layers": 16}
    tables.write_text(json.dumps({"machines": {"mine": figures}, "models": {"half": half}}))
    own = ("--machine", "mine", "--models", "half", "--tables", str(tables))
    assert invoke(*own, "--policies", "remap").exit_code == 0
    setup = engine[0][0]
    assert (setup.machine.name, setup.machine.h2d_bytes_per_s, setup.tenants[0].model.layers) == ("mine", 4.2e10, 16)


def printed(*arguments: str) -> Any:
    """What `--json` prints; stdout has nothing else."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_object_has_the_configuration_and_the_promised_figures(engine) -> None:
    data = printed("--policies", "recompute,remap:slices+lru")
    assert list(data["policies"]) == ["recompute", "remap:slices+lru"]
    for name, entry in data["policies"].items():
        expected = pretend(engine[0][0], engine[0][1], name)
        assert {key: entry[key] for key in HEADLINE} == expected.headline()
    configuration, results = from_report(data)
    assert results[0] == pretend(engine[0][0], engine[0][1], "recompute")
    assert configuration["machine"] == "GH200-96GB"
    assert configuration["machine_figures"]["h2d_bytes_per_s"] > 1e11
    assert configuration["arrivals"] == "azure-code" and configuration["requests"] == 90 and configuration["seed"] == 0
    assert [one["model"] for one in configuration["tenants_memory"]] == ["OPT-13b", "Llama-2-13b", "Llama-3-8b"]
    assert sum(one["requests"] for one in configuration["tenants_memory"]) == 90
    # It says all that is needed to draw the same requests again.
    again = prepare(Options(**{name: configuration[name] for name in Options.__dataclass_fields__}))
    assert again.items == engine[0][1]


def test_no_request_is_longer_than_its_models_context(tmp_path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("input_tokens,output_tokens\n9000,100\n3000,10000\n")
    prepared = prepare(Options("GH200-96GB", "OPT-13b", lengths=str(path), requests=10))
    assert {(item.prompt_tokens, item.output_tokens) for item in prepared.items} == {(1948, 100), (1, 2047)}


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        *(("machine", "GH9000", "GH200-96GB"), ("models", "GPT-9", "OPT-13b"), ("models", "C7", "C1, C2")),
        *(("models", "OPT-13b:35%,GPT-9:20%", "Llama-3-8b"), ("policies", "oracle", "recompute")),
        *(("policies", "remap:magic", "slices"), ("policies", "remap,remap", "once"), ("policies", ",", "empty")),
        *(("arrivals", "azure", "azure-code"), ("lengths", "gpt", "sharegpt"), ("sharing", "none", "temporal")),
        *(
            ("scheduler", "fair", "prefill-first"),
            ("rate", "fast", "number"),
            ("rate", "0", "above 0"),
            ("rate", "", "rate"),
        ),
        *(("rate", "1,2", "3 tenants"), ("quantum", "0", "above 0"), ("requests", "2", "at least one a tenant")),
        *(("ttft-target", "0", "above 0"), ("tpot-target", "-1", "above 0")),
        *(("requests", "0", "requests"), ("tables", "/nowhere/m.json", "/nowhere/m.json")),
        ("arrivals", "/nowhere/t.csv", "/nowhere/t.csv"),
    ],
)
def test_what_is_unknown_lists_the_known_and_exits_with_2(engine, option: str, value: str, known: str) -> None:
    result = invoke(f"--{option}", value)
    assert result.exit_code == 2, result.output
    assert known in result.output.replace("\n", " ")
    assert "Traceback" not in result.output and isinstance(result.exception, SystemExit)
    assert not engine


def test_the_real_engine_serves_them_all() -> None:
    data = printed("--policies", "recompute,remap", "--lengths", "fixed:100:20", "--rate", "30")
    _, results = from_report(data)
    assert [one.policy for one in results] == ["recompute", "remap"]
    for one in results:
        assert one.requests_finished == one.requests == len(one.ttft_s) == 90
        assert (one.output_tokens, sum(count for _, count in one.tbt)) == (90 * 20, 90 * 19)


def test_errors_while_running_are_told_without_a_traceback(monkeypatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise InvalidState("the engine broke")

    monkeypatch.setattr(serving, "simulate", fails)
    result = invoke()
    assert result.exit_code == 1
    assert "InvalidState: the engine broke" in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(("package", "extra"), [("matplotlib", "sim"), ("jinja2", "cli")])
def test_without_a_package_the_page_is_refused_before_anything_runs(
    engine, monkeypatch, tmp_path, package, extra
) -> None:
    real = errors.import_module

    def missing(name: str) -> Any:
        if name == package:
            raise ModuleNotFoundError(name=name)
        return real(name)

    monkeypatch.setattr(errors, "import_module", missing)
    result = invoke("--html", str(tmp_path / "out.html"))
    assert result.exit_code == 2 and install(extra) in result.output
    assert not engine and not (tmp_path / "out.html").exists()
    with pytest.raises(InvalidState) as caught:
        page({}, [], "")
    assert (caught.value.package, caught.value.extra) == (package, extra)
    # Table and JSON need none of it.
    assert printed() and invoke().exit_code == 0


@pytest.mark.slow
def test_the_page_is_one_file_that_fetches_nothing(engine, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    paths = tmp_path / "deep" / "out.html", tmp_path / "again.html"
    for path in paths:
        result = invoke("--lengths", "fixed:5:5", "--models", "<b>x&y=OPT-13b:40%,Llama-3-8b:20%", "--html", str(path))
        assert result.exit_code == 0, result.output
    text = paths[0].read_text()
    assert paths[1].read_text() == text  # the same runs give the same page
    seen = Page(text)
    assert seen.fetched == [] and not {"script", "link", "img", "iframe"} & set(seen.tags)
    assert not re.search(r"url\((?!#)|@import", text)
    assert 4 <= text.count("<svg") == text.count("<figure") and len(text) < 3_000_000
    words = ("recompute", "kv-pool+swap", "remap", "Llama-3-8b", "TTFT P99", "h2d_bytes_per_s", "fixed:5:5")
    assert all(word in seen.text for word in words)
    assert "<b>x" not in text and "&lt;b&gt;x&amp;y" in text  # what users name


def results_of(policies: Sequence[str], tenants: str = "C2") -> list[PolicyResult]:
    prepared = prepare(Options("GH200-96GB", tenants, requests=60))
    return [pretend(prepared.setup, prepared.items, policy) for policy in policies]


def test_pictures_hold_every_policy_and_tenant() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    results = results_of(["recompute", "remap", "remap:slices"])
    for draw in (simulate_plots.ttft_cdf, simulate_plots.tbt_cdf):
        (body,), (tail,) = (figure.axes for figure in draw(results))
        assert (len(body.get_lines()), len(tail.get_lines())) == (3, 4)  # and P99
    assert all(len(figure.axes[0].get_lines()) == 3 for figure in simulate_plots.stall_over_time(results))
    axes = [figure.axes[0] for figure in simulate_plots.alpha_over_time(results)]
    assert [axis.get_title(loc="left") for axis in axes] == ["OPT-30b", "OPT-6.7b"]
    assert all(len(axis.get_lines()) == 3 for axis in axes)
    figures = simulate_plots.kv_over_time(results)
    axes = [figure.axes[0] for figure in figures]
    names = [f"{model}: {result.policy}" for model in ("OPT-30b", "OPT-6.7b") for result in results]
    assert [axis.get_title(loc="left") for axis in axes] == names
    assert all(len(axis.get_lines()) == 1 == len(axis.collections) for axis in axes)
    assert len({axis.get_ylim() for axis in axes[:3]}) == 1 == len({axis.get_ylim() for axis in axes[3:]})
    xs, ys = axes[1].get_lines()[0].get_data()  # lines end where the run does and reach their peaks
    usable = [sample.kv_usable_blocks for sample in results[1].timeline if sample.tenant == "OPT-30b"]
    assert xs[-1] == results[1].timeline[-1].time_s and (min(ys), max(ys)) == (min(usable), max(usable))
    names = ["recompute", "swap", "pie", "static", "remap", "ideal", *(f"remap:{number}" for number in range(8))]
    assert len(set(simulate_plots.colours(names).values())) == len(names)


def test_ideal_squeezes_nobody_and_colours_are_the_pages() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    few, many = results_of(["recompute", "ideal"], "OPT-13b")
    larger = replace(
        many, timeline=tuple(replace(each, kv_usable_blocks=9 * each.kv_usable_blocks + 9) for each in few.timeline)
    )
    own, ideal = (figure.axes[0] for figure in simulate_plots.kv_over_time([few, larger]))
    usable = max(sample.kv_usable_blocks for sample in few.timeline)
    assert own.get_ylim()[1] == pytest.approx(1.05 * usable) and ideal.get_ylim()[1] > 9 * usable
    assert "its own scale" in ideal.get_title(loc="left") and "scale" not in own.get_title(loc="left")
    text = page({}, [few, larger], "t")
    fixed = re.findall(r"(?:fill|stroke): ?(#\w+)", text[text.index("<svg") :])
    assert fixed == [], "colours of their own cannot be read on a dark screen"
    assert "--line-111827:#f2f2ef" in text and "--line:var(--line-111827,#111827)" in text
    assert not set(simulate_plots.DARK) - {*simulate_plots.KNOWN.values(), *simulate_plots.OTHERS}


def test_lines_are_the_distribution(tmp_path: Path) -> None:
    """The drawn points lie on the exact curve, and no visible stretch of it is left out."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    result = results_of(["recompute"])[0]
    (left,), (right,) = (figure.axes for figure in simulate_plots.tbt_cdf([result]))
    xs, shares = left.get_lines()[0].get_data()
    total = sum(count for _, count in result.tbt)
    exact = {}
    seen = 0
    for value, count in result.tbt:
        seen += count
        exact[value] = seen / total
    assert all(share == pytest.approx(exact[x]) for x, share in zip(xs, shares))
    assert shares[-1] == 1.0
    assert max(b - a for a, b in zip([0.0, *shares], shares)) < 0.02
    xs, above = right.get_lines()[0].get_data()
    assert all(rest == pytest.approx(1 - exact[x], abs=1e-12) for x, rest in zip(xs[1:], above[1:]))
    assert (above[0], above[-1]) == (1.0, 0.0)


def test_of_runs_in_which_nothing_happened_there_is_nothing_to_see() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    tenant = TenantResult("a", 1, 0, 0, (), (), 0, 0, 0, 5, 5, 0.0, 0.0, 0.0, 0, ())
    nothing = PolicyResult("remap", (tenant,), (), 0.0, 0.0, 0, 0)
    for draw in ("ttft_cdf", "tbt_cdf", "kv_over_time", "alpha_over_time", "stall_over_time"):
        assert getattr(simulate_plots, draw)([nothing]) == []
    text = page({}, [nothing, replace(nothing, policy="swap")], "t")
    assert "<svg" not in text and "<figure" not in text and "over time" not in text
    assert "swap makes no difference from remap here." in text


def test_the_page_begins_with_what_is_better_and_what_is_worse() -> None:
    results = results_of(["recompute", "remap", "ideal"])
    first, ours, _ = results
    assert verdict(results).startswith("remap instead of recompute: ")
    assert f"preemptions {first.preemptions:,} to 0 (-100 %)" in verdict(results) and "ideal" not in verdict(results)
    tenants = tuple(replace(one, tbt=tuple((2 * gap, count) for gap, count in one.tbt)) for one in ours.tenants)
    slower = [first, replace(ours, tenants=tenants)]
    assert re.match(r"Worse: P50 time between tokens \S+ \S+ to \S+ \S+ \(\+", worse(slower))
    assert verdict([ours, replace(ours, policy="swap")]) == "swap makes no difference from remap here."
    assert worse([ours, replace(ours, policy="swap")]) == "" and "alone" in verdict([ours])
    assert verdict([ours, replace(first, policy="swap")]) == "swap is no better than remap here."


@pytest.mark.parametrize(
    ("said", "stall_s", "preemptions", "points"),
    [
        ("KV (waited for in 50% of the time, 3 preemptions, 0 pauses)", 0.0, 3, [(0, 95, 1, 2), (5, 20, 1, 2)]),
        ("the link (waited for in 20% of the passes' time)", 2.0, 0, [(0, 20, 1, 2)]),
        ("KV (waited for in 100% of the time, 0 preemptions, 0 pauses); the link (", 2.0, 0, [(0, 100, 1, 1)]),
        ("the computation (busy in 95% of the time)", 0.0, 0, [(0, 95, 3, 0), (9.5, 0, 0, 0)]),
        ("the load (idle in 60% of the time)", 0.0, 0, [(0, 50, 3, 0), (4, 0, 0, 0)]),
    ],
)
def test_what_limits_a_run(said: str, stall_s: float, preemptions: int, points: list[tuple[float, ...]]) -> None:
    tenant = TenantResult("a", 1, 1, 9, (), (), preemptions, 0, 0, 100, 100, 0.0, 8.0, stall_s, 9, ())
    line = [Sample(time, "a", 100, used, 0.0, running, waiting, 0, 0.0) for time, used, running, waiting in points]  # type: ignore[arg-type]
    end = replace(line[-1], time_s=10.0)
    assert limited_by(PolicyResult("remap", (tenant,), (*line, end), 10.0, 0.0, 9, 0)).startswith(said)


def test_numbers_in_words_and_changes_from_the_first_policy() -> None:
    told = {0.0: "0 s", 2.5e-5: "25 µs", 0.0123: "12.3 ms", 0.9999: "1 s", 12.34: "12.3 s", 1234.4: "1,234 s"}
    assert {value: seconds(value) for value in told} == told and seconds(float("nan")) == "–"
    pairs = ((10, 5), (10, 10.3), (10, 29), (10, 31), (10, 10.001), (0, 4), (4, 0))
    assert [change(*pair) for pair in pairs] == ["-50 %", "+3.0 %", "+190 %", "x 3.1", "=", "", "-100 %"]
    results = results_of(["recompute", "remap"])
    rows = {name: (values, changes) for name, values, changes in table_rows(results)}
    assert rows["preemptions"] == ([f"{results[0].preemptions:,}", "0"], ["", "-100 %"])
    assert rows["TTFT P99"][1] == ["", change(results[0].ttft_p99_s, results[1].ttft_p99_s)]
    assert rows["simulated in"][1] == ["", ""]


def test_the_table_says_how_far_everybody_comes_from_recompute_to_ideal() -> None:
    assert [part(value) for value in (0.834, -12.0, float("nan"))] == ["83 %", "-1,200 %", "–"]

    def told(results: list[PolicyResult], shown: int | None = None) -> dict[str, list[str]]:
        return {name: values for name, values, _ in table_rows(results[:shown], results)}

    results = results_of(["recompute", "remap", "ideal"])
    assert not [name for name in told(results[:2]) if "gap closed" in name or "ideal" in name]
    rows, (base, ours, best) = told(results), (result.ttft_p99_s for result in results)
    assert rows["gap closed, TTFT P99"] == ["0 %", f"{100 * (base - ours) / (base - best):,.0f} %", "100 %"]
    assert rows["gap closed, tokens/s"] == ["–"] * 3  # they pretend to serve equally fast
    assert rows["TBT P99 / ideal's"][2] == "x 1"
    # A narrow terminal gets several tables; ideal need not be in each.
    assert told(results, 2)["gap closed, TTFT P99"] == rows["gap closed, TTFT P99"][:2]


def test_targets_of_the_command_line_decide_what_is_good(engine) -> None:
    found = []
    for more in ((), ("--ttft-target", "0.5", "--tpot-target", "0.03")):
        result = invoke("--policies", "recompute,remap", *more)
        assert result.exit_code == 0 and "goodput" in result.output
        configuration, (one, _) = from_report(printed("--policies", "recompute,remap", *more))
        found.append((configuration["ttft_target"], configuration["tpot_target"], one.goodput_per_s))
        assert (one.targets.ttft_s, one.targets.tpot_s) == found[-1][:2]
        assert ("first token within 500 ms and TPOT of at most 30 ms" in " ".join(result.output.split())) == bool(more)
    assert found[0][:2] == (2.0, 0.2) and found[1][:2] == (0.5, 0.03)
    assert found[0][2] > found[1][2] > 0


def test_what_is_assumed_of_a_machine_and_a_mixture_is_told(engine, tmp_path) -> None:
    table = tmp_path / "mine.json"
    table.write_text(json.dumps({"machines": {"off": {"like": "GH200-96GB", "misfit": {"linear": 0.3}}}}))
    result = invoke("--tables", str(table), "--machine", "off", "--models", "Mixtral:100%")
    assert result.exit_code == 0, result.output
    told = result.output.replace("\n", " ")
    assert "30.0%" in told and "8 experts" in told and "90 %" in told
    assert "H100-PCIe" in invoke("--machine", "H100", "--models", "OPT-13b").output
    table.write_text(json.dumps({"machines": {"off": {"like": "GH200-96GB", "misfit": {"linear": 1.245}}}}))
    result = invoke("--tables", str(table), "--machine", "off", "--models", "OPT-13b")
    assert result.exit_code == 2 and "124.5%" in result.output
