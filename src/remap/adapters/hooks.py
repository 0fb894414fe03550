"""Hooks by hand, for a model that was attached with `hooks=False`: otherwise `Session.attach` puts them in by itself.

    tenant = session.attach(model, kv=spec, hooks=False)
    with attach_hooks(model.model.layers, tenant, model=model):
        model.generate(**inputs)

What brackets the pass is the model's own forward (`model=`), or the caller's `with tenant.forward():`. See `remap.model.hooks`.
"""

from remap.model.hooks import AttachedHooks, Tenant, attach_hooks, call_shape

__all__ = ["AttachedHooks", "Tenant", "attach_hooks", "call_shape"]
