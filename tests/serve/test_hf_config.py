"""Models from a checkpoint's config.json: the bytes that transformers' own modules have; what is not counted is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from remap.errors import InvalidArgument
from remap.policy.hardware import Model, model
from remap_serve.cli.plan import plan as command
from remap_serve.sim.hf_config import FAMILIES, find_model, read_config

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "vocab_size": 128}
BASE = {**HEADS, **SIZES, "max_position_embeddings": 256, "dtype": "bfloat16"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "head_dim": 32},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {"model_type": "qwen3", "head_dim": 32},
    {"model_type": "gemma", "head_dim": 32},
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "qwen3_moe", "head_dim": 32, "num_experts": 8, **EXPERTS},
    {"model_type": "qwen2_moe", "num_experts": 8, "shared_expert_intermediate_size": 48, **EXPERTS},
    {"model_type": "gpt_oss", "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    {"model_type": "glm4_moe", "head_dim": 32, "attention_bias": True, "use_qk_norm": True, **SHARED},
    {"model_type": "glm4_moe", "head_dim": 32, **SHARED, "first_k_dense_replace": 0},
    {"model_type": "deepseek_v2", "q_lora_rank": None, **LATENT, **SHARED},
    {"model_type": "deepseek_v3", "q_lora_rank": 24, **LATENT, **SHARED, "num_nextn_predict_layers": 0},
    {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64},
    {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256, "n_inner": None},
]


def write(folder: Path, values: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def refused(field: str, path: Path, **named: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        read_config(path, **named)
    assert field in caught.value.field, str(caught.value)
    return caught.value


def test_every_family_is_tried() -> None:
    assert {each["model_type"] for each in CONFIGS} == set(FAMILIES)


@pytest.mark.parametrize("values", CONFIGS, ids=lambda values: "-".join(map(str, values.values())))
def test_bytes_are_those_of_the_modules(values: dict[str, Any], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="counts are compared with modules")
    transformers = pytest.importorskip("transformers", reason="counts are compared with its modules")
    found, notes = read_config(write(tmp_path / "tiny", {**BASE, **values}))
    assert len(notes) == (values["model_type"] == "gpt_oss") + bool(found.dense_layers) and found.name == "tiny"
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path / "tiny"))
    assert found.weight_bytes == 2 * sum(each.numel() for each in real.parameters())
    layers = next(each for each in real.modules() if isinstance(each, torch.nn.ModuleList))
    assert found.layers + found.dense_layers == len(layers) == 3
    assert found.layer_bytes == 2 * sum(each.numel() for each in layers[-1].parameters())
    kept = (
        24 if "kv_lora_rank" in values else 2 * 2 * values.get("head_dim", 16)
    )  # elements; OPT and GPT-2 have 4 KV heads
    assert found.kv_bytes_per_token_layer == 2 * kept * (2 if values["model_type"] in ("opt", "gpt2") else 1)


def sized(hidden: int, heads: int, layers: int, vocab: int, context: int, **more: Any) -> dict[str, Any]:
    size = {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers, "vocab_size": vocab}
    return {**size, "max_position_embeddings": context, "torch_dtype": "float16", **more}


LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "intermediate_size": 14336}
QWEN = {"model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
QWEN |= {"moe_intermediate_size": 768, "num_key_value_heads": 4}
OSS = {
    "model_type": "gpt_oss",
    "intermediate_size": 2880,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
}
OSS |= {"num_experts_per_tok": 4, "quantization_config": {"quant_method": "mxfp4"}}
DEEPSEEK = {"model_type": "deepseek_v3", "intermediate_size": 18432, "moe_intermediate_size": 2048, "q_lora_rank": 1536}
DEEPSEEK |= {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
DEEPSEEK |= {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}
DEEPSEEK |= {"num_key_value_heads": 128, "quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Llama-3-8b", sized(4096, 32, 32, 128256, 8192, **LLAMA)),
        ("Qwen3-30B-A3B", sized(2048, 32, 48, 151936, 40960, **QWEN)),
        ("OPT-13b", sized(5120, 40, 40, 50272, 2048, model_type="opt", ffn_dim=20480)),
        ("gpt-oss-20b", sized(2880, 64, 24, 201088, 131072, **OSS, num_local_experts=32)),
        ("gpt-oss-120b", sized(2880, 64, 36, 201088, 131072, **OSS, num_local_experts=128)),
        ("DeepSeek-V3", sized(7168, 128, 61, 129280, 163840, **DEEPSEEK)),
    ],
)
def test_a_config_and_the_table_agree(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    assert read_config(write(tmp_path / name, values)) == find_model(name)
    assert find_model(name)[0] == model(name)


def test_dtypes_and_windows(tmp_path: Path) -> None:
    def read(values: dict[str, Any], **named: Any) -> tuple[Model, tuple[str, ...]]:
        return read_config(
            write(tmp_path / "m", {**BASE, "model_type": "mistral", "sliding_window": None, **values}), **named
        )

    assert read({"dtype": None})[1] and read({"dtype": None})[0].dtype_bytes == 2
    assert read({"dtype": "float32"})[0].dtype_bytes == 4
    assert read({"dtype": "float32"}, dtype="bf16")[0] == read({})[0]
    assert read({"quantization_config": {"quant_method": "fp8"}})[0].matrix_bytes == 1
    assert read({"quantization_config": {"quant_method": "awq"}}, dtype="fp8")[0].matrix_bytes == 1
    found, notes = read({"sliding_window": 100})
    assert found.context == 100 and len(notes) == 1


@pytest.mark.parametrize(
    ("field", "of", "values"),
    [
        *(("model", wrong, {}) for wrong in ("gemma2", "mamba", None, ["llama"])),
        *(("hidden_size", "llama", {"hidden_size": wrong}) for wrong in (None, "64")),
        *(("num_hidden_layers", "llama", {"num_hidden_layers": wrong}) for wrong in (0, 10**50)),
        ("num_attention_heads", "llama", {"num_attention_heads": True}),
        ("tie_word_embeddings", "llama", {"tie_word_embeddings": "yes"}),
        *(("dtype", "llama", {"dtype": wrong}) for wrong in ("float64", ["bfloat16"])),
        ("model", "llama", {"quantization_config": {"quant_method": "awq"}}),
        ("num_local_experts", "mixtral", {}),
        ("decoder_sparse_step", "qwen3_moe", {"num_experts": 4, **EXPERTS, "decoder_sparse_step": 2}),
        ("mlp_only_layers", "qwen2_moe", {"num_experts": 4, **EXPERTS, "mlp_only_layers": [1]}),
        ("moe_layer_freq", "deepseek_v3", {**SHARED, **LATENT, "moe_layer_freq": 2}),
        ("kv_lora_rank", "deepseek_v3", {**SHARED, **LATENT, "kv_lora_rank": 17}),
        ("first_k_dense_replace", "deepseek_v3", {**SHARED, **LATENT, "first_k_dense_replace": -1}),
        ("layers", "deepseek_v3", {**SHARED, **LATENT, "first_k_dense_replace": 3}),
        ("do_layer_norm_before", "opt", {"ffn_dim": 96, "do_layer_norm_before": False}),
    ],
)
def test_what_is_not_counted_is_refused_by_its_name(field: str, of: Any, values: Any, tmp_path: Path) -> None:
    refused(field, write(tmp_path / "m", {**BASE, "model_type": of, **values}))


def test_files_that_are_none(tmp_path: Path) -> None:
    refused("model", tmp_path / "missing")
    refused("model", tmp_path)
    for text in ("{", "[]", "[" * 100_000, "3"):
        (tmp_path / "config.json").write_text(text)
        refused("model", tmp_path)
    refused("dtype", write(tmp_path / "m", {**BASE, "model_type": "llama"}), dtype="int4")


def test_the_command_takes_a_path(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    folder = write(tmp_path / "mine", {**BASE, "model_type": "llama", "num_hidden_layers": 8})
    for given in (folder, folder / "config.json"):
        done = CliRunner().invoke(
            app,
            ["--machine", "L40S", "--model", str(given), "--donors", f"{given},OPT-6.7b", "--context", "64", "--json"],
        )
        assert done.exit_code == 0, done.output
        read = json.loads(done.output)
        assert read["model"]["name"] == "mine" and [each["model"] for each in read["donors"]] == ["mine", "OPT-6.7b"]
