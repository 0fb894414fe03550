"""`remap offline` in processes, with a model on a session: killed, interrupted and resumed, it gives the same tokens."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from effort import some

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("typer")

from models import Rig, kv_spec, make  # noqa: E402
from test_cli import run as command  # noqa: E402
from test_offline import answers  # noqa: E402

from remap_serve.engine import LLMEngine, Request, SamplingParams, generate_offline  # noqa: E402

VOCAB = 101
# As `python -m remap`; a background shell starts its children without the handler.
COMMAND = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("remap", run_name="__main__", alter_sys=True)
"""


def write_requests(path, count, seed=0):
    rng, lines = random.Random(seed), []
    for index in range(count):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 40))]
        one = {"custom_id": f"r{index}", "prompt": prompt, "max_tokens": rng.randint(1, 12)}
        if index % 3 == 0:
            one |= {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": index}
        lines.append(one)
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return lines


def offline(folder, *more):
    files = (str(folder / "in.jsonl"), str(folder / "out.jsonl"))
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "offline", "--model", str(folder / "model"), *more, *files],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_answers(folder, process, count):
    """Return when the file has so many lines. The process may end before."""
    path = folder / "out.jsonl"
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < count):
        time.sleep(0.002)


@pytest.fixture
def folder(tmp_path):
    make("llama").save_pretrained(tmp_path / "model")
    return tmp_path


def engine_for(rig, **more):
    rig.hooks.remove()
    return LLMEngine(rig.model, rig.tenant, **more)


def uninterrupted(lines):
    """Line -> (custom_id, tokens), by the engine's own loop."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed")
    requests = [
        Request(
            one["custom_id"], tuple(one["prompt"]), SamplingParams(**{name: one[name] for name in names if name in one})
        )
        for one in lines
    ]
    model = make("llama")
    with Rig(model, kv=kv_spec(model, min_blocks=300, max_blocks=400)) as rig:
        outputs = engine_for(rig).run(requests).outputs
    return {number: (request.id, outputs[request.id].tokens) for number, request in enumerate(requests, 1)}


@pytest.mark.slow
def test_prompts_are_each_answered_once_with_the_same_tokens_however_often_it_is_killed(folder):
    count = some(300, 1000)
    lines, rng = write_requests(folder / "in.jsonl", count), random.Random(7)
    moments = sorted(rng.sample(range(1, count * 9 // 10), some(2, 3)))
    for moment in moments:
        process = offline(folder)
        wait_for_answers(folder, process, moment)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
        assert 0 < (folder / "out.jsonl").read_bytes().count(b"\n") < count
    process = offline(folder)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert f"{count} of {count} requests are answered" in " ".join(said.split())
    assert answers(folder / "out.jsonl") == uninterrupted(lines)


@pytest.mark.slow
def test_an_interrupt_says_how_to_go_on_and_lines_with_errors_set_the_exit_code(folder):
    count = some(200, 600)
    lines = write_requests(folder / "in.jsonl", count)
    with (folder / "in.jsonl").open("a") as file:
        file.write('{"broken\n' + json.dumps({"custom_id": "text", "prompt": "no tokenizer"}) + "\n")
    for _ in range(5):  # on a busy machine it may be done before it is interrupted
        process = offline(folder, "--max-num-seqs", "1")
        wait_for_answers(folder, process, 20)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        if len(answers(folder / "out.jsonl")) < count + 2:
            break
        (folder / "out.jsonl").unlink()
    assert process.returncode == 1 and "Traceback" not in errors
    assert f"of {count + 2} requests are answered; the same command goes on from there" in " ".join(errors.split())
    assert 0 < len(answers(folder / "out.jsonl")) < count + 2
    process = offline(folder, "--max-num-seqs", "8", "--max-batch-tokens", "64")
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    said = " ".join(said.split())
    assert f"{count + 2} of {count + 2} requests are answered in" in said and "2 of them with an error" in said
    wanted = uninterrupted(lines) | {count + 1: (None, None), count + 2: ("text", None)}
    assert answers(folder / "out.jsonl") == wanted


@pytest.mark.parametrize("runner", ["cpu", "gpu"])
def test_answers_are_those_of_the_engine_and_bad_lines_get_theirs(tmp_path, runner):
    lines = write_requests(tmp_path / "in.jsonl", 12)
    with (tmp_path / "in.jsonl").open("a") as file:
        for prompt in ([1] * 200, [VOCAB], [-1], "text"):
            file.write(json.dumps({"custom_id": str(prompt)[:20], "prompt": prompt}) + "\n")
    model = make("llama")
    with Rig(model, kv=kv_spec(model, min_blocks=60)) as rig:
        engine = engine_for(rig, runner=runner, max_num_seqs=4, session=rig.session)
        done = generate_offline(engine, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
        assert rig.kv.live_blocks == 0
    assert (done.total, done.answered, done.errors) == (16, 16, 4)
    found = answers(tmp_path / "out.jsonl")
    assert {number: found[number] for number in range(1, 13)} == uninterrupted(lines)
    said = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    messages = {one["line"]: one["error"]["message"] for one in said if "error" in one}
    assert sorted(messages) == [13, 14, 15, 16]
    for number, text in zip(range(13, 17), ("215 positions", "token 101", "token -1", "no tokenizer")):
        assert text in messages[number]


def test_wrong_files_are_refused_with_2_before_a_model_is_loaded(tmp_path):
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(requests, 2)
    for arguments, text in (
        ((str(tmp_path / "none"), str(output)), "cannot be opened"),
        ((str(requests), str(requests)), "the file of requests itself"),
        ((str(requests), str(output), "--memory", "12 apples"), "memory must be an int of bytes"),
        ((str(requests), str(output)), "model: /nowhere cannot be loaded"),
    ):
        found = command("offline", "--model", "/nowhere", *arguments)
        assert found.exit_code == 2, found.output
        assert text in " ".join(found.output.split()) and "Traceback" not in found.output


def test_memory_that_holds_nothing_is_refused_with_the_numbers(folder):
    write_requests(folder / "in.jsonl", 2)
    files = (str(folder / "in.jsonl"), str(folder / "out.jsonl"))
    for options, text in (
        (("--memory", "64KiB", "--host-kv", "64MiB"), "memory must be"),
        (("--host-kv", "1KiB"), "host memory must hold the KV of one request"),
        (("--ratio", "1:1"), "activations would save nothing"),  # grouped queries
        (("--ratio", "0:0"), "ratio must be auto, or two whole numbers"),
        (("--ratio", "half"), "ratio must be auto, or two whole numbers"),
    ):
        found = command("offline", "--model", str(folder / "model"), *options, *files)
        assert found.exit_code == 2 and text in " ".join(found.output.split()), found.output
    for options, text in (
        ((), "2 of 2 requests are answered"),
        (("--host-kv", "64MiB"), "0:1, activations would save"),
    ):
        found = command("offline", "--model", str(folder / "model"), *options, *files)
        assert found.exit_code == 0 and text in " ".join(found.output.split()), found.output
        (folder / "out.jsonl").unlink()


def test_a_model_larger_than_the_memory_is_served(tmp_path):
    """With the smallest memory that is enough, as the error names it; and in two runs, with two mixtures."""
    config = transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        ffn_dim=1024,
        num_hidden_layers=10,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=256,
    )
    model = transformers.OPTForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    lines = write_requests(tmp_path / "in.jsonl", 9)
    weights = sum(value.numel() * value.element_size() for value in model.parameters())
    files = ("--max-num-seqs", "4", "--max-batch-tokens", "64", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    outputs = []
    for ratio in ("0:1", "1:0", "1:1", "auto"):
        options = ("--model", str(tmp_path / "model"), "--host-kv", "8MiB", "--ratio", ratio)
        found = command("offline", *options, "--memory", "1MiB", *files)
        needed = re.search(r"memory must be ([0-9.]+) MiB", " ".join(found.output.split()))
        assert found.exit_code == 2 and needed
        # Of the least memory everything is for KV alone, without room to make any again.
        enough = int((1.1 if ratio == "auto" else 1.01) * float(needed[1]) * 2**20)
        assert enough < 0.8 * weights
        found = command("offline", *options, "--memory", f"{enough}B", *files)
        assert found.exit_code == 0, found.output
        said = " ".join(found.output.split())
        assert ("by measured times: " if ratio == "auto" else f"activations to KV {ratio}, as asked for") in said
        outputs.append({number: tokens for number, (_, tokens) in answers(tmp_path / "out.jsonl").items()})
        (tmp_path / "out.jsonl").unlink()
    assert len(outputs[0]) == len(lines) and all(one == outputs[0] for one in outputs)
