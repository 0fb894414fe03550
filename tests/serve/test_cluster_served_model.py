"""What an instance of a served model is laid out as, from a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("msgspec")

import torch
from cluster_folder import save_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from remap.errors import InvalidArgument
from remap_serve.cluster.served_model import KV_TOKENS, check_files, ends_of, layout_of, make, shapes, tokenizer_of
from remap_serve.engine import Request, SamplingParams

MIB = 1 << 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_give_the_layout_of_the_loaded_model(tmp_path: Path, dtype: str) -> None:
    save_model(tmp_path, dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    for memory in (None, 3 * MIB):
        assert layout_of(shapes(str(tmp_path)), memory) == layout_of(loaded, memory)


def test_tied_weights_count_once(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=5000, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert layout_of(shapes(str(tmp_path)), None) == layout_of(loaded, None)


def test_memory_is_weights_and_kv_and_all_of_it_may_be_kv(tmp_path: Path) -> None:
    save_model(tmp_path)
    model = shapes(str(tmp_path))
    plain = layout_of(model, None)
    assert plain.spec.min_blocks * plain.spec.block_tokens >= KV_TOKENS and plain.positions == 256
    given = layout_of(model, 3 * MIB + 1)
    assert given.capacity <= 3 * MIB and given.capacity % given.page_bytes == 0
    assert given.spec.max_blocks * given.spec.block_bytes > given.capacity
    assert given.spec.host_blocks == 0
    swaps = layout_of(model, 3 * MIB + 1, swap=MIB)
    assert swaps.spec.host_blocks == MIB // given.spec.block_bytes and swaps.capacity == given.capacity
    with pytest.raises(InvalidArgument) as caught:
        layout_of(model, 64 << 10)
    least = int(str(caught.value.minimum))
    assert layout_of(model, least).spec.min_blocks >= 1
    with pytest.raises(InvalidArgument):
        layout_of(model, least - 1)


def test_a_folder_without_a_model_is_refused_and_without_a_tokenizer_is_not(tmp_path: Path) -> None:
    for call in (lambda: shapes(str(tmp_path)), lambda: make("a", str(tmp_path), None, 1)):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert (caught.value.field, caught.value.value) == ("model", str(tmp_path))
    assert tokenizer_of(str(tmp_path)) is None
    assert ends_of(str(tmp_path), None) == frozenset()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def without_header(file: Path) -> None:
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])


def other_names(file: Path) -> None:
    """What lacks a name is drawn at random by transformers."""
    tensors = load_file(file)
    save_file({name.replace("layers.2.mlp", "layers.2.other"): each for name, each in tensors.items()}, file)


def other_shapes(file: Path) -> None:
    tensors = load_file(file)
    save_file({name: each[:5].clone() if "layers.2.mlp.up" in name else each for name, each in tensors.items()}, file)


@pytest.mark.parametrize(
    ("name", "edit", "of_headers"),
    [
        ("model.safetensors", cut, True),
        ("model.safetensors", without_header, True),
        ("model.safetensors", Path.unlink, False),
        ("model.safetensors", other_names, False),
        ("model.safetensors", other_shapes, False),
        ("config.json", cut, False),
        ("config.json", lambda file: file.write_text(file.read_text().replace("64,", '"big",')), False),
        ("tokenizer.json", cut, False),
        ("tokenizer.json", lambda file: file.write_text('{"a": 1}'), False),
    ],
)
def test_broken_files_are_refused_in_one_sentence(
    tmp_path: Path, name: str, edit: Callable[[Path], object], of_headers: bool
) -> None:
    save_model(tmp_path)
    edit(tmp_path / name)
    call: Callable[[], object] = lambda: make("a", str(tmp_path), 3 * MIB, 1)  # noqa: E731
    if of_headers:
        call = lambda: check_files(str(tmp_path))  # noqa: E731
    elif name == "config.json":
        call = lambda: shapes(str(tmp_path))  # noqa: E731
    elif name == "tokenizer.json":
        call = lambda: tokenizer_of(str(tmp_path))  # noqa: E731
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert (caught.value.field, caught.value.value) == ("model", str(tmp_path))
    assert "\n" not in str(caught.value)


def test_whole_files_are_not_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    check_files(str(tmp_path))
    check_files("owner/model-of-a-hub")


def test_an_instance_of_a_folder_answers_as_the_model_does(tmp_path: Path) -> None:
    save_model(tmp_path)
    assert ends_of(str(tmp_path), tokenizer_of(str(tmp_path))) == {256}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = loaded.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=9, do_sample=False)[0, 3:].tolist()
    threads = torch.get_num_threads()
    instance = make("a", str(tmp_path), 3 * MIB, threads)
    try:
        described = instance.describe()
        assert described.host_bytes_per_s > 0.0
        assert described.memory_bytes <= 3 * MIB and described.fingerprint.layers == 4
        instance.recover(1)
        instance.submit(Request("r", (3, 1, 4), SamplingParams(max_tokens=9)), 1)
        found, reason = list[int](), None
        while reason is None:
            outputs, _ = instance.poll(10.0)
            for each in outputs:
                found += each.tokens
                reason = each.finish_reason
        assert (found, reason) == (expected, "length")
    finally:
        instance.close()
