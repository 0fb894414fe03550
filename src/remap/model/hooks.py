# SPDX-License-Identifier: Apache-2.0
"""Hooks: each layer of a torch model waits for its weights before it runs and says when it is done; a call is a pass.

They are around the layer's whole call (`_call_impl`), not among its forward hooks: hooks of others read its weights too,
whenever they were registered. `Session.attach` puts them in unless it gets `hooks=False`; they go when the tenant goes. No
layer streams until one complete pass has waited for every layer, so a model that runs past its hooks only loses the remapping.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import torch

from remap.errors import InvalidArgument, InvalidState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch import nn

__all__ = ["OURS", "AttachedHooks", "HookedTenant", "attach_hooks", "call_shape"]

OURS = "_put_in_by_remap"
"""True as an attribute of every function that is put into a module: copies of the module are made without them."""


class HookedTenant(Protocol):
    """The part of a tenant that the hooks use."""

    name: str
    hooks: AttachedHooks | None

    @property
    def modules(self) -> Sequence[Any]: ...
    @property
    def in_pass(self) -> bool: ...
    @property
    def streaming(self) -> bool: ...
    def at_home(self, layer: int) -> bool: ...
    def away(self) -> Collection[int]: ...
    def forward(self, *, phase: str = ..., tokens: int = ...) -> AbstractContextManager[Any]: ...
    def wait(self, layer: int) -> Any: ...
    def done(self, layer: int) -> Any: ...


class AttachedHooks:
    """The hooks of `attach_hooks`. `remove()`, or leaving the `with` block, takes them out; twice does no harm."""

    def __init__(self, tenant: HookedTenant) -> None:
        self._tenant: HookedTenant | None = tenant
        # (module, attribute, ours, what the instance had there before)
        self._put_in: list[tuple[nn.Module, str, Any, Any]] = []
        self.removed = False

    def remove(self) -> None:
        """Restore the modules. A wrapper that others have put around one of ours meanwhile stays."""
        self.removed = True
        while self._put_in:
            module, name, ours, before = self._put_in.pop()
            if module.__dict__.get(name) is not ours:
                continue
            if before is None:
                # An attribute of the instance; without it Python finds the class's own again.
                del module.__dict__[name]
            else:
                module.__dict__[name] = before
        tenant, self._tenant = self._tenant, None
        if tenant is not None and tenant.hooks is self:
            tenant.hooks = None

    def put_in(self, modules: Sequence[nn.Module], model: nn.Module | None) -> None:
        """For `attach_hooks`, which takes them out again if this raises."""
        tenant = self._tenant
        assert tenant is not None
        for index, module in enumerate(modules):
            self._around(module, functools.partial(_layer, tenant, index))
        if model is not None:
            # Not a pair of hooks: a forward hook does not run for exceptions that are no `Exception`, so the pass would
            # stay open.
            self.wrap(model, "forward", _bracket(model.forward, tenant, self))

    def guard(self, modules: Sequence[nn.Module], part: int) -> None:
        """Refuse calls of these modules, which no layer has, outside of passes while their bytes, those of `part`, are not there.
        A pass waits for them when it begins."""
        tenant = self._tenant
        assert tenant is not None
        for module in modules:
            self._around(module, functools.partial(_if_ready, tenant, part))

    def _around(self, module: nn.Module, make: Callable[..., Callable[..., Any]]) -> None:
        """All ways on which torch calls the module go through `make(module, call, hooks)`."""
        for name in ("_call_impl", "_compiled_call_impl"):
            call = getattr(module, name)
            if call is not None:
                self.wrap(module, name, make(module, call, self))

    def wrap(self, module: nn.Module, name: str, ours: Callable[..., Any]) -> None:
        """Put `ours` in the place of an attribute of the instance, until `remove`."""
        self._put_in.append((module, name, _ours(ours), module.__dict__.get(name)))
        # Not through the module's own __setattr__, which is for parameters and submodules.
        module.__dict__[name] = ours

    def __enter__(self) -> AttachedHooks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def attach_hooks(layers: Iterable[nn.Module], tenant: HookedTenant, model: nn.Module | None = None) -> AttachedHooks:
    """Make layer i call `tenant.wait(i)` before its forward and `tenant.done(i)` after: for `attach(..., hooks=False)`.

    layers: exactly the attached modules, in their order, `extra_layers` last. With `model`, every call of it is a pass:
    `with tenant.forward(phase, tokens)`. A call with one position per sequence counts as "decode", others as "prefill";
    inside a pass that the caller has opened, the call is part of that pass. If anything raises in the pass
    (KeyboardInterrupt too), `done` is not called for that layer, and leaving the bracket abandons the pass.

    Calling a layer outside of a pass while layers are streamed raises InvalidState; so does `backward()` through a
    layer that has been streamed since: its weights are not there any more.

    Raises InvalidArgument (fields index, layers, expected) for modules that are not the tenant's layers in number,
    order and identity; InvalidState (field tenant) if the tenant has hooks already. Nothing changed then. The hooks go
    with the tenant.
    """
    modules = list(layers)
    expected = list(tenant.modules)
    places = {id(module): place for place, module in enumerate(expected)}
    if len(modules) != len(expected):
        raise InvalidArgument(
            f"expected the {len(expected)} layers that tenant {tenant.name!r} was attached with, got {len(modules)} "
            "modules; nothing was attached; give all of them, extra_layers last",
            layers=len(modules),
            expected=len(expected),
        )
    for index, (given, own) in enumerate(zip(modules, expected, strict=True)):
        if given is not own:
            place = places.get(id(given))
            what = "is none of its layers" if place is None else f"is its layer {place}"
            raise InvalidArgument(
                f"layers[{index}] is not layer {index} of tenant {tenant.name!r}, it {what}; nothing was attached; "
                "give the modules that were attached, in their order",
                index=index,
                layers=len(modules),
                expected=index,
                found=place,
            )
    if tenant.hooks is not None:
        raise InvalidState(
            f"tenant {tenant.name!r} has hooks already; nothing was attached; session.attach puts hooks in unless it "
            "gets hooks=False",
            tenant=tenant.name,
        )
    hooks = AttachedHooks(tenant)
    try:
        hooks.put_in(modules, model)
        tenant.hooks = hooks
    except BaseException:
        hooks.remove()
        raise
    return hooks


def _ours(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, OURS, True)
    return function


def _layer(
    tenant: HookedTenant, index: int, module: nn.Module, call: Callable[..., Any], hooks: AttachedHooks
) -> Callable[..., Any]:
    def refuse(grad: Any) -> None:
        if not tenant.at_home(index):
            raise InvalidState(
                f"backward() reached layer {index} of tenant {tenant.name!r}, whose weights are no longer at their "
                "addresses; discard the gradients; train a model that is not attached, or whose layers are all "
                "resident",
                tenant=tenant.name,
                layer=index,
            )

    def called(*args: Any, **kwargs: Any) -> Any:
        if hooks.removed:  # others kept it
            return call(*args, **kwargs)
        if not tenant.in_pass and tenant.streaming:
            raise InvalidState(
                f"layer {index} of tenant {tenant.name!r} was called outside of a pass while layers are streamed; "
                "nothing was computed; call the model, or put `with tenant.forward():` around the call",
                tenant=tenant.name,
                layer=index,
            )
        tenant.wait(index)
        output = call(*args, **kwargs)
        tenant.done(index)
        if torch.is_grad_enabled():
            for each in output if isinstance(output, tuple | list) else (output,):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(refuse)
        return output

    return called


def _if_ready(
    tenant: HookedTenant, part: int, module: nn.Module, call: Callable[..., Any], hooks: AttachedHooks
) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if not hooks.removed and not tenant.in_pass and part in tenant.away():
            raise InvalidState(
                f"{type(module).__name__} of tenant {tenant.name!r} was called outside of a pass while its weights load, or have "
                "no pages; nothing was computed; call the model, or put `with tenant.forward():` around the call",
                tenant=tenant.name,
            )
        return call(*args, **kwargs)

    return called


def _bracket(forward: Callable[..., Any], tenant: HookedTenant, hooks: AttachedHooks) -> Callable[..., Any]:
    # `wraps` keeps the signature, which `generate()` inspects.
    @functools.wraps(forward)
    def bracketed(*args: Any, **kwargs: Any) -> Any:
        if hooks.removed or tenant.in_pass:
            return forward(*args, **kwargs)
        # Under dynamo torch 2.11 always says that it exports; an export that goes by dynamo cannot trace the core, and says so.
        exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
        if torch.jit.is_tracing() or exporting:  # type: ignore[attr-defined]
            raise InvalidState(
                f"the model of tenant {tenant.name!r} is attached: a trace or export of it would compute without "
                "waiting for its layers; nothing was computed; trace it before it is attached",
                tenant=tenant.name,
            )
        batch, length = call_shape(args, kwargs) or (1, 1)
        with tenant.forward(phase="decode" if length == 1 else "prefill", tokens=batch * length):
            return forward(*args, **kwargs)

    return _ours(bracketed)


def call_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """(sequences, positions) of a model's call.

    They come from `input_ids`, else from `inputs_embeds`, else from the first tensor of at least two dimensions. None
    if there is none.
    """
    for value in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args, *kwargs.values()):
        shape = getattr(value, "shape", None)
        if shape is not None and len(shape) >= 2:
            return int(shape[0]), int(shape[1])
    return None
