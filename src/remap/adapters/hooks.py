"""Run any torch model with its layers remapped, through hooks: plain `model(...)` and `model.generate()` stay as they
are.

    with attach_hooks(model.model.layers, tenant, model=model):
        model.generate(**inputs)

Each layer waits for its weights before it runs and says when it is done. What brackets the pass is the model's own
forward (`model=`), or the caller's `with tenant.forward():`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

from remap.errors import InvalidArgument, InvalidState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch import nn
    from torch.utils.hooks import RemovableHandle

__all__ = ["AttachedHooks", "Tenant", "attach_hooks", "call_shape"]


class Tenant(Protocol):
    """What the hooks need of a tenant."""

    def forward(self, *, phase: str = ..., tokens: int = ...) -> AbstractContextManager[Any]: ...
    def wait(self, layer: int) -> Any: ...
    def done(self, layer: int) -> Any: ...


class AttachedHooks:
    """What `attach_hooks` put in; `remove()` (or leaving the `with` block) takes it out again. Removing twice does
    nothing.
    """

    def __init__(self, handles: list[RemovableHandle], model: nn.Module | None) -> None:
        self._handles = handles
        self._model = model

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._model is not None:
            # The bracket was an attribute of the instance; without it the class's own forward is found again.
            del self._model.__dict__["forward"]
            self._model = None

    def __enter__(self) -> AttachedHooks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def attach_hooks(layers: Iterable[nn.Module], tenant: Tenant, model: nn.Module | None = None) -> AttachedHooks:
    """Make layer i call `tenant.wait(i)` before its forward and `tenant.done(i)` after.

    With `model`, every call of it is a pass: `with tenant.forward(phase, tokens)`, where a call with one position a
    sequence counts as "decode", others as "prefill". If anything raises in the pass (KeyboardInterrupt too), `done` is
    not called for that layer, and leaving the bracket abandons the pass.

    Raises InvalidArgument for no layers or a layer named twice, InvalidState if `model.forward` was replaced on the
    instance already. Nothing changed then.
    """
    modules = list(layers)
    if not modules or len({id(module) for module in modules}) != len(modules):
        raise InvalidArgument(
            f"expected at least one layer and each layer once, got {len(modules)}", layers=len(modules)
        )
    if model is not None and "forward" in model.__dict__:
        raise InvalidState(
            "model.forward was replaced on this instance (hooks attached already?); "
            "nothing was attached, remove those first"
        )
    handles: list[RemovableHandle] = []
    for index, module in enumerate(modules):
        handles.append(module.register_forward_pre_hook(_before(tenant, index), prepend=True))
        handles.append(module.register_forward_hook(_after(tenant, index)))
    if model is not None:
        # Not a pair of hooks: a forward hook does not run for exceptions that are no `Exception`, and the pass would
        # stay open. `functools.wraps` keeps the signature, which `generate()` inspects. object.__setattr__: not a
        # parameter or submodule.
        object.__setattr__(model, "forward", _bracket(model.forward, tenant))
    return AttachedHooks(handles, model)


def _before(tenant: Tenant, index: int) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, args: Any) -> None:
        tenant.wait(index)

    return hook


def _after(tenant: Tenant, index: int) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        tenant.done(index)

    return hook


def _bracket(forward: Callable[..., Any], tenant: Tenant) -> Callable[..., Any]:
    @functools.wraps(forward)
    def bracketed(*args: Any, **kwargs: Any) -> Any:
        batch, length = call_shape(args, kwargs) or (1, 1)
        with tenant.forward(phase="decode" if length == 1 else "prefill", tokens=batch * length):
            return forward(*args, **kwargs)

    return bracketed


def call_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """(sequences, positions) of a model's call: of `input_ids`, else `inputs_embeds`, else the first tensor of two dimensions."""
    for value in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args, *kwargs.values()):
        shape = getattr(value, "shape", None)
        if shape is not None and len(shape) >= 2:
            return int(shape[0]), int(shape[1])
    return None
