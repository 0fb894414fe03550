# SPDX-License-Identifier: Apache-2.0
"""vLLM's offloader interface, implemented by a tenant: each layer waits for its weights and reports when it is done.

vLLM calls `wrap_modules` while it builds the model, and `_wait_for_layer(i)` and `_start_prefetch(i)` through two
operators that its compiler keeps in order. The set of streamed layers may change between any two passes: the operators
ask at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.offloader import prefetch_ops  # noqa: F401  registers the operators torch.ops.vllm.*
from vllm.model_executor.offloader.base import BaseOffloader, set_offloader

from remap.errors import InvalidState
from remap.internals import internals

from . import engine_internals

__all__ = ["RemapOffloader"]


class RemapOffloader(BaseOffloader):
    """The decoder's layers of one worker. Outside of a pass (`entered`) no layer waits.

    loaded: whether the model is there; what vLLM builds then is a drafter, whose layers stay where they are.
    """

    def __init__(self, loaded: Callable[[], bool] = lambda: False) -> None:
        self.layers: list[nn.Module] = []
        self._loaded = loaded
        self._tenant: Any = None
        self._waited = 0
        self._may_be_whole = True  # a graph of the whole pass, in which no layer waits
        self._whole = False

    @contextmanager
    def entered(self, tenant: Any, phase: str, tokens: int, whole: bool | None = None) -> Iterator[None]:
        """One pass of the tenant. whole: whether it may be a graph of the whole pass, as all ranks have agreed; None: this rank
        decides.

        Raises InvalidState (fields waited, layers) if not every layer waited, unless vLLM replayed a graph of the whole pass
        while none had to: the pass has then computed with wrong bytes. And (field tenant) where ranks have agreed on such a graph
        and a layer here has to wait: no pass was made.
        """
        set_offloader(self)  # another engine of this process may have set its own
        with tenant.forward(phase, tokens):
            settled = internals(tenant).seen and not tenant.streaming
            if whole and not settled:
                raise InvalidState(
                    f"layers of {tenant.name} stream, and the ranks have agreed on a graph in which no layer waits; no pass was "
                    "made; serve with --enforce-eager, and report this",
                    tenant=tenant.name,
                )
            self._tenant, self._waited, self._whole = tenant, 0, False
            self._may_be_whole = settled if whole is None else whole
            try:
                yield
            finally:
                self._tenant, self._may_be_whole = None, True
        if self._waited != len(self.layers) and not self._whole:
            raise InvalidState(
                f"a pass waited for {self._waited} of {len(self.layers)} layers: another engine of this process "
                "replaced the offloader, or the model skipped layers; the pass's results are wrong; serve without "
                "remap",
                waited=self._waited,
                layers=len(self.layers),
            )

    def may_be_whole(self) -> bool:
        """Whether a graph of a whole pass may run now: outside of a pass, or in one in which no layer has anything to wait for.
        Until a pass has waited for every layer none may, since layers stream only from then on."""
        return self._may_be_whole

    def is_whole(self) -> None:
        """vLLM replays a graph of this whole pass: none of its layers waits."""
        self._whole = True

    def wrap_modules(self, modules_generator: Iterator[nn.Module], prefix: str = "") -> list[nn.Module]:
        modules = list(modules_generator)
        if self._loaded() or not engine_internals.keep_kv(modules):  # an encoder of sound stays
            return modules
        if self.layers:
            raise InvalidState(
                "the model has a second stack of layers that keep keys and values, and remap streams only one; nothing was "
                "attached; serve without remap",
                layers=len(self.layers),
            )
        self.bracket(modules)
        return self.layers

    def bracket(self, modules: Iterable[nn.Module]) -> None:
        """These are the layers."""
        self.layers = list(modules)
        for index, module in enumerate(self.layers):
            _bracket(module, index)

    def _wait_for_layer(self, layer_idx: int) -> None:
        if self._tenant is not None:
            self._waited += 1
            self._tenant.wait(layer_idx)

    def _start_prefetch(self, layer_idx: int) -> None:
        """Report that the layer is done. (vLLM's own offloaders start a prefetch at this point, hence the name.)"""
        if self._tenant is not None:
            self._tenant.done(layer_idx)


def _bracket(module: nn.Module, index: int) -> None:
    """Put the operators around the layer's forward. They take its first and last tensor, so no compiler moves them. In graphs
    that vLLM breaks by itself (breakable CUDA graphs, without a compiler) both are breaks, and run in each replay."""
    inner = module.forward

    @eager_break_during_capture
    def wait(hidden: torch.Tensor) -> None:
        torch.ops.vllm.wait_prefetch(hidden, index)

    @eager_break_during_capture
    def done(hidden: torch.Tensor) -> None:
        torch.ops.vllm.start_prefetch(hidden, index)

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = (
            value
            for value in (*args, *kwargs.values())
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        )
        wait(next(tensors))
        output = inner(*args, **kwargs)
        done(output[0] if isinstance(output, tuple) else output)
        return output

    module.forward = forward
