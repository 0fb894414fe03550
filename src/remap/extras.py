# SPDX-License-Identifier: Apache-2.0
"""How to install what an extra brings.

The hint names the packages themselves, read from the installed distribution: it is right wherever the wheel came from,
and needs no index that has remap.
"""

from __future__ import annotations

__all__ = ["DISTRIBUTION", "install"]

DISTRIBUTION = "remap-llm"  # its name in pyproject.toml; the module is `remap`


def install(extra: str) -> str:
    """The command that installs what `extra` brings, such as "pip install 'typer>=0.12' 'rich>=13'".

    Where remap was not installed (a source tree on the path), or the extra is unknown there, it is the command for a clone.
    """
    from importlib.metadata import PackageNotFoundError, requires  # takes 20 ms: only where something is missing

    try:
        stated = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        stated = []
    split = [each.partition(";") for each in stated]
    found = [name.strip() for name, _, marker in split if marker.strip().replace("'", '"') == f'extra == "{extra}"']
    return " ".join(["pip install", *(f"'{each}'" for each in found or [f".[{extra}]"])]) + (
        "" if found else ", in a clone of remap"
    )
