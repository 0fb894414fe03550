"""Models of the sizes that papers use, with random weights, and how much memory each has. Shapes only: nothing is downloaded.

Sizes are those of the published configurations. Positions are cut to what the requests need: the tables of OPT's positions and
of Llama's angles are then a few MB smaller, and nothing else changes.
"""

from __future__ import annotations

import copy
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    *("LLAMA_2_13B", "LLAMA_3_8B", "OPT_6_7B", "OPT_13B", "OPT_30B", "POSITIONS", "QWEN_14B"),
    *("ModelShape", "deepened", "make_model", "one_layer"),
]

POSITIONS = 1024


@dataclass(frozen=True)
class ModelShape:
    """family: "opt" or "llama". kv_bytes: of KV cache, what the model's share of the memory leaves beside the weights."""

    name: str
    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    kv_bytes: int

    @property
    def head_dim(self) -> int:
        """Of each head, in numbers."""
        return self.hidden // self.heads

    def layer_params(self) -> int:
        """Numbers of one layer."""
        h, kv = self.hidden, self.kv_heads * self.head_dim
        if self.family == "opt":  # with biases, and two norms of two vectors
            return 4 * h * h + 2 * h * self.ffn + 9 * h + self.ffn
        return 2 * h * h + 2 * h * kv + 3 * h * self.ffn + 2 * h

    def params(self) -> int:
        """Numbers of all of it, positions aside. OPT's head is its embedding; Llama has one of its own."""
        rest = self.vocabulary * self.hidden * (1 if self.family == "opt" else 2)
        return self.layers * self.layer_params() + rest + self.hidden * (2 if self.family == "opt" else 1)

    def block_bytes(self, block_tokens: int, itemsize: int) -> int:
        """Of one KV block, in all layers."""
        return 2 * self.layers * block_tokens * self.kv_heads * self.head_dim * itemsize

    def with_kv(self, share: float) -> ModelShape:
        """With this share of the KV cache."""
        return replace(self, kv_bytes=int(self.kv_bytes * share))

    def scaled(self, share: float) -> ModelShape:
        """This share of the layers, at least four, and KV cache in the same proportion to them."""
        layers = min(self.layers, max(4, int(self.layers * share)))
        return replace(self, layers=layers, kv_bytes=int(self.kv_bytes * layers / self.layers))


# kv_bytes: what Oneiros' memory shares (its Table 1: 35 %, 35 % and 20 %; 65 % and 15 %) of a 96 GB GPU leave beside weights.
OPT_13B = ModelShape("OPT-13b", "opt", 40, 5120, 20480, 40, 40, 50272, 7_600_000_000)
LLAMA_2_13B = ModelShape("Llama-2-13b", "llama", 40, 5120, 13824, 40, 40, 32000, 7_600_000_000)
LLAMA_3_8B = ModelShape("Llama-3-8b", "llama", 32, 4096, 14336, 32, 8, 128256, 3_200_000_000)
OPT_30B = ModelShape("OPT-30b", "opt", 48, 7168, 28672, 56, 56, 50272, 2_400_000_000)
OPT_6_7B = ModelShape("OPT-6.7b", "opt", 32, 4096, 16384, 32, 32, 50272, 1_100_000_000)


QWEN_14B = ModelShape("Qwen2.5-14B", "llama", 48, 5120, 13824, 40, 8, 152064, 1_700_000_000)
"""Without the biases of its queries, keys and values, 0.002 % of its numbers."""


def make_model(shape: ModelShape, device: str, dtype: str, seed: int = 0) -> Any:
    """A transformers causal LM with random weights of a fixed seed, made on `device`, in eval mode."""
    return deepened(one_layer(shape, device, dtype, seed), shape.layers)


def one_layer(shape: ModelShape, device: str, dtype: str, seed: int = 0) -> Any:
    """The model with its first layer alone, as `make_model` makes it."""
    import torch
    import transformers

    torch.manual_seed(seed)
    common = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": POSITIONS,
    }
    if shape.family == "opt":
        config = transformers.OPTConfig(**common, ffn_dim=shape.ffn, word_embed_proj_dim=shape.hidden)
    else:
        config = transformers.LlamaConfig(
            **common, intermediate_size=shape.ffn, num_key_value_heads=shape.kv_heads, tie_word_embeddings=False
        )
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def deepened(model: Any, layers: int) -> Any:
    """The model of one layer, with so many of them: the i-th has the numbers of the first, each i rows on. To draw
    billions of numbers on a processor takes minutes, to copy them seconds: on several threads, since pages are touched."""
    found = model.model.decoder.layers if hasattr(model.model, "decoder") else model.model.layers
    first = found[0]

    def copied(index: int) -> Any:
        own = {id(each): _rows_on(each, index) for each in first.parameters()}
        layer = copy.deepcopy(first, own)  # its parameters are known already
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
        return layer

    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        found.extend(pool.map(copied, range(1, layers)))
    model.config.num_hidden_layers = layers
    return model


def _rows_on(weights: Any, rows: int) -> Any:
    """A new parameter; of a vector, the same numbers."""
    import torch

    numbers = weights.data.roll(rows, 0) if weights.dim() > 1 else weights.data.clone()
    return torch.nn.Parameter(numbers, requires_grad=weights.requires_grad)
