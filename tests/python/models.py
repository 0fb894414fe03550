"""Tiny random models with fixed seeds, and a session around one of them: what the tests of the session share.

Import it after `pytest.importorskip` of torch and transformers.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

import remap
from remap import _core
from remap.adapters.hooks import attach_hooks
from remap.internals import internals

LAYERS = 6
VOCAB = 101
POISON = 0xDF

_COMMON = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "max_position_embeddings": 128, "pad_token_id": 0}
_GATED = {**_COMMON, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
# Odd: layer sizes that are no multiple of any page, an odd head dimension, grouped heads, a tied embedding.
_ODD = {**_GATED, "hidden_size": 60, "intermediate_size": 97, "num_attention_heads": 6, "num_key_value_heads": 3}


def _opt(**more: Any) -> Any:
    given = {**_COMMON, "hidden_size": 64, "ffn_dim": 160, "num_attention_heads": 4, "word_embed_proj_dim": 64, **more}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**given))


def _gpt2() -> Any:
    shape = {"n_embd": 64, "n_inner": 160, "n_head": 4, "n_layer": LAYERS, "n_positions": 128, "vocab_size": VOCAB}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    )


_MAKERS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GATED)),
    "llama-odd": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_ODD, tie_word_embeddings=True)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_GATED)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_GATED, head_dim=24)),
    "gpt2": _gpt2,
    "opt": _opt,
    "opt-odd": lambda: _opt(hidden_size=52, ffn_dim=75, do_layer_norm_before=False, word_embed_proj_dim=36),
}
KINDS = tuple(_MAKERS)


def make(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A causal LM of one of `KINDS`, in eval mode. Equal arguments give equal weights.

    The weights are larger than at initialisation, so that greedy tokens vary and every layer matters.
    """
    torch.manual_seed(seed)
    model = _MAKERS[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.12 + (1.0 if parameter.dim() == 1 else 0.0))
    model.generation_config.eos_token_id = None
    return model.to(dtype)


def layers_of(model: Any) -> Any:
    """The model's list of layers."""
    if hasattr(model, "transformer"):
        return model.transformer.h
    return model.model.decoder.layers if hasattr(model.model, "decoder") else model.model.layers


def kv_spec(model: Any, **more: Any) -> remap.KVSpec:
    """The KV cache that fits the model: blocks of 4 tokens, 4 blocks at least, unless `more` says otherwise."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    given: dict[str, Any] = {
        "layers": LAYERS,
        "kv_heads": heads,
        "head_dim": head_dim,
        "block_tokens": 4,
        "dtype": dtype,
    }
    return remap.KVSpec(**{**given, "min_blocks": 4, "max_blocks": 400, **more})


def ids_for(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Token ids without the padding token, shape (batch, tokens), int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, tokens), generator=generator)


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one plain call."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits.clone()


def generate(model: Any, ids: torch.Tensor, tokens: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens of the model's own generate(), with a KV cache, and the logits that they were chosen from."""
    out = model.generate(
        ids, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True,
        attention_mask=torch.ones_like(ids),
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


def addresses_of(model: Any) -> dict[str, int]:
    """Where each parameter and buffer lies."""
    return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def bytes_of(model: Any) -> dict[str, torch.Tensor]:
    """A copy of each parameter and buffer."""
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def save_weights(model: Any, folder: Path, name: str = "model") -> Path:
    """The model's state in a safetensors file."""
    from safetensors.torch import save_file

    path = folder / f"{name}.safetensors"
    save_file({key: tensor.detach().clone() for key, tensor in model.state_dict().items()}, path)
    return path


def state_of(session: remap.Session) -> remap.Snapshot:
    """The session's snapshot without the work of the copy engine, which may go on between two looks."""
    snapshot = session.snapshot()
    quiet = {"copies": 0, "copied_bytes": 0, "copy_s": 0.0, "loading": ()}
    return replace(snapshot, tenants={name: replace(one, **quiet) for name, one in snapshot.tenants.items()})


def minimum_bytes(model: Any, kv: remap.KVSpec, page_bytes: int, **attach: Any) -> int:
    """The capacity that attaching needs, by asking for it with too little."""
    with remap.Session(page_bytes, page_bytes=page_bytes) as session:
        try:
            session.attach(model, kv=kv, **attach)
        except remap.OutOfMemory as error:
            return int(error.fields["minimum_bytes"])  # type: ignore[call-overload]
    raise AssertionError("a single page was enough")


def poison(kv: Any) -> int:
    """Overwrite every free usable block, so that weights which are read from there by mistake show. How many there are."""
    blocks = set(kv.pool.open_ids()) - set(kv.pool.live_ids())
    for block in blocks:
        for offset, nbytes in kv.geometry.byte_ranges_of_block(block):
            _core.fill_bytes(kv.address + offset, nbytes, POISON)
    return len(blocks)


def raw_block(kv: Any, block: int) -> torch.Tensor:
    """The bytes of one block in all layers, shape (layers, bytes)."""
    return torch.stack([tensor[:, block].contiguous().view(torch.uint8).flatten() for tensor in kv.tensors])


def write_block(kv: Any, block: int, seed: int) -> torch.Tensor:
    """Fill a block with random bytes; returns them as `raw_block` does."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for tensor in kv.tensors:
        part = tensor[:, block]
        row = torch.randint(0, 256, (part.numel() * part.element_size(),), dtype=torch.uint8, generator=generator)
        part.copy_(row.view(part.dtype).view(part.shape))
        rows.append(row)
    return torch.stack(rows)


class Served:
    """A model in a session, with hooks. `live` holds blocks with known random bytes, which every check compares."""

    def __init__(self, session: remap.Session, model: Any, name: str, kv: remap.KVSpec, **attach: Any) -> None:
        self.session, self.name, self.model = session, name, model
        self.batches = [ids_for(batch, tokens, seed=batch) for batch, tokens in ((2, 7), (1, 3))]
        self.expected = [logits_of(model, ids) for ids in self.batches]
        self.tenant = session.attach(model, kv=kv, name=name, hooks=False, **attach)
        self.kv = internals(self.tenant).kv
        self.hooks = attach_hooks(layers_of(model), self.tenant, model=model)
        self.addresses = addresses_of(model)
        self.live: dict[int, torch.Tensor] = {}

    def patch(self, moved: Any) -> None:
        """Live blocks are followed to where they moved."""
        self.live = {moved.get(block, block): data for block, data in self.live.items()}

    def remap(self, layers: int, buffers: int = 1, selection: str = "uniform") -> Any:
        report = remap.advanced.remap(self.session, self.name, layers, buffers, selection)
        self.patch(report.moved.get(self.name, {}))
        return report

    def fill_blocks(self, count: int, rng: random.Random) -> None:
        """Allocate blocks and write random bytes into them."""
        for block in self.kv.allocate(count):
            self.live[block] = write_block(self.kv, block, rng.getrandbits(30))

    def drop(self, blocks: Any) -> None:
        blocks = list(blocks)
        self.kv.free(blocks)
        self.live = {block: data for block, data in self.live.items() if block not in blocks}

    def free_blocks(self, count: int, rng: random.Random) -> None:
        """Free some of the live blocks."""
        self.drop(rng.sample(sorted(self.live), count))

    def check(self) -> None:
        """The arena's invariants, the addresses and the bytes of live blocks; then poison what is free."""
        remap.advanced.check(self.session)
        assert addresses_of(self.model) == self.addresses
        for block, data in self.live.items():
            assert torch.equal(raw_block(self.kv, block), data), f"{self.name}: KV block {block} has changed"
        poison(self.kv)

    def right(self) -> None:
        """It computes what it computed before it was attached."""
        for ids, expected in zip(self.batches, self.expected, strict=True):
            assert torch.equal(logits_of(self.model, ids), expected), self.name

    def whole(self) -> None:
        """`check`; and `right`, where it may compute."""
        self.check()
        assert set(self.live) == set(self.kv.pool.live_ids())
        if self.tenant.active:
            self.right()


class Rig(Served):
    """One model in a session of its own, in little more memory than it needs: `spare` pages stay free. A context manager."""

    def __init__(
        self,
        model: Any,
        *,
        mode: str = "aliased",
        page_bytes: int = 16384,
        spare: int = 0,
        kv: remap.KVSpec | None = None,
        **attach: Any,
    ) -> None:
        spec = kv or kv_spec(model)
        capacity = minimum_bytes(model, spec, page_bytes) + spare * page_bytes
        session = remap.Session(capacity, page_bytes=page_bytes, mode=mode)
        super().__init__(session, model, "m", spec, **attach)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.remove()
        self.session.close()

    def remap(self, layers: int, buffers: int = 1, selection: str = "uniform") -> Any:
        """`advanced.remap`, then every invariant."""
        report = super().remap(layers, buffers, selection)
        self.check()
        return report
