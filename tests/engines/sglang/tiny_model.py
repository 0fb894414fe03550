"""A small random llama in a folder, for an engine that is given token ids: python tiny_model.py FOLDER [SEED [wide]]"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# float32, and weights large enough that the greedy choice is never close: tokens say whether the bits were right.
SHAPE = {
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,  # so that every request has the length that was asked for
}
WIDE = {"hidden_size": 1024, "intermediate_size": 2816}  # a layer of 47 MiB, a token of 32 KiB

if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[2]) if len(sys.argv) > 2 else 5)
    LlamaForCausalLM(LlamaConfig(**SHAPE | (WIDE if "wide" in sys.argv else {}))).to(torch.float32).save_pretrained(
        sys.argv[1]
    )
