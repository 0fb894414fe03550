"""vLLM engines as instances of a cluster, processes that Ray starts: killed while they serve, with answers as if they were not.

Without Ray, or this library's extra for clusters, these are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

import pytest
from conftest import HERE, Vllm, run

pytest.importorskip("ray", reason="needs the extra cluster")
pytest.importorskip("msgspec", reason="needs the extra cluster")

PYTHON_TESTS = HERE.parents[1] / "python"


@pytest.fixture(scope="module")
def said(vllm: Vllm) -> Any:
    """What cluster.py writes of a cluster of two instances."""
    out = vllm.folder / "cluster.json"
    model = vllm.folder / "bytes"
    path = os.pathsep.join([*filter(None, sys.path), str(PYTHON_TESTS)])
    shutil.copytree(vllm.folder / "tiny", model)
    made = f"from cluster_folder import byte_tokenizer; byte_tokenizer().save_pretrained({str(model)!r})"
    run(["-c", made], cwd=vllm.folder, timeout_s=120, PYTHONPATH=path)
    more = {"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    run([str(HERE / "cluster.py"), str(model), str(out)], cwd=vllm.folder, timeout_s=900, **more)
    return json.loads(out.read_text())


@pytest.mark.parametrize("what", ["instance killed", "engine killed"])
def test_answers_are_the_same_when_a_process_is_killed(said: Any, what: str) -> None:
    """Of all ways to choose tokens; the batches of a restart are others, and the model's logits lie far apart."""
    assert said["calm"]["restarts"] == 0
    assert said[what]["restarts"] > 0
    for name, answer in said["calm"]["answers"].items():
        assert said[what]["answers"][name] == answer, name


def test_logprobs_come_with_each_token_and_those_of_the_prompt_once(said: Any) -> None:
    for each in ("calm", "instance killed", "engine killed"):
        for name, answer in said[each]["answers"].items():
            if name.startswith("logprobs"):
                assert [token for token, _ in answer["noted"]] == answer["tokens"]
                assert {count for _, count in answer["noted"]} == {2}
                assert answer["prompt"] > 0
            else:
                assert (answer["noted"], answer["prompt"]) == ([], 0)


def test_an_answer_follows_its_schema(said: Any) -> None:
    sys.path.insert(0, str(PYTHON_TESTS))
    from cluster_folder import byte_tokenizer

    for each in ("calm", "instance killed", "engine killed"):
        for name, answer in said[each]["answers"].items():
            if name.startswith("json"):
                assert answer["reason"] == "stop"
                found = json.loads(byte_tokenizer().decode(answer["tokens"], skip_special_tokens=True))
                assert found["a"] in ("yes", "no") and found["b"] in (True, False)


def test_instances_stay_alone_may_grow_and_leave_no_process(said: Any) -> None:
    assert said["groups"] == [1, 1]
    assert all(nbytes > 0 for nbytes in said["offers"])
    assert said["left"] == 0


def test_what_vllm_cannot_serve_is_refused_to_its_caller(said: Any) -> None:
    assert {name: error for name, (error, _) in said["refused"].items()} == dict.fromkeys(
        ("long", "token", "schema"), "InvalidArgument"
    )
