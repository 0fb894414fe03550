# SPDX-License-Identifier: Apache-2.0
"""From the public handle of a tenant to what this library itself knows of it. Loads nothing; doubles of a tenant pass it too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remap.tenant import Inside, Tenant

__all__ = ["inside"]

_PLACE = "_inside"


def inside(tenant: Tenant) -> Inside:
    """The tenant as this library itself sees it (see `Inside`). A simulation's or test's double of a tenant is its own."""
    given: Any = tenant
    found: Inside = getattr(given, _PLACE, given)
    return found
