# SPDX-License-Identifier: Apache-2.0
"""A session that `remap top` shows from another process: by `remap.advanced.show`, or by the environment variable REMAP_TOP."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from remap.errors import Error

if TYPE_CHECKING:
    from remap.broker.window import Window

__all__ = ["VARIABLE", "show", "show_if_asked"]

VARIABLE = "REMAP_TOP"
_logger = logging.getLogger("remap.broker")


def show(session: Any, path: str) -> Window:
    """As `remap.advanced.show`."""
    from remap.broker.window import Window

    return Window(session, path)


def show_if_asked(session: Any) -> None:
    """At the path that the variable names, `{pid}` in it being the process. It serves without that, too: a fault of it is
    logged."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        show(session, path.replace("{pid}", str(os.getpid())))
    except (Error, ImportError) as error:
        _logger.warning("%s=%s: this session is not shown: %s", VARIABLE, path, error)
