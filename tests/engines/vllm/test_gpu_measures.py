"""The measures of `bench/gpu` that serve with vLLM, small and on a CPU: what they count, not what they time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="runs where vLLM is installed: make test-engines")
pytest.importorskip("transformers", reason="makes a model")

from bench.gpu import http_load
from bench.gpu.context import Skip
from bench.gpu.measures import vllm_burst, vllm_sharing
from bench.gpu.models import LLAMA_3_8B
from bench.gpu.registry import Wrong
from bench.gpu.results import Figure

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


SHARING = vllm_sharing.Sharing(
    CASE, 2, models=2, rounds=1, every_s=5.0, limit_s=900.0, device="cpu", page_bytes="64KiB", flags=()
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_burst.save_model(CASE, tmp_path_factory.mktemp("sharing") / "model", "cpu")


def sharing(side: str, model: Path, **more: Any) -> dict[str, Figure]:
    """The figures of one side, without its name; all answers are stock's."""
    case = replace(SHARING, **more)
    wanted = vllm_sharing.reference(case, model)
    found = {
        each.name[len(f"t, {side}, ") :]: each for each in vllm_sharing.serve("t", case, side, model, wanted, lambda: 0)
    }
    same = found["answers as with ample KV"]
    assert same.n == 24 and same.value >= same.n - 1  # rows of another batch may round otherwise
    assert found["start of a server"].n == 2 and found["first token, P99"].n == 24 and found["tokens/s"].value > 0
    assert (
        0
        <= found["gap between tokens, P50"].value
        <= found["gap between tokens, P99"].value
        <= found["longest gap"].value
    )
    return found


def test_servers_on_a_broker_preempt_less_than_in_static_parts(model: Path) -> None:
    static, remap = sharing("static parts", model), sharing("remap", model)
    assert remap["preemptions"].value < static["preemptions"].value
    assert remap["layers that were KV cache"].value > 0 and "layers that were KV cache" not in static


def test_servers_whose_weights_do_not_fit_together_share_a_broker(model: Path) -> None:
    cold = sharing("remap", model, room=1)["layers that were KV cache"].detail["remap_cold_layers"]
    assert max(cold) > 0
    with pytest.raises(Skip, match="do not hold weights"):
        sharing("static parts", model, room=1)


def test_sleep_mode_with_a_double_of_its_two_posts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sleeps on a GPU alone. Here the servers stay awake, and the double checks who would be."""
    awake: list[int] = []
    posts: list[str] = []

    async def double_of_post(port: int, path: str) -> None:
        posts.append(path)
        if path == "/wake_up":
            assert awake == []
            awake.append(port)
        elif port in awake:  # not behind its start
            awake.remove(port)

    monkeypatch.setattr(vllm_sharing, "post", double_of_post)
    monkeypatch.setattr(http_load, "post", double_of_post)
    monkeypatch.setattr(vllm_sharing, "SLEEP_FLAGS", ())
    found = sharing("sleep mode", model)
    assert found["a change of the awake model"].n == posts.count("/wake_up") >= 2 and len(awake) == 1
    assert found["preemptions"].value == 0
