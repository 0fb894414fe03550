# SPDX-License-Identifier: Apache-2.0
"""The entry point of SGLang's group `sglang.srt.plugins`, active only with REMAP_ENABLE=1 (see docs/sglang.md).

SGLang calls `register` in each of its processes and then applies the registered hooks. If a plugin raises, SGLang logs
the error and serves without the plugin. A user would then believe that remap serves his model; so a refusal is raised
again when SGLang allocates its memory pool, which ends the start of the engine.
"""

from __future__ import annotations

import os
from typing import Any

from remap.errors import Error

__all__ = ["register"]


def register() -> None:
    """Put the hooks in if REMAP_ENABLE is set.

    Raises InvalidArgument for invalid settings, InvalidState for a version of SGLang that the adapter cannot work with.
    """
    from remap.adapters.settings import Settings

    environment = os.environ
    if not environment.get("REMAP_ENABLE"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.version import __version__

    from . import hooks, versions

    try:
        settings = Settings.read(environment)
        if settings is None:
            return
        versions.check_version(__version__)
    except Error as refusal:
        HookRegistry.register(versions.TARGETS["around_alloc"][0], _raises(refusal), HookType.AROUND)
        raise
    hooks.configure(settings, __version__, applied=lambda target: target in HookRegistry._patched)
    for name, targets in versions.TARGETS.items():
        for target in targets:
            HookRegistry.register(target, getattr(hooks, name), HookType.AROUND)


def _raises(refusal: Error) -> Any:
    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        raise refusal

    return around
