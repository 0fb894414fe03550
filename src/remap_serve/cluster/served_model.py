# SPDX-License-Identifier: Apache-2.0
"""An instance of `remap cluster serve`: a transformers model from a folder or the hub, on a session of its own.

`layout_of` reads shapes only. So the process that serves says what is wrong with the model or the memory before it starts
instances, and loads no weights itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open

import remap
from remap.errors import InvalidArgument
from remap.model.footprint import footprint
from remap.sizes import show_size
from remap_serve.engine.models import decoder_of

from .instance import ClusterInstance
from .transport import ASSUMED

if TYPE_CHECKING:
    from torch import nn

    from remap_serve.policy.cluster.pipeline import Network

__all__ = [
    "InstanceLayout",
    "Tokenizer",
    "check_files",
    "ends_of",
    "layout_of",
    "load",
    "make",
    "shapes",
    "tokenizer_of",
    "weights_of",
]

KV_TOKENS = 8192
"""Without a given memory there is KV for this many tokens beside the weights."""

Tokenizer = Any
"""A transformers tokenizer, or None if the model has none: then prompts are token ids."""


@dataclass(frozen=True)
class InstanceLayout:
    """An instance's session: its bytes, its pages, its KV. positions: tokens of a prompt and its answer, at most."""

    capacity: int
    page_bytes: int
    spec: remap.KVSpec
    positions: int


def shapes(name: str) -> nn.Module:
    """The model with weights that were never written: they have addresses, and no memory. Raises InvalidArgument (fields field,
    value) if there is none, or no causal one."""
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        made: nn.Module = model.to_empty(device="cpu")
        model.tie_weights()  # which `to_empty` parted
        return made
    except Exception as error:  # files can be wrong in many ways, and what transformers raises then has no common type
        raise _unloaded(name, error) from error


def check_files(name: str) -> None:
    """Read the headers of the folder's safetensors files. Raises InvalidArgument (fields field, value) for one that is cut off,
    or whose header is wrong. A hub's name is not looked at: its files come whole."""
    for path in sorted(Path(name).glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except Exception as error:  # safetensors' own error has no other base
            raise _unloaded(name, f"{path.name}: {error}") from error


def tokenizer_of(name: str) -> Tokenizer:
    """The model's tokenizer, or None if it has none. Raises InvalidArgument (fields field, value) for one that is broken."""
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except JSONDecodeError as error:
        raise _unloaded(name, f"its tokenizer: {error}") from error
    except (OSError, ValueError):
        return None
    except Exception as error:  # as in `shapes`
        raise _unloaded(name, f"its tokenizer: {type(error).__name__}: {error}") from error


def ends_of(name: str, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end an answer, as the model's files and its tokenizer have them."""
    try:
        known = transformers.GenerationConfig.from_pretrained(name).eos_token_id
    except (OSError, ValueError):
        known = None  # it has no such file
    ends = {*(known if isinstance(known, list) else [known]), None if tokenizer is None else tokenizer.eos_token_id}
    return frozenset(ends - {None})


def layout_of(model: nn.Module, memory: int | None, swap: int = 0) -> InstanceLayout:
    """memory: bytes for weights and KV together; None: KV of KV_TOKENS. swap: bytes of host memory for preempted KV.

    All of it has places in the KV region: so pages of layers can be KV while others compute these.

    Raises InvalidArgument for a family of models that the reference engine does not know, and (fields field, value, minimum)
    for a memory that does not hold the weights and one KV block.
    """
    decoder = decoder_of(model)
    common: dict[str, Any] = {
        "layers": len(decoder.layers),
        "kv_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    block = remap.KVSpec(**common, min_blocks=0, max_blocks=1)
    size = footprint(model, None)
    page_bytes = size.page_size()
    weights = size.pages(page_bytes) * page_bytes
    minimum = weights + -(-block.block_bytes // page_bytes) * page_bytes
    if memory is None:
        memory = weights + -(-KV_TOKENS // block.block_tokens) * block.block_bytes + page_bytes
    capacity = memory // page_bytes * page_bytes
    if capacity < minimum:
        raise InvalidArgument(
            f"memory: an instance needs {show_size(minimum)} for its weights and one KV block, got {show_size(memory)}; "
            "nothing was started; give more",
            field="memory",
            value=memory,
            minimum=minimum,
        )
    blocks = (capacity - weights) // block.block_bytes
    most, host = capacity // block.block_bytes + 1, swap // block.block_bytes
    if swap and not host:
        raise InvalidArgument(
            f"host_kv: host memory must have room for one KV block, {show_size(block.block_bytes)}, got {show_size(swap)}; "
            "nothing was started; give more, or none",
            field="host_kv",
            value=swap,
            minimum=block.block_bytes,
        )
    spec = remap.KVSpec(**common, min_blocks=blocks, max_blocks=most, host_blocks=host)
    return InstanceLayout(capacity, page_bytes, spec, decoder.max_tokens)


def make(
    name: str,
    model: str,
    memory: int | None,
    threads: int,
    max_num_seqs: int = 32,
    max_batch_tokens: int = 512,
    host: str | None = "127.0.0.1",
    network: Network = ASSUMED,
    swap: int = 0,
) -> ClusterInstance:
    """The instance; its session lives as long as it does.

    model: a folder, or a hub name. memory, swap: see `layout_of`. threads: that compute. host: under which other instances reach
    it; None: under its node's address, by Ray. network: to these.

    Raises InvalidArgument as `shapes` and `layout_of` do, also for files without some of the model's tensors, or with others of
    their names (transformers would draw them at random); and what `Session.attach` raises.
    """
    torch.set_num_threads(threads)
    if host is None:
        import ray

        host = str(ray.util.get_node_ip_address())
    loaded = load(model)
    layout = layout_of(loaded, memory, swap)
    session = remap.Session(layout.capacity, device="cpu", page_bytes=layout.page_bytes)
    tenant = session.attach(loaded, name=name, kv=layout.spec, weights=weights_of(model), hooks=False)
    return ClusterInstance(
        name,
        loaded,
        session,
        tenant,
        network,
        host=host,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
    )


def load(model: str) -> nn.Module:
    """The model on the CPU. Raises InvalidArgument as `make` does."""
    try:
        made: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # as in `shapes`
        raise _unloaded(model, error) from error
    loaded, found = made
    lacking = sorted([*found["missing_keys"], *(each[0] for each in found["mismatched_keys"])])
    if lacking:
        raise _unloaded(
            model, f"its files have no tensors of the model's shapes for {len(lacking)} names, such as {lacking[0]}"
        )
    found_model: nn.Module = loaded.eval()
    return found_model


def weights_of(model: str) -> str | None:
    """Files of weights are the master copy as they are: the processes of one machine share them."""
    return model if any(Path(model).glob("*.safetensors")) else None


def _unloaded(name: str, why: Exception | str) -> InvalidArgument:
    text = " ".join(str(why).split()) or type(why).__name__
    return InvalidArgument(
        f"model: {name} cannot be loaded: {text}; nothing was started; give a folder or a hub name of a transformers model",
        field="model",
        value=name,
    )
