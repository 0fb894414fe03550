"""`remap.attach`: the short way in, for models of transformers. Loads the adapter, and with it torch, when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters.transformers import Attached

__all__ = ["attach"]


def attach(model: Any, capacity: int | str | None = None, device: str | None = None, **options: Any) -> Attached:
    """A transformers model's weights and KV cache in one arena: `with remap.attach(model, capacity="600MiB"): ...generate()`.

    See `remap.adapters.transformers.attach` for all options and errors; docs/transformers.md has a page about it.
    """
    from .adapters.transformers import attach as attach_transformers

    return attach_transformers(model, capacity, device, **options)
