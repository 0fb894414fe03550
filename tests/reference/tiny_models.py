"""Small random models for the packing tests: transformers families, and one that has every kind of odd tensor."""

from __future__ import annotations

import torch
from torch import nn


def llama(layers: int = 4, tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(_config(LlamaConfig, layers, tied)).eval()


def qwen2(layers: int = 4, tied: bool = True) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(_config(Qwen2Config, layers, tied)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)  # zero biases would not show that they were lost
    return model


def opt(layers: int = 4) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=97, hidden_size=64, ffn_dim=100, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=64,
    )  # fmt: skip
    return OPTForCausalLM(config).eval()


def _config(kind: type, layers: int, tied: bool) -> object:
    return kind(
        vocab_size=97, hidden_size=64, intermediate_size=100, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip


class OddLayer(nn.Module):
    """int8 weights with bf16 scales, overlapping, transposed, expanded, empty, 0-d and odd-sized tensors."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared = shared
        self.quantised = nn.Parameter(torch.randint(-9, 9, (7, 7), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(7, 1).bfloat16())
        self.transposed = nn.Parameter(torch.randn(7, 7).t())
        self.strided = nn.Parameter(torch.randn(7, 21)[:, 1::3])
        flat = torch.randn(60)
        self.register_buffer("left", flat[:49].view(7, 7))
        self.register_buffer("right", flat[11:].view(7, 7))
        self.register_buffer("even", flat[::2])
        raw = torch.randint(1, 99, (8,), dtype=torch.uint8)
        self.register_buffer("byte", raw[3:4])  # with the word after it: an itemsize of 1 decides where the span starts
        self.register_buffer("word", raw[4:].view(torch.int32))
        self.register_buffer("expanded", torch.randn(1, 7).expand(7, 7))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("gain", torch.tensor(1.25, dtype=torch.float64))
        self.register_buffer("absent", None)
        self.twin = self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.quantised * self.scale).float() + self.transposed + self.strided + self.twin.float()
        weight = weight + self.left - self.right + self.expanded + self.even.sum() + self.empty.sum()
        weight = weight + self.byte / 99 + self.word / 2**31
        return torch.tanh(self.shared(x) @ weight * self.gain.float())


class OddModel(nn.Module):
    """Layers with odd tensors; all use one shared module; the head is tied to the embedding; `alias` names layer 0."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        shared = nn.Linear(7, 7)
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([OddLayer(shared) for _ in range(layers)])
        self.alias = self.blocks
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
