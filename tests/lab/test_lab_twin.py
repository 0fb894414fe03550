"""`bench.lab twin` without a model: a "real" run that is itself simulated, so that its twin must be the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from bench.lab.twin import compare as twins
from bench.lab.twin.calibrated import CalibratedCost, Rerun, rerun
from sim_models import MIB, recording

from remap.errors import InvalidState
from remap_serve.cli.demo_config import DemoConfig
from remap_serve.sim.passes import SessionPass
from remap_serve.sim.sequences import Work

COST = CalibratedCost(8, 0.04, 0.001, 2e-6, 0.003, 3e-6, 0.0005)
CONFIG = DemoConfig(dtype="bfloat16", requests=20)
RECORDING = recording()
KNOWN = {
    "scheduling": RECORDING.scheduling,
    "shape": {"hidden": 512, "heads": 8, "kv_heads": 8, "vocab": 32000, "intermediate": 1536, "context": 1024},
    "layer_bytes": [16 * MIB] * 8,
    "capacity_bytes": RECORDING.capacity_bytes,
    "kv_blocks": RECORDING.kv_blocks,
    "warm": RECORDING.warm,
    "requests": RECORDING.requests,
}


def pretended(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Rerun]:
    """What the real side would have written of a simulated run."""
    rows: list[dict[str, Any]] = []
    start = SessionPass.start

    def watched(self: SessionPass, chunks: Any) -> float:
        before, work = self.stall_s, Work.of(chunks)
        end = start(self, chunks)
        rows.append(
            {
                "prefill_tokens": work.prefill_tokens,
                "prefill_pairs": work.prefill_pairs,
                "decode_rows": work.decode_rows,
                "decode_context": work.decode_context,
                "sampled_rows": work.parts,
                "seconds": end - self.clock.now,
                "stall_s": self.stall_s - before,
                "copied_bytes": 0,
            }
        )
        return end

    monkeypatch.setattr(SessionPass, "start", watched)
    found = rerun(RECORDING, twins.blank_machine(), COST, twins.KINDS[kind])
    monkeypatch.undo()
    timeline = [
        {
            "time_s": step.end_s,
            "step_s": step.seconds,
            "tokens": step.tokens,
            "kv_usable_blocks": step.usable_blocks,
            "layers_remapped": step.alpha,
        }
        for step in found.steps
    ]
    real = {
        **KNOWN,
        "passes": rows[-len(found.steps) :],
        "timeline": timeline,
        "copy_s": 2.0,
        "copy_bytes": 8e9,
        "duration_s": found.duration_s,
        "generated_tokens": found.output_tokens,
        "preemptions": found.preemptions,
        "recomputed_tokens": found.recomputed_tokens,
        "ttft_s": list(found.ttft_s),
    }
    return json.loads(json.dumps(real)), found


@pytest.mark.parametrize("kind", ["remap", "baseline"])
def test_the_twin_of_a_simulated_run_is_that_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, found = pretended(kind, monkeypatch)
    entry, rows = twins.reckoned(kind, CONFIG, real)
    assert rows["steps_alike"]["twin"] == len(found.steps) > 100
    for name in ("step_mean_s", "step_p50_s", "step_p99_s", "tokens_per_s", "ttft_p50_s", "ttft_p99_s", "alpha_mean"):
        assert rows[name]["twin"] == pytest.approx(rows[name]["real"], rel=0.01), name
    for name in ("preemptions", "recomputed_tokens", "kv_blocks_peak", "alpha_peak"):
        assert rows[name]["twin"] == rows[name]["real"], name
    assert (rows["preemptions"]["real"] > 0) == (kind == "baseline") == (rows["alpha_peak"]["real"] == 0)
    assert entry["within"] == {"step_mean_s": True, "step_p99_s": True}
    assert entry["calibrated"]["gap_s"] == pytest.approx(0.001, rel=1e-6)
    assert entry["calibrated"]["fit"]["mean_abs_error"] < 0.02
    json.dumps(entry, allow_nan=False)


def test_both_runs_are_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    reals = {kind: pretended(kind, monkeypatch)[0] for kind in twins.KINDS}
    monkeypatch.setattr(twins, "measure", lambda kind, config: reals[kind])
    console = Console(record=True, width=100)
    written = twins.twin(CONFIG, tmp_path / "new", console)
    assert json.loads((tmp_path / "new" / "twin.json").read_text(encoding="utf-8")) == json.loads(json.dumps(written))
    assert list(written["runs"]) == ["remap", "baseline"] and written["config"] == asdict(CONFIG)
    assert {"cpu", "cores", "load_1min", "threads"} <= set(written["machine"])
    said = console.export_text()
    assert "remap\n" in said and "baseline\n" in said and "steps_alike" in said
    ratios = (("step_mean_s", 1.2), ("step_p99_s", 0.8), ("preemptions", float("nan")))
    table = twins.table({name: {"real": 1.0, "twin": 1.0, "ratio": ratio} for name, ratio in ratios}).splitlines()
    assert table[1].endswith("1.200  beyond 10%") and table[2].endswith("0.800  within 25%")
    assert table[3].split() == ["preemptions", "1", "1"]


def test_a_real_run_that_fails_says_why() -> None:
    with pytest.raises(InvalidState, match="the real remap run ended with exit status 1") as caught:
        twins.measure("remap", DemoConfig(dtype="int3"))
    assert caught.value.fields == {"kind": "remap", "status": 1}
    assert "int3" in str(caught.value)
