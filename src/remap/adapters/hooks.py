# SPDX-License-Identifier: Apache-2.0
"""Hooks for a model that was attached with `hooks=False`; without that option `Session.attach` puts them in by itself.

    tenant = session.attach(model, kv=spec, hooks=False)
    with attach_hooks(model.model.layers, tenant, model=model):
        model.generate(**inputs)

The model's own forward (`model=`) brackets the pass, or the caller's `with tenant.forward():` does. See
`remap.model.hooks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from remap.internals import internals
from remap.model import hooks
from remap.model.hooks import AttachedHooks, call_shape

if TYPE_CHECKING:
    from torch import nn

    from remap.tenant import Tenant

__all__ = ["AttachedHooks", "attach_hooks", "call_shape"]


def attach_hooks(layers: Iterable[nn.Module], tenant: Tenant, model: nn.Module | None = None) -> AttachedHooks:
    """`remap.model.hooks.attach_hooks`, for the tenant that `attach(..., hooks=False)` returned."""
    return hooks.attach_hooks(layers, internals(tenant), model)
