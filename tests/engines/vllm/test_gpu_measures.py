"""The measures of `bench/gpu` that serve with vLLM, small and on a CPU: what they count, not what they time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="runs where vLLM is installed: make test-engines")
pytest.importorskip("transformers", reason="makes a model")

from bench.gpu.measures import vllm_burst
from bench.gpu.models import LLAMA_3_8B
from bench.gpu.registry import Wrong

SHAPE = replace(LLAMA_3_8B, layers=8, hidden=256, ffn=704, heads=4, kv_heads=2, vocabulary=512)
CASE = vllm_burst.Case(
    SHAPE, "float32", 9 << 20, requests=12, output=120, block_tokens=32, max_model_len=512, limit_s=300.0
)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_burst_in_small_memory_is_preempted_without_remap_and_answered_alike(tmp_path: Path) -> None:
    model = vllm_burst.save_model(CASE, tmp_path / "model", "cpu")
    found = {each.name: each for each in vllm_burst.compare(None, "small", CASE, model, 1)}  # type: ignore[arg-type]
    sides = ("ample", "stock", "remap, slowdown 0.5")
    preempted = [found[f"small, {side}, preemptions"].value for side in sides]
    assert preempted[0] == 0 < preempted[1] and preempted[2] < preempted[1]
    for side in (*sides, "remap"):
        same = found[f"small, {side}, answers as with ample KV"]
        assert same.value >= same.n - 1, side  # rows of another batch may round otherwise
    assert max(found["small, remap, slowdown 0.5, tokens/s (us: between tokens)"].detail["growth"]) > 0


def test_an_engine_that_does_not_start_says_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(Wrong, match=r"the remap engine ended with code 1.*none"):
        vllm_burst.run_side(CASE, "remap", tmp_path / "none")
