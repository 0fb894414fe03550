"""A tiny model and a tokenizer whose tokens are bytes, in a folder as transformers writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Token i is a byte, as byte-level BPE shows it; 256 ends the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary | {"</s>": len(vocabulary)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def save_model(folder: Path, dtype: str = "float32") -> None:
    """A random Llama of four layers, 256 positions and the tokenizer's tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
