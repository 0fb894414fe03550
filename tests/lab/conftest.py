"""The tests of bench/lab: `make test-all` runs them."""

from __future__ import annotations

from effort import LONG
from fixtures import emulated
from hypothesis import settings

__all__ = ["emulated"]

# No test depends on how long something takes: an example may be slow on a busy machine.
settings.register_profile("remap", deadline=None, derandomize=not LONG)
settings.load_profile("remap")
