# SPDX-License-Identifier: Apache-2.0
"""One forward for transformers' Llama, Qwen2 and Qwen3, one for OPT and one for GPT-2, on a flat batch of tokens.

transformers' own forward wants rectangular batches and its own cache; these run the same modules (so that weights are
read at their fixed addresses) on tokens of many sequences at once. `attend(q, k, v, scale)` is the only thing that they
do not know. Source of the equations: transformers' modeling_llama.py, modeling_qwen2.py, modeling_qwen3.py,
modeling_opt.py, modeling_gpt2.py, dropout off.

A layer's keys and values are a function of its input and the positions (`Decoder.keys_values`). `kv_from_activations`
makes them again from inputs that were kept in their place: HybridServe's activation cache (sections 3.3 and 4.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from remap.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

__all__ = [
    "Decoder",
    "Gpt2",
    "LlamaLike",
    "Opt",
    "decoder_of",
    "kv_from_activations",
    "min_rows",
    "require_block_activations",
    "require_smaller_activations",
    "static_rotary",
]


def min_rows(dtype: torch.dtype) -> int:
    """Rows that a batch is padded to, so that a row's values seldom depend on how many others share the matrix product.

    Whether they do is the processor's matter: on some, other numbers of rows have other kernels, and rows differ in their last
    bits all the same. Nothing may rely on equal bits in unlike batches. Measured on x86 with MKL (fp32: other kernels for up to
    3 rows, and with several threads for 9 to 11) and oneDNN (bf16: another one for a single row, with some shapes: 2048 to 768
    or to 1024).
    """
    if dtype is torch.bfloat16:
        return 2
    return 8 if torch.get_num_threads() == 1 else 12


class Decoder(Protocol):
    """The parts of a forward pass. Hidden states are (tokens, hidden); ids and positions (tokens,) int64 or int32."""

    layers: nn.ModuleList
    max_tokens: int
    vocabulary: int  # token ids are smaller
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the softmax: what `layer` gives `attend`
    activation_width: int  # elements of one token's input of a layer (keys and values: 2 * kv_heads * head_dim)

    def rotary(self, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        """The positions as every layer needs them, in the dtype of `hidden`."""
        ...

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Hidden states before the first layer, and `rotary` of the positions."""
        ...

    def keys_values(self, index: int, hidden: torch.Tensor, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The k and v that `layer` gives `attend`, each (tokens, kv_heads, head_dim). `hidden` does not change."""
        ...

    def layer(self, index: int, hidden: torch.Tensor, rotary: Any, attend: Attend) -> torch.Tensor:
        """Hidden states after the layer. It may work in place: copy `hidden` before if you keep it."""
        ...

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
        self.vocabulary: int = config.vocab_size
        self.activation_width: int = config.hidden_size
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

    def rotary(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.model.rotary_emb(hidden, positions[None])
        # (tokens, 1, head_dim): the same angle for all heads. The sign of rotate-half is folded into sin, once a pass.
        cos, sin = cos[0][:, None], sin[0][:, None].clone()
        sin[..., : sin.shape[-1] // 2].neg_()
        return cos, sin

    def embed(
        self, ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        hidden = self.model.embed_tokens(ids)
        return hidden, self.rotary(hidden, positions)

    def keys_values(
        self, index: int, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self.layers[index]
        return self._keys_values(layer.self_attn, self._normed(layer.input_layernorm, hidden), rotary)

    def layer(
        self, index: int, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        layer: Any = self.layers[index]
        attention = layer.self_attn
        x = self._normed(layer.input_layernorm, hidden)
        q = self._rotated(attention.q_proj, getattr(attention, "q_norm", None), x, rotary)
        k, v = self._keys_values(attention, x, rotary)
        hidden = hidden + attention.o_proj(attend(q, k, v, attention.scaling))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def _keys_values(
        self, attention: Any, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k = self._rotated(attention.k_proj, getattr(attention, "k_norm", None), x, rotary)
        return k, attention.v_proj(x).view(x.shape[0], -1, self.head_dim)

    def _normed(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        return norm(x)

    def _rotated(
        self, projection: Any, norm: Any, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Queries or keys: projected, normed by head where the model does that (norm is not None), rotated."""
        heads = projection(x).view(x.shape[0], -1, self.head_dim)
        return _rotate(heads if norm is None else norm(heads), *rotary)

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
        self.vocabulary: int = config.vocab_size
        self.activation_width: int = config.hidden_size
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_attention_heads
        self.head_dim: int = config.hidden_size // config.num_attention_heads
        self.scale: float = 1.0  # the queries come scaled

    def rotary(self, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Positions are in the hidden states already."""

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, None]:
        hidden = self.decoder.embed_tokens(ids)
        if self.decoder.project_in is not None:
            hidden = self.decoder.project_in(hidden)
        return hidden + self.decoder.embed_positions(ids, 0, position_ids=positions), None

    def keys_values(self, index: int, hidden: torch.Tensor, rotary: None) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self.layers[index]
        return self._keys_values(layer.self_attn, self._attended(layer, hidden))

    def layer(self, index: int, hidden: torch.Tensor, rotary: None, attend: Attend) -> torch.Tensor:
        layer: Any = self.layers[index]
        attention = layer.self_attn
        before = layer.do_layer_norm_before
        x = self._attended(layer, hidden)
        q = (attention.q_proj(x) * attention.scaling).view(x.shape[0], -1, self.head_dim)
        k, v = self._keys_values(attention, x)
        hidden = hidden + attention.out_proj(attend(q, k, v, 1.0))
        if not before:
            hidden = layer.self_attn_layer_norm(hidden)
        x = layer.final_layer_norm(hidden) if before else hidden
        hidden = hidden + layer.fc2(layer.activation_fn(layer.fc1(x)))
        return hidden if before else layer.final_layer_norm(hidden)

    def _attended(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The input of the projections of queries, keys and values."""
        return layer.self_attn_layer_norm(hidden) if layer.do_layer_norm_before else hidden

    def _keys_values(self, attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.shape[0]
        k = attention.k_proj(x).view(tokens, -1, self.head_dim)
        return k, attention.v_proj(x).view(tokens, -1, self.head_dim)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.decoder.final_layer_norm is not None:
            hidden = self.decoder.final_layer_norm(hidden)
        if self.decoder.project_out is not None:
            hidden = self.decoder.project_out(hidden)
        return self.lm_head(hidden)


class Gpt2:
    """GPT-2: learned positions, LayerNorm before, one projection (Conv1D) for queries, keys and values, tied head."""

    def __init__(self, model: Any) -> None:
        self.transformer: Any = model.transformer
        self.lm_head: Any = model.lm_head
        self.layers: nn.ModuleList = self.transformer.h
        config: Any = model.config
        self.max_tokens: int = config.max_position_embeddings
        self.vocabulary: int = config.vocab_size
        self.activation_width: int = config.hidden_size
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_attention_heads
        self.head_dim: int = config.hidden_size // config.num_attention_heads
        self.scale: float = 1.0  # the queries come scaled, as a layer's scale may depend on its index

    def rotary(self, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Positions are in the hidden states already."""

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.transformer.wte(ids) + self.transformer.wpe(positions), None

    def keys_values(self, index: int, hidden: torch.Tensor, rotary: None) -> tuple[torch.Tensor, torch.Tensor]:
        # The module as a whole, queries too: wrappers of it (LoRA) keep their effect, and the product keeps its shape.
        _, k, v = self._queries_keys_values(index, hidden)
        return k, v

    def layer(self, index: int, hidden: torch.Tensor, rotary: None, attend: Attend) -> torch.Tensor:
        block: Any = self.layers[index]
        q, k, v = self._queries_keys_values(index, hidden)
        hidden = hidden + block.attn.c_proj(attend(q * block.attn.scaling, k, v, 1.0))
        return hidden + block.mlp.c_proj(block.mlp.act(block.mlp.c_fc(block.ln_2(hidden))))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.transformer.ln_f(hidden))

    def _queries_keys_values(self, index: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        block: Any = self.layers[index]
        projected = block.attn.c_attn(block.ln_1(hidden)).view(hidden.shape[0], 3, self.heads, self.head_dim)
        return projected.unbind(1)


_FAMILIES: dict[str, type[LlamaLike | Opt | Gpt2]] = {
    "llama": LlamaLike,
    "qwen2": LlamaLike,
    "qwen3": LlamaLike,
    "opt": Opt,
    "gpt2": Gpt2,
}


def decoder_of(model: nn.Module) -> Decoder:
    """The forward for a transformers causal LM. Raises InvalidArgument for a family that is not known."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in _FAMILIES:
        raise InvalidArgument(
            f"expected a transformers causal LM of type {sorted(_FAMILIES)}, got {kind!r}", model_type=kind
        )
    return _FAMILIES[kind](model)


def static_rotary(decoder: Decoder) -> bool:
    """Whether the rotary angles are a function of the position alone. Others look at the whole batch, on the host."""
    kind = getattr(getattr(getattr(decoder, "model", None), "rotary_emb", None), "rope_type", "default")
    return "dynamic" not in kind and kind != "longrope"


def require_smaller_activations(decoder: Decoder) -> None:
    """Raises InvalidArgument if a token's input of a layer cannot stand for its keys and values there.

    That is so if it is not smaller (fields activation_bytes, kv_bytes: of one token in one layer), as in most models with
    grouped queries; and if the angles of the keys depended on the batch that they were computed in.
    """
    size = next(decoder.layers.parameters()).element_size()
    activation, kv = decoder.activation_width * size, 2 * decoder.kv_heads * decoder.head_dim * size
    if activation >= kv:
        raise InvalidArgument(
            f"activations would save nothing: a token's input of a layer has {activation} bytes, its keys and values have "
            f"{kv} ({decoder.kv_heads} KV heads for {decoder.heads} query heads); keep the KV",
            activation_bytes=activation,
            kv_bytes=kv,
        )
    if not static_rotary(decoder):
        raise InvalidArgument(
            "keys cannot be made again from activations: this model's rotary angles depend on the whole batch; keep the KV",
            activation_bytes=activation,
            kv_bytes=kv,
        )


def require_block_activations(decoder: Decoder) -> None:
    """Raises InvalidArgument (the numbers) if two blocks' activations cannot lie in one block, as its keys and its values.

    That is so as `require_smaller_activations` says, and (fields activation_width, kv_width: elements of one token) where
    activations are not as wide as keys.
    """
    require_smaller_activations(decoder)
    width = decoder.kv_heads * decoder.head_dim
    if decoder.activation_width != width:
        raise InvalidArgument(
            f"activations of {decoder.activation_width} elements do not fill a block's keys of {width} elements a token; "
            "keep the KV",
            activation_width=decoder.activation_width,
            kv_width=width,
        )


@torch.inference_mode()
def kv_from_activations(
    decoder: Decoder, layer: int, activations: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values that a pass wrote, each (tokens, kv_heads, head_dim), made again from the layer's inputs.

    activations: (tokens, decoder.activation_width), the rows of `hidden` that `decoder.layer(layer, hidden, ...)` was given,
    unchanged, in the model's dtype; they may come from several passes. positions: (tokens,), of these rows. Neither changes,
    and no KV is written. The layer's weights are read: call it where the pass reads them, between `wait` and `done`.

    Equal bit for bit to what the pass wrote, if the matrix product gives a row the same values in both batches. On the CPU
    rows are padded as `ModelRunner` pads them (`min_rows`), which is enough on some processors. A kernel may be chosen by the
    number of rows and sum in another order: then two sums of n products x w differ by at most 2 n 2^-24 sum |x w| in
    float32; bfloat16 rounds that sum once, to the same or to the neighbouring value, and a rotation mixes two such values.

    Raises InvalidArgument for models that `require_smaller_activations` refuses, and for another shape or dtype.
    """
    require_smaller_activations(decoder)
    tokens = len(positions)
    dtype = next(decoder.layers.parameters()).dtype
    if tuple(activations.shape) != (tokens, decoder.activation_width) or activations.dtype != dtype:
        raise InvalidArgument(
            f"expected activations of shape {(tokens, decoder.activation_width)} and {dtype}, got "
            f"{tuple(activations.shape)} and {activations.dtype}; nothing was computed",
            expected=(tokens, decoder.activation_width),
            got=tuple(activations.shape),
        )
    padding = max(0, min_rows(dtype) - tokens) if activations.device.type == "cpu" else 0
    activations, positions = F.pad(activations, (0, 0, 0, padding)), F.pad(positions, (0, padding))
    k, v = decoder.keys_values(layer, activations, decoder.rotary(activations, positions))
    return k[:tokens], v[:tokens]
