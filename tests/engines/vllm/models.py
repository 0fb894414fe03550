"""Small models with random weights, for engines that load folders: python models.py FOLDER

With weights large enough that every layer changes the next token: a wrong byte shows.

    tiny        llama, 8 layers, float32, 4 heads (so that two ranks can share them), embeddings not tied
    tiny-new    the same with other weights
    tied        like tiny, but tied: one tensor is the embedding and the head
    tied-new    the same with other weights
    tiny-latent deepseek v2: latent attention; two dense layers, then four experts a layer and a shared one
    tiny-neox   gpt-neox
    tiny-eagle  EAGLE's drafter for it: one layer
    tiny-lora   an adapter of it, of rank 8, on every projection of the attention
    tiny-moe    mixtral: four experts a layer, of which a token takes two
    tiny-window gemma 3: every second layer sees the last 64 tokens
    tiny-window-L-F  with L layers, of which each (L / F)th sees all: L / F groups of layers, each with KV blocks of its own
    tiny-int8   its linear layers in 8 bits (compressed-tensors, weights per channel, activations per token)
    tiny-int4   and in 4 bits (weights in groups of 32)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

VOCABULARY, HIDDEN, LAYERS = 512, 256, 8


def tiny(folder: Path, seed: int = 0, tied: bool = False) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=704,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.08,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,
}


def moe(folder: Path) -> None:
    torch.manual_seed(2)
    config = MixtralConfig(**SHAPE, intermediate_size=192, num_local_experts=4, tie_word_embeddings=False)
    MixtralForCausalLM(config).float().save_pretrained(folder)


def window(folder: Path, layers: int = LAYERS, full: int = LAYERS // 2) -> None:
    torch.manual_seed(3)
    every = layers // full
    kinds = ["full_attention" if layer % every == every - 1 else "sliding_attention" for layer in range(layers)]
    shape = {**SHAPE, "num_hidden_layers": layers}
    config = Gemma3TextConfig(**shape, intermediate_size=704, sliding_window=64, layer_types=kinds, pad_token_id=0)
    Gemma3ForCausalLM(config).float().save_pretrained(folder)


def latent(folder: Path) -> None:
    """Latent attention of the sizes that vLLM's kernel for CPUs has."""
    torch.manual_seed(4)
    heads = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": None}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 96}
    groups = {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "first_k_dense_replace": 2}
    shape = {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
    config = DeepseekV2Config(
        **shape, **heads, **experts, **groups, num_key_value_heads=4, intermediate_size=704, tie_word_embeddings=False
    )
    DeepseekV2ForCausalLM(config).float().save_pretrained(folder)


def neox(folder: Path) -> None:
    """vLLM has none of its own: it takes what transformers has."""
    torch.manual_seed(6)
    shape = {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
    GPTNeoXForCausalLM(GPTNeoXConfig(**shape, intermediate_size=704)).float().save_pretrained(folder)


def eagle(source: Path, folder: Path) -> None:
    """Its layer is the model's first one: it guesses badly, and some drafts are accepted."""
    torch.manual_seed(7)
    layer, unused = "model.layers.0.", ("input_layernorm.weight",)
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if name.startswith(layer) and not name.endswith(unused)
    }
    tensors["fc.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], 1)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))


def lora(folder: Path, rank: int = 8) -> None:
    torch.manual_seed(1)
    sizes = {"q_proj": HIDDEN, "k_proj": HIDDEN // 2, "v_proj": HIDDEN // 2, "o_proj": HIDDEN}
    tensors = {}
    for layer in range(LAYERS):
        for name, out in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, HIDDEN) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, rank) * 0.1
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": sorted(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**described, "base_model_name_or_path": "tiny"}))


def compressed(
    source: Path, folder: Path, layout: str, scheme: dict[str, Any], pack: Callable[[str, Any], dict[str, Any]]
) -> None:
    """The model with each of its layers' linear weights replaced by what `pack` makes of it."""
    folder.mkdir(parents=True)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors |= pack(name, tensor) if name.endswith("_proj.weight") else {name: tensor}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"all": {"targets": ["Linear"], **scheme}},
    }
    (folder / "config.json").write_text(json.dumps(config))


def int8(source: Path, folder: Path) -> None:
    def pack(name: str, tensor: Any) -> dict[str, Any]:
        scale = tensor.abs().amax(1, keepdim=True) / 127
        return {name: torch.round(tensor / scale).to(torch.int8), f"{name}_scale": scale}

    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    weights, inputs = {"strategy": "channel", "dynamic": False}, {"strategy": "token", "dynamic": True}
    compressed(source, folder, "int-quantized", {"weights": eight | weights, "input_activations": eight | inputs}, pack)


def int4(source: Path, folder: Path, group: int = 32) -> None:
    def pack(name: str, tensor: Any) -> dict[str, Any]:
        rows, columns = tensor.shape
        groups = tensor.view(rows, -1, group)
        scale = groups.abs().amax(2, keepdim=True) / 7
        values = (torch.round(groups / scale).clamp(-8, 7) + 8).to(torch.int64).view(rows, columns // 8, 8)
        words = (values << torch.arange(0, 32, 4)).sum(2)
        packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        shape = torch.tensor([rows, columns])
        return {f"{name}_packed": packed, f"{name}_scale": scale.squeeze(2).bfloat16(), f"{name}_shape": shape}

    four = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    compressed(source, folder, "pack-quantized", {"weights": four}, pack)


def make(root: Path) -> None:
    tiny(root / "tiny")
    tiny(root / "tiny-new", seed=77)
    tiny(root / "tied", seed=5, tied=True)
    tiny(root / "tied-new", seed=6, tied=True)
    moe(root / "tiny-moe")
    window(root / "tiny-window")
    window(root / "tiny-window-6-2", 6, 2)
    window(root / "tiny-window-7-1", 7, 1)
    latent(root / "tiny-latent")
    neox(root / "tiny-neox")
    eagle(root / "tiny", root / "tiny-eagle")
    lora(root / "tiny-lora")
    int8(root / "tiny", root / "tiny-int8")
    int4(root / "tiny", root / "tiny-int4")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
