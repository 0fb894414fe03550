"""A tiny transformers model through `remap.attach`, in little more memory than it needs: what the adapter's tests share.

Import it after `pytest.importorskip` of torch and transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers

import remap
from remap.internals import internals

PAGE = 4096
# Layers come home as soon as there is room, and streaming may cost anything: what is tested is that both happen. Reserves are
# fixed, since those that are derived depend on how fast the machine is just now.
EAGER = remap.advanced.Knobs(slowdown=1e4, map_s=1e-9, contention=1.0, dwell=1, reserve_blocks=2, hysteresis_blocks=2)
SHAPE = {
    "vocab_size": 101, "num_hidden_layers": 4, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def randomised(model: Any, seed: int = 0, size: float = 0.12) -> Any:
    """The model in eval mode with weights so large that greedy tokens vary and every layer matters. It never stops early."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.copy_(noise * size + (1.0 if parameter.dim() == 1 and not name.endswith("bias") else 0.0))
    model.generation_config.eos_token_id = None
    return model.eval()


def llama(seed: int = 0, layers: int = 6) -> Any:
    """A tiny Llama with grouped heads."""
    config = transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": layers})
    return randomised(transformers.LlamaForCausalLM(config), seed)


def prompts(batch: int, tokens: int, seed: int = 0, padded: int = 0) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask of shape (batch, tokens); the first sequence is padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 101, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :padded], mask[0, :padded] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def as_cache(cache: Any) -> dict[str, Any]:
    """The cache as an argument of the model and of generate(), which call it `cache` since transformers 5.24."""
    taken = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    return {"cache" if "cache" in taken else "past_key_values": cache}


class Watched:
    """An attached model; `peak` is the most layers' worth that were KV in any pass."""

    def __init__(self, attached: Any) -> None:
        self.attached = attached
        self.session = attached.session
        self.tenant = attached.tenant
        self.peak = 0

    def look(self) -> None:
        self.peak = max(self.peak, self.tenant.remapped)

    def assert_moved(self, layers: int = 1) -> None:
        """Pressure alone has made at least that many layers KV, they were streamed, and no block was lost."""
        snapshot = self.attached.snapshot
        assert self.peak >= layers, "nothing was remapped: the test shows nothing"
        assert snapshot.copies > 0
        assert snapshot.passes > 0
        remap.advanced.check(self.session)

    def assert_home(self, short: Callable[[], object], calls: int = 40) -> None:
        """Calls that need little bring every layer home, and nobody holds a block."""
        for _ in range(calls):
            if not self.tenant.remapped:
                break
            short()
        assert (self.tenant.remapped, self.tenant.streamed) == (0, ())
        self.attached.step()
        assert self.attached.snapshot.live_blocks == len(self.attached.blocks._shown) == 0
        remap.advanced.check(self.session)


@contextmanager
def watched(model: Any, spare: int = 52, **options: Any) -> Any:
    """`remap.attach` with `spare` pages beside the weights, small pages and blocks of 4 tokens. Looks whenever layers wait."""
    options = {"config": EAGER, "block_tokens": 4, "session_options": {"page_bytes": PAGE}, **options}
    with pytest.raises(remap.OutOfMemory) as short:
        remap.attach(model, PAGE, **options)
    with remap.attach(model, short.value.minimum_bytes + spare * PAGE, **options) as attached:
        rig = Watched(attached)
        wait = attached.tenant.wait

        def looking(layer: int) -> Any:
            rig.look()
            return wait(layer)

        internals(attached.tenant).wait = looking
        yield rig
