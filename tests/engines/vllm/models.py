"""Small models with random weights, for engines that load folders: python models.py FOLDER

With weights large enough that every layer changes the next token: a wrong byte shows.

    tiny        llama, 8 layers, float32, 4 heads (so that two ranks can share them), embeddings not tied
    tiny-new    the same with other weights
    tied        like tiny, but tied: one tensor is the embedding and the head
    tied-new    the same with other weights
    tiny-eagle  EAGLE's drafter for it: one layer
    tiny-eagle3 EAGLE-3's
    tiny-mtp    deepseek v3 (families.py), with a layer that drafts
    tiny-lora   an adapter of it, of rank 8, on every projection of the attention
    tiny-int8   its linear layers in 8 bits (compressed-tensors, weights per channel, activations per token)
    tiny-int4   and in 4 bits (weights in groups of 32); tiny-gptq, tiny-awq: as those pack them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
import families

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


def eagle3(source: Path, folder: Path) -> None:
    """As `eagle`, from the last of three hidden states of the model."""
    layer, drafted = "model.layers.0.", {}
    tensors = load_file(source / "model.safetensors")
    for name in (each for each in tensors if each.startswith(layer)):
        value, reads = tensors[name], name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        value = (
            torch.cat([torch.zeros_like(value), value], 1) if reads else value
        )  # the token before, and what is hidden
        drafted[name.replace(layer, "midlayer.")] = value
    drafted |= {name.removeprefix("model."): tensors[name].clone() for name in ("model.norm.weight", "lm_head.weight")}
    drafted["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN)
    drafted["fc.weight"] = torch.cat([torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)], 1)
    folder.mkdir(parents=True)
    save_file(drafted, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps(config))


def mtp(source: Path, folder: Path) -> None:
    """Its drafting layer is the model's last one."""
    if not source.exists():
        families.save(source.name, source)
    last, at = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    tensors = load_file(source / "model.safetensors")
    drafted = {name.replace(last, at): value.clone() for name, value in tensors.items() if name.startswith(last)}
    ends = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head", "shared_head.norm": "model.norm"}
    drafted |= {f"{at}{new}.weight": tensors[f"{old}.weight"].clone() for new, old in ends.items()}
    drafted |= {f"{at}{norm}.weight": torch.ones(HIDDEN) for norm in ("enorm", "hnorm")}
    drafted[f"{at}eh_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], 1)
    folder.mkdir(parents=True)
    save_file({**tensors, **drafted}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


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


def quantised(source: Path, folder: Path, pack: Callable[[str, Any], dict[str, Any]], **how: Any) -> None:
    """The model with each of its layers' linear weights replaced by what `pack` makes of it. how: its quantization_config."""
    folder.mkdir(parents=True)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors |= pack(name, tensor) if name.endswith("_proj.weight") else {name: tensor}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))


def compressed(source: Path, folder: Path, layout: str, scheme: dict[str, Any], pack: Callable[..., Any]) -> None:
    how = {"format": layout, "quantization_status": "compressed", "ignore": ["lm_head"]}
    groups = {"all": {"targets": ["Linear"], **scheme}}
    quantised(source, folder, pack, quant_method="compressed-tensors", config_groups=groups, **how)


def int8(source: Path, folder: Path) -> None:
    def pack(name: str, tensor: Any) -> dict[str, Any]:
        scale = tensor.abs().amax(1, keepdim=True) / 127
        return {name: torch.round(tensor / scale).to(torch.int8), f"{name}_scale": scale}

    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    weights, inputs = {"strategy": "channel", "dynamic": False}, {"strategy": "token", "dynamic": True}
    compressed(source, folder, "int-quantized", {"weights": eight | weights, "input_activations": eight | inputs}, pack)


GROUP = 32  # weights with one scale


def in_four(tensor: Any) -> tuple[Any, Any]:
    """Weights (out, in) as numbers from 0 to 15, of which 8 is zero, and their scales (out, groups)."""
    groups = tensor.view(tensor.shape[0], -1, GROUP)
    scale = groups.abs().amax(2, keepdim=True) / 7
    return (torch.round(groups / scale).clamp(-8, 7) + 8).to(torch.int64).view(tensor.shape), scale.squeeze(2)


def words(numbers: Any) -> Any:
    """Eight numbers of 4 bits, along the last dimension, in each word."""
    found = (numbers.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


def int4(source: Path, folder: Path) -> None:
    def pack(name: str, tensor: Any) -> dict[str, Any]:
        numbers, scale = in_four(tensor)
        shape = torch.tensor(tensor.shape)
        return {f"{name}_packed": words(numbers), f"{name}_scale": scale.bfloat16(), f"{name}_shape": shape}

    four = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    compressed(source, folder, "pack-quantized", {"weights": four}, pack)


def gptq(source: Path, folder: Path) -> None:
    def pack(name: str, tensor: Any) -> dict[str, Any]:
        numbers, scale = in_four(tensor)
        inputs, zeros = torch.arange(tensor.shape[1]), torch.full_like(scale.t(), 7, dtype=torch.int64)  # less one
        packed = {"qweight": words(numbers).t(), "qzeros": words(zeros), "scales": scale.t().half()}
        packed["g_idx"] = (inputs // GROUP).to(torch.int32)
        return {name.removesuffix("weight") + part: value.contiguous() for part, value in packed.items()}

    quantised(source, folder, pack, quant_method="gptq", bits=4, group_size=GROUP, desc_act=False, sym=True)


def awq(source: Path, folder: Path) -> None:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(name: str, tensor: Any) -> dict[str, Any]:
        numbers, scale = in_four(tensor)
        shuffled = numbers.t().unflatten(1, (-1, 8))[..., order].flatten(1)
        packed = {"qweight": words(shuffled), "qzeros": words(torch.full_like(scale.t(), 8, dtype=torch.int64))}
        packed["scales"] = scale.t().half()
        return {name.removesuffix("weight") + part: value.contiguous() for part, value in packed.items()}

    quantised(source, folder, pack, quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="gemm")


def make(root: Path) -> None:
    tiny(root / "tiny")
    tiny(root / "tiny-new", seed=77)
    tiny(root / "tied", seed=5, tied=True)
    tiny(root / "tied-new", seed=6, tied=True)
    eagle(root / "tiny", root / "tiny-eagle")
    eagle3(root / "tiny", root / "tiny-eagle3")
    mtp(root / "deepseek-v3", root / "tiny-mtp")
    lora(root / "tiny-lora")
    int8(root / "tiny", root / "tiny-int8")
    int4(root / "tiny", root / "tiny-int4")
    gptq(root / "tiny", root / "tiny-gptq")
    awq(root / "tiny", root / "tiny-awq")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
