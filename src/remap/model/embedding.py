# SPDX-License-Identifier: Apache-2.0
"""An input embedding in host memory, from which steps gather rows: the first donor, and nearly a free one.

A step needs one row per token: tokens x hidden x itemsize bytes (2.1 MB for 256 tokens of 4,096 bfloat16 values) of the
gigabyte that the embedding takes on the device. So an untied embedding need not be on the device at all. On the CPU the
parameter stays outside of the arena. On a GPU it becomes a view of page-locked memory that the device reads over the
link by itself: the same module, the same kernel, the gather at its place in the stream, also inside a captured graph.
Derived; none of the papers mentions embeddings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remap.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from remap.model.pack import TensorSpec
    from remap.model.protocols import LockedMemory, TargetDevice

__all__ = ["HostEmbedding"]


class HostEmbedding:
    """The weight of a model's input embedding, kept in host memory from `install` to `restore`."""

    def __init__(
        self, model: nn.Module, specs: Sequence[TensorSpec], device: TargetDevice, host: LockedMemory | None
    ) -> None:
        """Raises InvalidArgument (fields path, shared) if there is none, or if another tensor shares its memory (a tied
        head, which reads all of it in every step). Changes nothing in the model."""
        get = getattr(model, "get_input_embeddings", None)
        module = get() if callable(get) else None
        weight = getattr(module, "weight", None)
        path = next((name for name, tensor in model.named_parameters() if tensor is weight), "")
        spec = next((spec for spec in specs if spec.path == path), None)
        if spec is None:
            raise InvalidArgument(
                f"{type(model).__name__} has no input embedding (get_input_embeddings().weight); nothing was attached; "
                "leave embedding= out",
                path=path,
            )
        shared = [other.path for other in specs if other.storage == spec.storage and other.path != path]
        if shared:
            raise InvalidArgument(
                f"{path} shares its memory with {shared}, which read all of it in every step: it cannot stay in host "
                "memory; nothing was attached; leave embedding= out",
                path=path,
                shared=shared,
            )
        self.path = path
        self.nbytes = spec.span_bytes
        self.weight: Any = weight
        self._device, self._host = device, host
        self._view: torch.Tensor | None = None

    def prepare(self) -> None:
        """If the device cannot read the bytes where they are, copy them to where it can. May raise OutOfMemory."""
        if self._host is None:
            return
        buffer = self._host.allocate(self.nbytes)
        data = self.weight.detach()
        flat = data.as_strided((self.nbytes // data.element_size(),), (1,), data.storage_offset())
        buffer.view(data.dtype).copy_(flat)
        memory = self._device.tensor(buffer.data_ptr(), self.nbytes, self._host)
        self._view = memory.view(data.dtype).as_strided(data.shape, data.stride())

    def install(self) -> None:
        """Make the parameter read from the prepared memory. Cannot fail."""
        if self._view is not None:
            self.weight.data = self._view

    def restore(self, device: Any) -> None:
        """Move the parameter back to ordinary memory, of `device` or of the processor."""
        if self._view is not None:
            # .cpu() of a CPU tensor is the tensor itself, whose memory goes away.
            self.weight.data = (
                self._view.detach().clone() if device is None else self._view.detach().to(device, copy=True)
            )
            self._view = None
