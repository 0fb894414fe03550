"""OpenAI's own client against `remap cluster serve --engine vllm`, over a socket: whole answers and streams, and one while an
instance is killed.

Without Ray, `openai` or this library's extra for clusters, these are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import HERE, Vllm, end, environment, run

pytest.importorskip("ray", reason="needs the extra cluster")
pytest.importorskip("fastapi", reason="needs the extra cluster")
openai = pytest.importorskip("openai", reason="needs openai, which no extra brings")

PYTHON_TESTS = HERE.parents[1] / "python"
ARGUMENTS = {"max_model_len": 256, "enforce_eager": True, "dtype": "float32", "block_size": 32}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server(vllm: Vllm) -> Iterator[tuple[int, Any]]:
    """The process, and a client of it."""
    model = vllm.folder / "clients"
    path = os.pathsep.join([*filter(None, sys.path), str(PYTHON_TESTS)])
    shutil.copytree(vllm.folder / "tiny", model)
    made = f"from cluster_folder import byte_tokenizer; byte_tokenizer().save_pretrained({str(model)!r})"
    run(["-c", made], cwd=vllm.folder, timeout_s=120, PYTHONPATH=path)
    line = f"cluster serve --engine vllm --model {model} --instances 2 --memory 64MiB --port 0 --engine-args"
    log = vllm.folder / "clients.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "remap", *line.split(), json.dumps(ARGUMENTS)],
            env=environment(PYTHONPATH=path, VLLM_ENABLE_V1_MULTIPROCESSING="1"),
            cwd=vllm.folder,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "2 instances of clients answer at" in said, log.read_text()[-4000:]
        url = said.rpartition(" ")[2].strip()
        yield process.pid, openai.OpenAI(api_key="none", base_url=f"{url}/v1", timeout=600.0, max_retries=0)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    finally:
        end(process)


def below(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    children = [int(line) for line in found.stdout.split()]
    return children + [each for child in children for each in below(child)]


def actors(pid: int) -> list[int]:
    """The processes of the instances."""
    found = subprocess.run(["pgrep", "-f", "ray::_Actor"], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split() if int(line) in below(pid)]


def test_whole_answers_and_streams_are_the_same_text(server: tuple[int, Any]) -> None:
    _, client = server
    asked: dict[str, Any] = {"model": "clients", "prompt": "hello", "max_tokens": 24, "seed": 5, "temperature": 0.9}
    whole = client.completions.create(**asked, n=2, logprobs=2)
    assert [each.index for each in whole.choices] == [0, 1] and whole.usage.completion_tokens > 1
    assert len(whole.choices[0].logprobs.tokens) == len(whole.choices[0].token_ids)
    chunks = list(client.completions.create(**asked, n=2, stream=True, stream_options={"include_usage": True}))
    for number, choice in enumerate(whole.choices):
        text = "".join(each.choices[0].text for each in chunks if each.choices and each.choices[0].index == number)
        assert text == choice.text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chats_follow_a_schema_and_errors_are_the_clients(server: tuple[int, Any]) -> None:
    _, client = server
    asked: dict[str, Any] = {"model": "clients", "messages": [{"role": "user", "content": "hi"}]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    found = client.chat.completions.create(**asked, max_tokens=64, temperature=1.0, seed=1, response_format=form)
    assert json.loads(found.choices[0].message.content)["a"] in ("yes", "no")
    parts = [
        each.choices[0].delta.content
        for each in client.chat.completions.create(
            **asked, max_tokens=64, temperature=1.0, seed=1, response_format=form, stream=True
        )
    ]
    assert "".join(parts) == found.choices[0].message.content
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**asked, max_tokens=1000)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**asked | {"model": "another"})


def test_a_stream_goes_on_when_its_instance_is_killed(server: tuple[int, Any]) -> None:
    pid, client = server
    asked: dict[str, Any] = {
        "model": "clients",
        "max_tokens": 200,
        "temperature": 0.9,
        "extra_body": {"ignore_eos": True},
    }
    prompts = ["one", "two", "three", "four"]
    calm = [client.completions.create(**asked, prompt=each, seed=3).choices[0].text for each in prompts]
    streams = [client.completions.create(**asked, prompt=each, seed=3, stream=True) for each in prompts]
    found = [next(each).choices[0].text for each in streams]
    os.kill(actors(pid)[0], signal.SIGKILL)
    found = [text + "".join(each.choices[0].text for each in stream) for text, stream in zip(found, streams)]
    assert found == calm
