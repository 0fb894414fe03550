"""Hooks for a model that was attached with `hooks=False`; without that option `Session.attach` puts them in by itself.

    tenant = session.attach(model, kv=spec, hooks=False)
    with attach_hooks(model.model.layers, tenant, model=model):
        model.generate(**inputs)

The model's own forward (`model=`) brackets the pass, or the caller's `with tenant.forward():` does. See
`remap.model.hooks`.
"""

from remap.model.hooks import AttachedHooks, Tenant, attach_hooks, call_shape

__all__ = ["AttachedHooks", "Tenant", "attach_hooks", "call_shape"]
