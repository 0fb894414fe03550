# SPDX-License-Identifier: Apache-2.0
"""`remap.attach`, for models of transformers. The call imports the adapter, and with it torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters.transformers import Attached

__all__ = ["attach"]


def attach(model: Any, capacity: int | str | None = None, device: str | None = None, **options: Any) -> Attached:
    """Put a transformers model's weights and KV cache into one arena: `with remap.attach(model, capacity="600MiB"):
    ...`.

    `remap.adapters.transformers.attach` documents all options and errors; docs/transformers.md shows how to use it.
    """
    from .adapters.transformers import attach as attach_transformers

    return attach_transformers(model, capacity, device, **options)
