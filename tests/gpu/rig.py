"""A tiny model in a session on the device, and reading layers back behind a stream: what several tests share."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

import remap
from remap.adapters.hooks import attach_hooks

PAGE = 2 << 20
PAGES = 16  # six layers of one each, what is no layer, KV


class Rig:
    """One of `models.KINDS` on the device, with hooks. A context manager. `expected`: what it computed before it was attached."""

    def __init__(self, gpu: Any, models: Any, kind: str = "llama", **session: Any) -> None:
        import torch

        self.torch = torch
        self.models = models
        self.device = gpu.torch
        self.model = models.make(kind).to(gpu.torch)
        self.ids = models.ids_for(3, 7).to(gpu.torch)
        self.expected = models.logits_of(self.model, self.ids)
        spec = models.kv_spec(self.model, block_tokens=16, max_blocks=PAGES * PAGE // (16 << 10))
        self.session = remap.Session(PAGES * PAGE, device="cuda:0", **session)
        self.tenant = self.session.attach(self.model, kv=spec, name="m", hooks=False)
        self.layers = models.LAYERS
        self.hooks = attach_hooks(models.layers_of(self.model), self.tenant, model=self.model)
        self.addresses = models.addresses_of(self.model)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.remove()
        self.session.close()

    def logits(self) -> Any:
        """Of one plain call."""
        return self.models.logits_of(self.model, self.ids)

    def check(self) -> None:
        """The same logits, bit for bit, at the same addresses."""
        assert self.torch.equal(self.logits(), self.expected)
        assert self.models.addresses_of(self.model) == self.addresses
        remap.advanced.check(self.session)


def obvious_kernels(torch: Any, shape: Any, table: Any) -> dict[str, Any]:
    """float32 attention of one sequence after the other, where a GPU has kernels."""
    from bench.gpu.measures.attention import reference

    def attend(q: Any, kv: Any) -> Any:
        rows = [reference(torch, q, kv, table, shape.tokens, row) for row in range(shape.sequences)]
        return torch.stack(rows).to(q.dtype)

    return {"obvious": attend}


def tiny_case(layouts: Any) -> Any:
    """256 blocks of 8 KiB of keys: one page for each layer's keys, and one for its values."""
    return layouts.Case(layouts.Model("tiny", 3, 4, 2), 0, PAGE, aligned=256, tokens=40)


class Reader:
    """Copies layers to page-locked host memory on the pass's stream, `slots` of them before anybody waits."""

    def __init__(self, raw: Any, slots: int) -> None:
        self.raw, self.slots = raw, slots
        self.nbytes = raw.layer_bytes
        self.address = raw.backend.allocate_host(slots * self.nbytes)
        self.wanted: list[int] = []

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.raw.backend.free_host(self.address, self.slots * self.nbytes)

    def read(self, layer: int, stream: int) -> None:
        """Enqueue the copy of a layer's bytes, as they are when the stream gets there."""
        to = self.address + len(self.wanted) * self.nbytes
        self.raw.backend.copy(stream, to, remap.advanced.layer_address(self.raw.session, "raw", layer), self.nbytes)
        self.wanted.append(layer)

    @property
    def full(self) -> bool:
        """Whether another pass has no room."""
        return len(self.wanted) + self.raw.layers > self.slots

    def end(self, marks: Any, stream: int) -> None:
        """When the stream is through: all that was read so far is the layers' bytes."""
        marks.wait(marks.mark(stream))
        marks.reset()
        for index, layer in enumerate(self.wanted):
            at = self.address + index * self.nbytes
            seen = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(at))
            assert np.array_equal(seen, self.raw.masters[layer]), f"read {index}: layer {layer} had other bytes"
        self.wanted.clear()


def one_pass(raw: Any, reader: Reader, stream: Any, handle: int) -> None:
    """A pass over all layers on `stream` (anything that forward() takes), read on the same stream by its handle."""
    with raw.tenant.forward(stream=stream):
        for layer in range(raw.layers):
            raw.tenant.wait(layer)
            reader.read(layer, handle)
            raw.tenant.done(layer)
