"""What users and requests set: the answers are those of SGLang without remap, with the same settings, while layers are away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Engines
from test_sglang import BURST, REMAP, TOKENS, assert_clean

OBJECT = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
GRAMMARS = [
    {"regex": "[0-9]{3}-[0-9]{40}"},
    {},
    {"json_schema": json.dumps({**OBJECT, "additionalProperties": False})},
]
PENALTIES = [
    {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    {},
    {"logit_bias": {"7": 5.0}},
]
# A token has a quarter of the bytes.
FP8 = {"REMAP_CAPACITY": "36MiB"}
LORA = {"enable_lora": True, "lora_backend": "torch_native", "max_loras_per_batch": 2, "lora_paths": {"one": "lora"}}
SETTINGS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, str]]] = {
    "lora": (LORA, [{}], {}),
    "structured outputs": ({"grammar_backend": "xgrammar", "skip_tokenizer_init": False}, GRAMMARS, {}),
    "penalties": ({}, PENALTIES, {}),
    "kv in e4m3": ({"kv_cache_dtype": "fp8_e4m3"}, [{}], FP8),
    "kv in e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, [{}], FP8),
}
SERVE = Path(__file__).parents[2] / "serve"
MADE = """
import json, pathlib, sys

sys.path.insert(0, sys.argv[1])
import cluster_folder, torch
from safetensors.torch import save_file

cluster_folder.byte_tokenizer().save_pretrained("tiny")
sizes = {"q_proj": 256, "k_proj": 128, "v_proj": 128, "o_proj": 256}
tensors = {}
for layer in range(8):
    for name, out in sizes.items():
        path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{path}.lora_A.weight"] = torch.randn(8, 256) * 0.1
        tensors[f"{path}.lora_B.weight"] = torch.randn(out, 8) * 0.1
folder = pathlib.Path("lora")
folder.mkdir(exist_ok=True)
save_file(tensors, folder / "adapter_model.safetensors")
described = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": sorted(sizes), "bias": "none"}
(folder / "adapter_config.json").write_text(json.dumps({**described, "base_model_name_or_path": "tiny"}))
"""


@pytest.fixture(scope="module")
def answers(engines: Engines, forks: Engines) -> list[Any]:
    """Without any setting. Makes what the settings need: a tokenizer of bytes, an adapter of rank 8."""
    made = engines.run("-c", MADE, str(SERVE))
    assert made.returncode == 0, made.stdout
    return forks.serve({**TOKENS, "max_total_tokens": 4096}, BURST).tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_of_sglang_alone(forks: Engines, answers: list[Any], name: str):
    engine, sampling, environment = SETTINGS[name]
    rounds = [{**BURST[0], "sampling": sampling, "lora": ["one", None] if engine is LORA else None}]
    stock = forks.serve({**TOKENS, **engine, "max_total_tokens": 4096}, rounds)
    remapped = forks.serve({**TOKENS, **engine}, rounds, **REMAP | environment)
    assert_clean(stock)
    assert_clean(remapped)
    assert remapped.tokens == stock.tokens != answers
    if sampling is GRAMMARS:
        assert len(stock.tokens[0][0]) == len("123-") + 40 + 1  # and the end of the text
    assert max(remapped.remapped) >= 1 and remapped.remapped[-1] == remapped.retracted == 0
