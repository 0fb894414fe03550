"""The families of models that people run, small and with random weights: what each engine's tests serve, and the rows of
docs/notes/runs.md (`python tools/runs.py`).

Needs neither torch nor transformers until a model is made: python families.py FAMILY FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seen import SEEN

__all__ = ["FAMILIES", "VOCABULARY", "Family", "config_of", "made", "save"]

VOCABULARY = 512
_SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_SMALLER = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "n_embd": 64,
    "n_layer": 4,
    "n_positions": 256,
    "intermediate_size": 160,
    "ffn_dim": 160,
    "word_embed_proj_dim": 64,
    "vocab_size_per_layer_input": 101,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "intermediate_size_mlp": 160,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "block_dim": 64,
    "conv_dim": 64,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "shared_intermediate_size": 160,
    "block_ff_dim": 160,
    "head_dim": 16,
    "out_hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}


@dataclass(frozen=True)
class Family:
    """models: what is published of it, for example. architecture, config: classes of transformers. shape: of the small model.
    engine: what vLLM is started with. published: what SGLang reads of published configurations, and these classes leave out.
    sglang: "runs", or why stock SGLang does not on a CPU. attaches: whether `remap.attach` takes it, or refuses it. What runs has
    stock's tokens, while layers leave and come home; in vLLM that is every family, in transformers every one that attaches."""

    models: str
    architecture: str
    config: str
    shape: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)
    sglang: str = "runs"
    attaches: bool = True


def _shape(*without: str, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in _SIZE.items() if name not in without} | more


_WIDE = {"intermediate_size": 704}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
_STATE = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32}
_VISION = {"hidden_size": 64, "intermediate_size": 128, "patch_size": 14, "initializer_range": 0.08}
_TOWER = {**_VISION, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56}
_QWEN_VISION = {**_VISION, "depth": 2, "num_heads": 2, "out_hidden_size": 256}
_QWEN_TOKENS = {"image_token_id": 100, "video_token_id": 99, "vision_start_token_id": 97, "vision_end_token_id": 98}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HEARS = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 4096, "n_embd": 256, "n_layer": 8, "n_head": 4}
_GPT2 |= {name: _SIZE[name] for name in ("initializer_range", "bos_token_id", "eos_token_id")}
_EVERY_HEAD = "num_key_value_heads"
# Their embeddings are tied and scaled: any larger, and a token is followed by itself.
_GEMMA = {**_WIDE, "head_dim": 64, "sliding_window": 64, "initializer_range": 0.01}
_GEMMA4 = {**_GEMMA, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 0}
_LATENT = {
    **_shape(_EVERY_HEAD, **_WIDE, **_EXPERTS),
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "tie_word_embeddings": False,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,  # vLLM's kernel has these
}
_LATENT_PUBLISHED = {
    "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    | {"original_max_position_embeddings": 1024},
}
_BFLOAT16 = {"dtype": "bfloat16"}
_SMALL = {"kv_cache_memory_bytes": 4 << 20}  # of one head
_LARGE = {"kv_cache_memory_bytes": 18 << 20}  # keys and values of every head
_STATES = "refused: states beside KV, for which stock needs a GPU"
_NO_CPU = "not tried: stock has no attention for it on a CPU"
_NONE = "none there"
_UNSEEN = "not tried with pictures or sound"


def _windows(layers: int, full: int) -> dict[str, Any]:
    """Each (layers / full)th layer sees all: as many groups of layers with blocks of their own."""
    every = layers // full
    kinds = ["full_attention" if layer % every == every - 1 else "sliding_attention" for layer in range(layers)]
    return _shape(**_GEMMA) | {"num_hidden_layers": layers, "layer_types": kinds}


_GEMMA3 = {
    "text_config": _windows(8, 4),
    "vision_config": {**_TOWER, "vision_use_head": False},
    "mm_tokens_per_image": 4,
}
_GEMMA3 |= {"image_token_index": 100, "boi_token_index": 98, "eoi_token_index": 99}

FAMILIES = {
    "llama": Family(
        "Llama 2 to 3.3, TinyLlama, SmolLM2, Vicuna, DeepSeek-R1-Distill-Llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        _shape(**_WIDE),
    ),
    "llama-tied": Family(
        "Llama 3.2 1B and 3B", "LlamaForCausalLM", "LlamaConfig", _shape(**_WIDE, tie_word_embeddings=True)
    ),
    "qwen2": Family("Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen", "Qwen2ForCausalLM", "Qwen2Config", _shape(**_WIDE)),
    "qwen3": Family("Qwen3 0.6B to 32B", "Qwen3ForCausalLM", "Qwen3Config", _shape(**_WIDE, head_dim=96)),
    "qwen3-moe": Family(
        "Qwen3 30B-A3B and 235B-A22B, Qwen3-Coder",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _shape(**_WIDE, **_EXPERTS, head_dim=64, num_experts=4),
    ),
    "qwen3-next": Family(
        "Qwen3-Next 80B-A3B: state beside KV in three of four layers",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        _shape(**_WIDE, **_EXPERTS, **_STATE, head_dim=64, num_experts=4, shared_expert_intermediate_size=96),
        _BFLOAT16,
        sglang=_STATES,
    ),
    "qwen3.5": Family(
        "Qwen3.5, its text model: state beside KV in three of four layers",
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        _shape(**_WIDE, **_STATE, head_dim=64),
        _BFLOAT16,
        sglang=_STATES,
    ),
    "qwen3.5-pictures": Family(
        "Qwen3.5, with pictures",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {"text_config": _shape(**_WIDE, **_STATE, head_dim=64), "vision_config": _QWEN_VISION, **_QWEN_TOKENS},
        _BFLOAT16,
        sglang=_STATES,
    ),
    "qwen2.5-vl": Family(
        "Qwen2.5-VL, with pictures",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {"text_config": _shape(**_WIDE, rope_parameters=_ROPE | {"mrope_section": [8, 12, 12]}), **_QWEN_TOKENS}
        | {"vision_config": _QWEN_VISION | {"window_size": 56, "fullatt_block_indexes": [1]}},
        sglang=_UNSEEN,
    ),
    "qwen3-vl": Family(
        "Qwen3-VL, with pictures, which enter several layers; here with chunked prompts and a prefix cache",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {"text_config": _shape(**_WIDE, head_dim=64, rope_parameters=_ROPE | {"mrope_section": [8, 12, 12]})}
        | {"vision_config": _QWEN_VISION | {"patch_size": 16, "deepstack_visual_indexes": [0, 1]}, **_QWEN_TOKENS},
        {"max_num_batched_tokens": 64, "enable_prefix_caching": True},
        sglang=_UNSEEN,
    ),
    "gemma2": Family(
        "Gemma 2; in SGLang without its softcap of logits, whose kernel needs a GPU",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _shape(**_GEMMA),
        published={"hidden_act": "gelu_pytorch_tanh", "final_logit_softcapping": None},
    ),
    "gemma3": Family(
        "Gemma 3, its text model: windows, here in 2 groups of layers",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _windows(8, 4),
    ),
    "gemma3-pictures": Family(
        "Gemma 3 4B to 27B, with pictures",
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        _GEMMA3,
        sglang=_UNSEEN,
    ),
    "gemma3-published": Family(
        "Gemma 3 4B to 27B as published, without pictures (`--limit-mm-per-prompt`)",
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        _GEMMA3,
        {"limit_mm_per_prompt": {"image": 0}},
        sglang="not tried: transformers 5 saves its tensors under names that SGLang does not read",
    ),
    "gemma3-6-2": Family("Gemma 3 1B, in 3 groups", "Gemma3ForCausalLM", "Gemma3TextConfig", _windows(6, 2)),
    "gemma3-7-1": Family("Gemma 3, in 7 groups", "Gemma3ForCausalLM", "Gemma3TextConfig", _windows(7, 1)),
    "gemma4": Family(
        "Gemma 4, its text model, with heads of one size",
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        _shape(**_GEMMA4, global_head_dim=64),
        sglang=_NO_CPU,
    ),
    "gemma4-heads": Family(
        "Gemma 4 31B: heads of two sizes",
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        _shape(**_GEMMA4, global_head_dim=128),
        sglang=_NO_CPU,
    ),
    "gemma4-moe": Family(
        "Gemma 4 26B-A4B: experts, heads of two sizes",
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        _shape(**_GEMMA4, global_head_dim=128, enable_moe_block=True, num_experts=4, top_k_experts=2)
        | {"moe_intermediate_size": 96},
        sglang=_NO_CPU,
    ),
    "gemma4-shared": Family(
        "Gemma 4 E2B and E4B: layers that read another's keys and values",
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        _shape(**_GEMMA4, global_head_dim=128, num_kv_shared_layers=2) | {"hidden_size_per_layer_input": 32},
        sglang=_NO_CPU,
    ),
    "gpt-oss": Family(
        "gpt-oss 20b and 120b, here with experts in 16 bits: windows, sinks",
        "GptOssForCausalLM",
        "GptOssConfig",
        _shape(intermediate_size=192, num_local_experts=4, num_experts_per_tok=2, head_dim=64, sliding_window=64),
        _BFLOAT16 | {"kv_cache_memory_bytes": 2 << 20},
        sglang=_NO_CPU,
    ),
    "deepseek-v2": Family(
        "DeepSeek-V2, -Lite and Coder-V2: latent attention",
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        _LATENT | {"topk_method": "greedy"},
        published=_LATENT_PUBLISHED | {"scoring_func": "softmax"},
    ),
    "deepseek-v3": Family(
        "DeepSeek-V3, R1, Kimi-K2: latent attention; here with chunked prompts and a prefix cache",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _LATENT | {"topk_method": "noaux_tc"},
        {"max_num_batched_tokens": 40, "enable_prefix_caching": True},
        _LATENT_PUBLISHED | {"scoring_func": "sigmoid"},
    ),
    "glm4-moe": Family(
        "GLM-4.5 to 4.7",
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        _shape(**_WIDE, **_EXPERTS, head_dim=64, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1)
        | {"n_group": 1, "topk_group": 1},
    ),
    "mixtral": Family(
        "Mixtral 8x7B and 8x22B",
        "MixtralForCausalLM",
        "MixtralConfig",
        _shape(intermediate_size=192, num_local_experts=4),
    ),
    "mistral": Family(
        "Mistral 7B (from v0.2), Nemo, Small",
        "MistralForCausalLM",
        "MistralConfig",
        _shape(**_WIDE, head_dim=64, sliding_window=None),
    ),
    "mistral3": Family(
        "Mistral Small 3.1 and 3.2, with pictures",
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {"text_config": {"model_type": "mistral", **_shape(**_WIDE, head_dim=64, sliding_window=None)}}
        | {"vision_config": {**_TOWER, "model_type": "pixtral", "image_size": 84, "head_dim": 32}}
        | {"image_token_index": 100, "spatial_merge_size": 2},
        sglang=_UNSEEN,
    ),
    "mistral-windows": Family(
        "Mistral 7B v0.1: windows in all layers",
        "MistralForCausalLM",
        "MistralConfig",
        _shape(**_WIDE, head_dim=64, sliding_window=64),
    ),
    "llama4": Family(
        "Llama 4, its text model: attention in chunks",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _shape(intermediate_size=96, intermediate_size_mlp=704, num_local_experts=4, num_experts_per_tok=1)
        | {"head_dim": 64, "attention_chunk_size": 64},
        {"kv_cache_memory_bytes": 2 << 20},
        sglang="not tried: stock needs a GPU for its experts",
    ),
    "phi3": Family("Phi-3, Phi-4", "Phi3ForCausalLM", "Phi3Config", _shape(**_WIDE)),
    "phi": Family("Phi-1.5, Phi-2", "PhiForCausalLM", "PhiConfig", _shape(_EVERY_HEAD, intermediate_size=1024), _LARGE),
    "granite": Family("Granite 3", "GraniteForCausalLM", "GraniteConfig", _shape(**_WIDE)),
    "lfm2": Family(
        "LFM2: convolutions beside attention",
        "Lfm2ForCausalLM",
        "Lfm2Config",
        _shape(**_WIDE, conv_dim=256, block_dim=256, block_ff_dim=704, block_auto_adjust_ff_dim=False)
        | {"layer_types": ["conv", "full_attention"] * 4},
        sglang=_STATES,
    ),
    "granite-hybrid": Family(
        "Granite 4 H: state beside KV in most layers",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        _shape(**_WIDE, **_MAMBA, layer_types=["mamba", "attention"] * 4, num_local_experts=0)
        | {"shared_intermediate_size": 704},
        sglang=_STATES,
    ),
    "falcon-h1": Family(
        "Falcon-H1: state and KV in every layer",
        "FalconH1ForCausalLM",
        "FalconH1Config",
        _shape(**_WIDE, **_MAMBA, mamba_d_ssm=512),
        sglang=_STATES,
    ),
    "olmo3": Family("OLMo 3", "Olmo3ForCausalLM", "Olmo3Config", _shape(**_WIDE, sliding_window=64)),
    "smollm3": Family("SmolLM3", "SmolLM3ForCausalLM", "SmolLM3Config", _shape(**_WIDE)),
    "seed-oss": Family("Seed-OSS", "SeedOssForCausalLM", "SeedOssConfig", _shape(**_WIDE, head_dim=64)),
    "cohere2": Family("Command A, R7B", "Cohere2ForCausalLM", "Cohere2Config", _shape(**_WIDE, sliding_window=64)),
    "ernie": Family("ERNIE 4.5 dense", "Ernie4_5ForCausalLM", "Ernie4_5Config", _shape(**_WIDE, head_dim=64)),
    "hunyuan": Family(
        "Hunyuan dense",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanDenseV1Config",
        _shape(**_WIDE, head_dim=64),
        sglang=_NO_CPU,
    ),
    "stablelm": Family("StableLM", "StableLmForCausalLM", "StableLmConfig", _shape(**_WIDE)),
    "falcon": Family(
        "Falcon 7B",
        "FalconForCausalLM",
        "FalconConfig",
        _shape(_EVERY_HEAD, multi_query=True),
        _SMALL,
        sglang=_NONE,
    ),
    "falcon-grouped": Family(
        "Falcon 40B and 180B",
        "FalconForCausalLM",
        "FalconConfig",
        _shape(_EVERY_HEAD, new_decoder_architecture=True, num_kv_heads=2),
        sglang=_NONE,
    ),
    "gpt-neox": Family(
        "Pythia, GPT-NeoX",
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        _shape(_EVERY_HEAD, **_WIDE),
        _LARGE,
        sglang="not tried: stock takes transformers' model, which needs a GPU there",
    ),
    "gpt2": Family("GPT-2, DistilGPT2", "GPT2LMHeadModel", "GPT2Config", _GPT2, _LARGE),
    "starcoder": Family(
        "StarCoder", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**_GPT2, "multi_query": True}, _SMALL
    ),
    "opt": Family(
        "OPT",
        "OPTForCausalLM",
        "OPTConfig",
        _shape(_EVERY_HEAD, ffn_dim=704, word_embed_proj_dim=256),
        _LARGE,
    ),
    "bloom": Family(
        "BLOOM",
        "BloomForCausalLM",
        "BloomConfig",
        {name: value for name, value in _GPT2.items() if name not in ("n_embd", "n_positions")}
        | {"hidden_size": 256, "initializer_range": 0.16},
        _LARGE,
        sglang=_NONE,
    ),
    "llava": Family(
        "Llava 1.5, with pictures",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"text_config": {"model_type": "llama", **_shape(**_WIDE)}, "image_token_index": 100, "image_seq_length": 16}
        | {"vision_config": {**_TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 3}},
        sglang=_UNSEEN,
    ),
    "internvl": Family(
        "InternVL 3 (its -hf models), with pictures",
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        {"text_config": {"model_type": "qwen2", **_shape(**_WIDE)}, "image_token_id": 100, "image_seq_length": 4}
        | {"vision_config": {**_TOWER, "image_size": [56, 56], "patch_size": [14, 14]}},
        sglang=_UNSEEN,
    ),
    "qwen2-audio": Family(
        "Qwen2-Audio, with sound",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2AudioConfig",
        {"text_config": {"model_type": "qwen2", **_shape(**_WIDE)}, "audio_token_index": 100}
        | {"audio_config": {"model_type": "qwen2_audio_encoder", "num_mel_bins": 80, "d_model": 64, **_HEARS}},
        sglang=_UNSEEN,
    ),
    "whisper": Family(
        "Whisper: the decoder's layers leave, the encoder's stay",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"vocab_size": VOCABULARY, "num_mel_bins": 80, "decoder_layers": 8, "decoder_attention_heads": 4, **_HEARS}
        | {
            "d_model": 256,
            "decoder_ffn_dim": 704,
            "max_target_positions": 1024,
            "init_std": 0.08,
            "max_source_positions": 100,
        }
        | {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1, "decoder_start_token_id": 3},
        {"kv_cache_memory_bytes": 56 << 20, "max_model_len": 600},
        attaches=False,
        sglang=_UNSEEN,
    ),
}


def config_of(family: str, small: bool = False) -> Any:
    """The configuration of that family's model. small: of a few kilobytes a layer."""
    import transformers

    found = FAMILIES[family]
    shape = _smaller(found.shape) if small else found.shape
    return getattr(transformers, found.config)(**shape)


def _smaller(shape: dict[str, Any]) -> dict[str, Any]:
    made = shape | {name: value for name, value in _SMALLER.items() if name in shape}
    if "layer_types" in shape or "num_kv_shared_layers" in shape:  # as many layers as there are kinds
        made["num_hidden_layers"] = shape["num_hidden_layers"]
    if "global_head_dim" in shape:
        made["global_head_dim"] = 16 * shape["global_head_dim"] // shape["head_dim"]
    if "text_config" in shape:
        made["text_config"] = _smaller(shape["text_config"])
        made |= {
            name: {**part, "out_hidden_size": 64}
            for name, part in shape.items()
            if name == "vision_config" and "out_hidden_size" in part
        }
    return made


def made(family: str, small: bool = False, seed: int = 5) -> Any:
    """The model of that family, with random weights."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, FAMILIES[family].architecture)(config_of(family, small)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():  # what Gemma 3 sees comes through one of these
                weight.normal_(std=0.08)
    return model


# What transformers saves, and what is published and loaded by vLLM.
_PUBLISHED = (("language_model.model.model.", "language_model.model."),)
_PUBLISHED_TOWER = (("vision_tower.", "vision_tower.vision_model."),)


def save(family: str, folder: Path) -> None:
    """Its model, in the dtype that vLLM serves it in, for engines that load folders; and its processor, if it has one."""
    import torch
    from safetensors.torch import load_file, save_file

    found = FAMILIES[family]
    made(family).to(getattr(torch, found.engine.get("dtype", "float32"))).save_pretrained(folder)
    if family in SEEN:
        SEEN[family].save(VOCABULARY, folder)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for old, new in _PUBLISHED + (_PUBLISHED_TOWER if family in ("llava", "gemma3-pictures") else ()):
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        save_file(tensors, file, metadata={"format": "pt"})


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
