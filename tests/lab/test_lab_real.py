"""`bench.lab real` with tiny random models: the whole command, what its runs copy, and what ends it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("typer")

from bench.lab import rounds, seeds
from bench.lab.apart import run_apart
from bench.lab.commands import app
from bench.lab.real import command
from bench.lab.real.cases import FULL, IDEAL, IN_TURNS, POLICIES, QUICK, TURNS, find
from bench.lab.real.one import _Watch, requests, serve
from near_tokens import Near
from typer.testing import CliRunner

from remap.errors import InvalidArgument, InvalidState
from remap_serve.cli.shared_world import SharedWorld, build
from remap_serve.engine.request import Output, Request, SamplingParams, Sequence
from remap_serve.sim.results import Targets

NAMES = {rounds.run_name(case.name, policy, 0) for case in QUICK.cases for policy in POLICIES}
BYTES = ("weights_in_bytes", "kv_in_bytes", "kv_out_bytes")


def here(kind: str, module: str, *names: str, threads: int) -> Any:
    """`run_apart` without the process, which loads torch anew: as JSON gives it back."""
    assert (module, threads) == ("bench.lab.real.one", 1)
    SERVED[kind] = json.loads(json.dumps(serve(*names)))
    return SERVED[kind]


SERVED: dict[str, Any] = {}


def figures(**changed: float) -> dict[str, float]:
    keys = ("load_1min_before", *BYTES, *(column.key for column in command.COLUMNS if column not in command.AGAINST))
    return {**dict.fromkeys(keys, 1.0), **changed}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the quick suite, measured in this process, and its page."""
    path = tmp_path_factory.mktemp("real") / "real.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "run_apart", here)
        found = CliRunner().invoke(app, ["real", "--quick", "--results", str(path)])
    assert found.exit_code == 0, found.output
    return path


def test_every_policy_serves_tokens_that_are_as_good(measured: Path) -> None:
    """By the models alone, where batches of one policy round otherwise than those of another."""
    for case in QUICK.cases:
        asked = requests(case, SharedWorld(case.preset, kv_share=case.kv_share, seed=case.seed))
        for index, spec in enumerate(case.preset.models):
            model = build(spec, case.preset.dtype, case.seed + index)[0].eval()
            for request in asked[spec.name]:
                first, *others = (
                    [
                        *map(
                            int,
                            SERVED[rounds.run_name(case.name, policy, 0)]["tokens"][
                                f"{spec.name} {request.id}"
                            ].split(),
                        )
                    ]
                    for policy in POLICIES
                )
                assert all(Near(model, request, first) == other for other in others)


def test_every_policy_serves_all_tokens_and_copies_what_it_may(measured: Path) -> None:
    data = json.loads(measured.read_text(encoding="utf-8"))
    assert set(data) == {"settings", "machine", "tokens", "points"} and set(data["points"]) == NAMES
    assert data["settings"] == QUICK.settings() and {"cpu", "torch", "remap"} <= set(data["machine"])
    for case in QUICK.cases:
        tokens = data["tokens"][case.name]
        assert len(set(tokens.values())) > len(tokens) / 2  # the answers vary, so equal ones say something
        found = {policy: data["points"][rounds.run_name(case.name, policy, 0)] for policy in POLICIES}
        generated = sum(len(text.split()) for text in tokens.values())
        assert {(one["requests"], one["generated_tokens"]) for one in found.values()} == {(len(tokens), generated)}
        assert len({one["capacity_bytes"] for policy, one in found.items() if policy != IDEAL}) == 1
        assert found[IDEAL]["preemptions"] == 0 == found[IDEAL]["recomputed_tokens"]
        assert all(found[policy][kind] == 0 for policy in (IDEAL, "recompute") for kind in BYTES)
        assert found["recompute"]["preemptions"] > 0 and found["recompute"]["recomputed_tokens"] > 0
        swap = found["swap"]
        assert swap["recomputed_tokens"] == 0 == swap["weights_in_bytes"]
        assert swap["pauses"] > 0 == swap["preemptions"] and 0 < swap["kv_out_bytes"] <= swap["kv_in_bytes"]
        for streams in (found["pie"], found["stream"]):
            assert streams["recomputed_tokens"] == 0 == streams["weights_in_bytes"]
            assert streams["kv_out_bytes"] > 0 < streams["kv_in_bytes"]
        assert found["weights"]["kv_in_bytes"] == found["weights"]["kv_out_bytes"] == 0
        assert all(found[policy]["recomputed_tokens"] == 0 for policy in ("kv-pool+swap", "remap", "all"))
        assert found["kv-pool+swap"]["weights_in_bytes"] == 0 == found["kv-pool+swap"]["layers_remapped_peak"]
        assert all(found[policy]["kv_growth_peak"] == 1 for policy in (IDEAL, "recompute", "swap"))
        # Whether anything streams is the controller's decision, by measured times.
        for one in (found["weights"], found["remap"]):
            assert one["weights_in_bytes"] > 0 or one["layers_remapped_peak"] == 0
        for one in found.values():
            assert 0 < one["ttft_p50_s"] <= one["ttft_p99_s"] and 0 < one["tbt_p50_s"] <= one["tbt_p99_s"]
            assert one["cpu_s"] > 0
            assert 0 <= one["goodput_per_s"] * one["duration_s"] <= one["requests"] + 1e-9


def test_the_page_and_what_is_run_again(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped goes on where it was: one lost run is the only one made."""
    page = measured.with_suffix(".md").read_text(encoding="utf-8")
    kept = json.loads(measured.read_text(encoding="utf-8"))
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith(("| one", "| three"))]
    assert [row[1] for row in rows] == [*POLICIES, *POLICIES] and {row[2] for row in rows} == {"1"}
    assert all(f"- `{name}`: " in page for name in POLICIES) and all(str(case) in page for case in QUICK.cases)
    lost = rounds.run_name("one", "swap", 0)
    made: list[str] = []

    def once(kind: str, *arguments: str, threads: int) -> Any:
        made.append(kind)
        return {"figures": kept["points"][lost], "tokens": kept["tokens"]["one"]}

    monkeypatch.setattr(rounds, "run_apart", once)
    del (data := json.loads(json.dumps(kept)))["points"][lost]
    seeds.write(measured, data)
    assert command.run_real(measured, "quick") == page
    assert made == [lost] and json.loads(measured.read_text(encoding="utf-8")) == kept
    monkeypatch.setattr(rounds, "machine_info", lambda: {"cpu": "another"})
    assert command.run_real(measured, "quick", report_only=True) == page
    with pytest.raises(InvalidArgument, match="another machine") as caught:
        command.run_real(measured, "quick")
    assert caught.value.fields["field"] == "path" and made == [lost]


def test_requests_with_other_tokens_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other batches may round otherwise: the run is kept, and the page tells how many requests that concerned."""
    other = rounds.run_name("one", "recompute", 0)

    def pretended(kind: str, *arguments: str, threads: int) -> Any:
        return {"figures": figures(), "tokens": {"opt 0": "1 2", "opt 1": "1 3" if kind == other else "1 2"}}

    monkeypatch.setattr(rounds, "run_apart", pretended)
    path = tmp_path / "real.json"
    page = command.run_real(path, "quick")
    points = json.loads(path.read_text(encoding="utf-8"))["points"]
    assert {name: point[rounds.DIFFER.key] for name, point in points.items() if point[rounds.DIFFER.key]} == {other: 1}
    column = [line.split(" | ").index(f"{rounds.DIFFER.title} |") for line in page.splitlines() if "| policy |" in line]
    counts = {tuple(row[:2]): row[column[0]] for line in page.splitlines() if len(row := line.split(" | ")) > 5}
    assert counts["| one", "recompute"] == "1 |" and counts["| one", "remap"] == "0 |"
    assert "2 (one); 2 (three in turns)" in page
    # Files of before that figure: their runs were kept only if no request had other tokens.
    for point in points.values():
        del point[rounds.DIFFER.key]
    seeds.write(path, {**json.loads(path.read_text(encoding="utf-8")), "points": points})
    assert "| 1 |" not in [line[-5:] for line in command.run_real(path, "quick", report_only=True).splitlines()]


def test_answers_that_no_rounding_explains_end_the_run_and_nothing_of_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = rounds.run_name("one", "remap", 0)

    def pretended(kind: str, *arguments: str, threads: int) -> Any:
        return {"figures": figures(), "tokens": {"opt 0": "1 2", "opt 1": "1" if kind == wrong else "1 2"}}

    monkeypatch.setattr(rounds, "run_apart", pretended)
    path = tmp_path / "real.json"
    with pytest.raises(InvalidState, match="'opt 1'") as caught:
        command.run_real(path, "quick")
    assert caught.value.fields == {"run": wrong, "different": 1, "requests": 2}
    data = json.loads(path.read_text(encoding="utf-8"))
    before = list(POLICIES)[: list(POLICIES).index("remap")]
    assert list(data["points"]) == sorted(rounds.run_name("one", policy, 0) for policy in before)
    assert data["tokens"] == {"one": {"opt 0": "1 2", "opt 1": "1 2"}}


@pytest.mark.parametrize(
    "found", [{"a": "1"}, {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "2 2"}], ids=["missing", "more", "longer"]
)
def test_a_request_that_only_one_of_both_has_or_that_is_longer_is_no_rounding(found: dict[str, str]) -> None:
    with pytest.raises(InvalidState) as caught:
        rounds.count_different("x", found, {"a": "1", "b": "2"}, "ideal")
    assert caught.value.fields["different"] == 1


def test_a_run_is_a_process_of_its_own_and_says_why_it_failed() -> None:
    with pytest.raises(InvalidState, match="ended with exit status 1") as caught:
        run_apart("some", "bench.lab.real.one", "quick", "nobody", "swap", threads=1)
    assert caught.value.fields == {"kind": "some", "status": 1} and "no case 'nobody'" in str(caught.value)
    with pytest.raises(InvalidArgument) as refused:
        find("nothing", "one")
    assert refused.value.fields == {"suite": "nothing", "case": "one"}


def test_goodput_counts_requests_that_meet_both_targets() -> None:
    def step(first: float, last: float, tokens: int) -> Any:
        request = Request("x", (1,), SamplingParams(max_tokens=tokens), 0.0)
        sequence = Sequence(request, 0, [1] * (1 + tokens), 1.0, first_s=first, last_s=last)
        output = Output("x", (1,) * tokens, "length", 0)
        return type("Step", (), {"sampled": [sequence], "finished": (output,)})

    watch = _Watch(Targets(ttft_s=2.0, tpot_s=0.5))
    for first, last, tokens, count in ((3.0, 5.0, 5, 1), (3.1, 4.0, 5, 1), (2.0, 4.1, 5, 1), (3.0, 3.0, 1, 2)):
        watch(None, {"tenant": step(first, last, tokens)})  # type: ignore[arg-type]
        assert watch.good == count


def test_what_is_run() -> None:
    """Nine policies, four loads of the real models, three rounds."""
    names = ["ideal", "recompute", "swap", "pie", "stream", "kv-pool+swap", "weights", "remap", "all"]
    assert list(POLICIES) == names and FULL.rounds == 3
    assert [[model.name for model in case.preset.models] for case in FULL.cases] == [
        ["SmolLM2"],
        ["OPT"],
        *[["SmolLM2", "OPT", "wide"]] * 2,
    ]
    assert [case.mode for case in FULL.cases] == ["temporal"] * 3 + ["spatial"]
    assert json.loads(json.dumps(FULL.settings())) == FULL.settings()


def test_what_is_said_of_turns_is_what_is_stored(tmp_path: Path) -> None:
    """docs/notes/tenants.md: tokens are the same in all runs; in epochs gaps are shorter than in turns, and more tokens come than
    with the strongest alternative under either rule."""
    path = tmp_path / "turns.json"
    path.write_bytes(command.RESULTS_OF_TURNS.read_bytes())
    page = command.run_real(path, "turns", report_only=True)
    assert page == command.RESULTS_OF_TURNS.with_suffix(".md").read_text(encoding="utf-8") and "real --turns" in page
    points = json.loads(path.read_text(encoding="utf-8"))["points"]
    assert len(points) == 3 * len(IN_TURNS) * len(TURNS.cases)
    assert not any(point[rounds.DIFFER.key] for point in points.values())

    def of(case: str, policy: str, figure: str) -> float:
        return statistics.median(
            points[rounds.run_name(f"three in {case}", policy, number)][figure] for number in range(3)
        )

    assert of("epochs", "remap", "tbt_p99_s") < 0.5 * of("turns", "remap", "tbt_p99_s")
    for case in ("turns", "epochs"):
        assert of("epochs", "remap", "tokens_per_s") > 1.1 * of(case, "kv-pool+swap", "tokens_per_s")
        assert of("epochs", "remap", "longest_gap_p99_s") < of(case, "kv-pool+swap", "longest_gap_p99_s")
