"""What a server with vLLM instances says of their model, and refuses, before it starts them. vLLM is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from cluster_folder import byte_tokenizer, save_model

from remap.errors import InvalidArgument
from remap_serve.cli.cluster import _alone, _vllm
from remap_serve.cluster.control import GroupPolicy
from remap_serve.cluster.vllm_served import engine_args_of, vllm_model

KV_BYTES = 2 * 4 * 2 * 16 * 4 * (8192 + 512)
"""Of the folder's model: keys and values, layers, heads, width, float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("model")
    save_model(found)
    return str(found)


def test_the_model_is_known_by_its_configuration(folder: str) -> None:
    served, arguments = vllm_model("some/model/", folder, {})
    assert (served.name, served.positions, served.stop_token_ids) == ("model", 256, {256})
    assert served.grammars
    assert arguments == {"kv_bytes": KV_BYTES, "positions": 256, "engine_args": {}}


def test_its_length_and_its_numbers_may_be_others(folder: str) -> None:
    served, arguments = vllm_model("m", folder, {"max_model_len": 100, "dtype": "bfloat16"})
    assert (served.positions, arguments["positions"], arguments["kv_bytes"]) == (100, 100, KV_BYTES // 2)
    for length in (257, 1, "100"):
        with pytest.raises(InvalidArgument) as caught:
            vllm_model("m", folder, {"max_model_len": length})
        assert caught.value.fields == {"field": "engine-args", "value": length}


def test_a_model_without_a_tokenizer_takes_tokens_and_no_grammar(folder: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    served, arguments = vllm_model("m", str(tmp_path), {})
    assert (served.tokenizer, served.grammars) == (None, False)
    assert arguments["engine_args"] == {"skip_tokenizer_init": True}


def test_what_is_no_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InvalidArgument) as caught:
        vllm_model("m", str(tmp_path), {})
    assert caught.value.fields == {"field": "model", "value": "m"}


@pytest.mark.parametrize("text", ["[1]", "{", "1", "max_model_len=3", "[" * 60_000])
def test_arguments_that_are_no_object_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        engine_args_of(text)
    assert caught.value.fields == {"field": "engine-args", "value": text}


def test_the_factory_takes_what_there_is(folder: str) -> None:
    assert engine_args_of(None) == {}
    factory, served, more = _vllm(folder, '{"max_model_len": 64}')
    assert (factory, served.positions, more["model"]) == ("remap_serve.cluster.vllm_engine:make", 64, folder)


def test_engines_that_do_not_merge_serve_alone_and_keep_their_own_host_kv() -> None:
    for policy in ("remap", "alone"):
        assert _alone(GroupPolicy(policy, 2), None).name == "alone"
    for policy in ("kunserve", "pipeline"):
        with pytest.raises(InvalidArgument) as caught:
            _alone(GroupPolicy(policy, 2), None)
        assert caught.value.fields == {"field": "policy", "value": policy}
    with pytest.raises(InvalidArgument) as caught:
        _alone(GroupPolicy("remap"), "1GiB")
    assert caught.value.fields == {"field": "host_kv", "value": "1GiB"}
