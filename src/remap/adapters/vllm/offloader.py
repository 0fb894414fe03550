"""vLLM's offloader interface, answered by a tenant: layers wait for their weights and say when they are done with them.

vLLM calls `wrap_modules` while it builds the model, and `_wait_for_layer(i)`, `_start_prefetch(i)` through two
operators that its compiler keeps in order. Which layers are streamed may change between any two passes: the operators
ask at run time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.offloader import prefetch_ops  # noqa: F401  registers the operators torch.ops.vllm.*
from vllm.model_executor.offloader.base import BaseOffloader, set_offloader

from remap.errors import InvalidState

__all__ = ["RemapOffloader"]


class RemapOffloader(BaseOffloader):
    """The decoder's layers of one worker.

    Outside of a pass (`entered`) nothing waits: before the weights have moved.
    """

    def __init__(self) -> None:
        self.layers: list[nn.Module] = []
        self._tenant: Any = None
        self._waited = 0

    @contextmanager
    def entered(self, tenant: Any, phase: str, tokens: int) -> Iterator[None]:
        """One pass of the tenant's.

        Raises InvalidState if it did not come by every layer: it has computed with other bytes.
        """
        set_offloader(self)  # another engine of this process may have set its own
        with tenant.forward(phase, tokens):
            self._tenant, self._waited = tenant, 0
            try:
                yield
            finally:
                self._tenant = None
        if self._waited != len(self.layers):
            raise InvalidState(
                f"a pass waited for {self._waited} of {len(self.layers)} layers: another engine of this process took "
                "its place, or the model left layers out; its results are wrong; serve it without remap",
                waited=self._waited,
                layers=len(self.layers),
            )

    def wrap_modules(self, modules_generator: Generator[nn.Module, None, None], prefix: str = "") -> list[nn.Module]:
        if self.layers:
            raise InvalidState(
                "the model has a second stack of layers (a drafter, an encoder); remap streams one; nothing was "
                "attached; serve without it, or without remap",
                layers=len(self.layers),
            )
        self.layers = list(modules_generator)
        for index, module in enumerate(self.layers):
            _bracket(module, index)
        return self.layers

    def _wait_for_layer(self, layer_idx: int) -> None:
        if self._tenant is not None:
            self._waited += 1
            self._tenant.wait(layer_idx)

    def _start_prefetch(self, layer_idx: int) -> None:
        """vLLM's name for "the layer before this one is through"; ours passes the layer that is."""
        if self._tenant is not None:
            self._tenant.done(layer_idx)


def _bracket(module: nn.Module, index: int) -> None:
    """The operators around the layer's forward, on its first and its last tensor: so no compiler moves them."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = (
            value
            for value in (*args, *kwargs.values())
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        )
        torch.ops.vllm.wait_prefetch(next(tensors), index)
        output = inner(*args, **kwargs)
        torch.ops.vllm.start_prefetch(output[0] if isinstance(output, tuple) else output, index)
        return output

    module.forward = forward
