# SPDX-License-Identifier: Apache-2.0
"""How to install what an extra brings.

The hint names the packages themselves, read from the installed distribution: it is right wherever the wheel came from,
and needs no index that has remap.
"""

from __future__ import annotations

__all__ = ["DISTRIBUTIONS", "OF_SERVE", "install"]

DISTRIBUTIONS = ("remap-llm", "remap-serve")  # names in pyproject.toml; what is imported is `remap`, and `remap_serve`
OF_SERVE = ("demo", "sim", "cluster", "many")
"""The extras of the second."""


def install(extra: str) -> str:
    """The command that installs what `extra` brings, such as "pip install 'typer>=0.12' 'rich>=13'".

    Where remap was not installed (a source tree on the path), or the extra is unknown there, it is the command for a clone.
    """
    from contextlib import suppress
    from importlib.metadata import PackageNotFoundError, requires  # takes 20 ms: only where something is missing

    stated: list[str] = []
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            stated += requires(name) or []
    split = [each.partition(";") for each in stated]
    folder = "./src/remap_serve" if extra in OF_SERVE else "."
    found = [name.strip() for name, _, marker in split if marker.strip().replace("'", '"') == f'extra == "{extra}"']
    return " ".join(["pip install", *(f"'{each}'" for each in found or [f"{folder}[{extra}]"])]) + (
        "" if found else ", in a clone of remap"
    )
