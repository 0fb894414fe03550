"""One forward for transformers' Llama, Qwen2 and Qwen3, and one for OPT, on a flat batch of tokens.

transformers' own forward wants rectangular batches and its own cache; these run the same modules (so that weights are
read at their fixed addresses) on tokens of many sequences at once. `attend(q, k, v, scale)` is the only thing that they
do not know. Source of the equations: transformers' modeling_llama.py, modeling_qwen2.py, modeling_qwen3.py,
modeling_opt.py, dropout off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from remap.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

__all__ = ["Decoder", "LlamaLike", "Opt", "decoder_of"]


class Decoder(Protocol):
    """The three parts of a forward pass. Hidden states are (tokens, hidden); ids and positions (tokens,) int64 or int32."""

    layers: nn.ModuleList
    max_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the softmax: what `layer` gives `attend`

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Hidden states before the first layer, and what every layer needs of the positions."""
        ...

    def layer(self, index: int, hidden: torch.Tensor, rotary: Any, attend: Attend) -> torch.Tensor: ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last layer -> logits (tokens, vocabulary)."""
        ...


class LlamaLike:
    """Llama, Qwen2 (biases) and Qwen3 (norms of each query and key head): the modules carry the differences."""

    def __init__(self, model: Any) -> None:
        self.model: Any = model.model
        self.lm_head: Any = model.lm_head
        self.layers: nn.ModuleList = self.model.layers
        config: Any = model.config
        self.max_tokens: int = config.max_position_embeddings
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = self.model.layers[0].self_attn.head_dim
        self.scale: float = self.model.layers[0].self_attn.scaling
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention"}:
            raise InvalidArgument(
                f"the engine knows full attention only, the model has layers of kind {sorted(kinds)}",
                kinds=sorted(kinds),
            )

    def embed(
        self, ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        hidden = self.model.embed_tokens(ids)
        cos, sin = self.model.rotary_emb(hidden, positions[None])
        # (tokens, 1, head_dim): the same angle for all heads. The sign of rotate-half is folded into sin, once a pass.
        cos, sin = cos[0][:, None], sin[0][:, None].clone()
        sin[..., : sin.shape[-1] // 2].neg_()
        return hidden, (cos, sin)

    def layer(
        self, index: int, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        layer: Any = self.layers[index]
        attention = layer.self_attn
        cos, sin = rotary
        tokens = hidden.shape[0]
        x = layer.input_layernorm(hidden)
        q = attention.q_proj(x).view(tokens, -1, attention.head_dim)
        k = attention.k_proj(x).view(tokens, -1, attention.head_dim)
        v = attention.v_proj(x).view(tokens, -1, attention.head_dim)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        hidden = hidden + attention.o_proj(attend(q, k, v, attention.scaling))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model.norm(hidden))


def _rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """x cos + rotate_half(x) sin, where rotate_half is a roll by half the head with the sign in `signed_sin`."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin


class Opt:
    """OPT: learned positions (offset by 2 inside the module), LayerNorm before or after, ReLU in the module's
    activation_fn.
    """

    def __init__(self, model: Any) -> None:
        self.decoder: Any = model.model.decoder
        self.lm_head: Any = model.lm_head
        self.layers: nn.ModuleList = self.decoder.layers
        config: Any = model.config
        self.max_tokens: int = config.max_position_embeddings
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_attention_heads
        self.head_dim: int = config.hidden_size // config.num_attention_heads
        self.scale: float = 1.0  # the queries come scaled

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, None]:
        hidden = self.decoder.embed_tokens(ids)
        if self.decoder.project_in is not None:
            hidden = self.decoder.project_in(hidden)
        return hidden + self.decoder.embed_positions(ids, 0, position_ids=positions), None

    def layer(self, index: int, hidden: torch.Tensor, rotary: None, attend: Attend) -> torch.Tensor:
        layer: Any = self.layers[index]
        attention = layer.self_attn
        before = layer.do_layer_norm_before
        tokens = hidden.shape[0]
        x = layer.self_attn_layer_norm(hidden) if before else hidden
        q = (attention.q_proj(x) * attention.scaling).view(tokens, -1, attention.head_dim)
        k = attention.k_proj(x).view(tokens, -1, attention.head_dim)
        v = attention.v_proj(x).view(tokens, -1, attention.head_dim)
        hidden = hidden + attention.out_proj(attend(q, k, v, 1.0))
        if not before:
            hidden = layer.self_attn_layer_norm(hidden)
        x = layer.final_layer_norm(hidden) if before else hidden
        hidden = hidden + layer.fc2(layer.activation_fn(layer.fc1(x)))
        return hidden if before else layer.final_layer_norm(hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.decoder.final_layer_norm is not None:
            hidden = self.decoder.final_layer_norm(hidden)
        if self.decoder.project_out is not None:
            hidden = self.decoder.project_out(hidden)
        return self.lm_head(hidden)


_FAMILIES: dict[str, type[LlamaLike | Opt]] = {"llama": LlamaLike, "qwen2": LlamaLike, "qwen3": LlamaLike, "opt": Opt}


def decoder_of(model: nn.Module) -> Decoder:
    """The forward for a transformers `...ForCausalLM`. Raises InvalidArgument for a family that is not known."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in _FAMILIES:
        raise InvalidArgument(
            f"expected a transformers causal LM of type {sorted(_FAMILIES)}, got {kind!r}", model_type=kind
        )
    return _FAMILIES[kind](model)
