# SPDX-License-Identifier: Apache-2.0
"""Pages from the templates beside this module, each in one file that loads nothing from the network.

A page escapes every value, except those that its template marks as safe.
"""

from __future__ import annotations

from typing import Any

from remap.cli.errors import needed

__all__ = ["need_jinja", "render"]


def need_jinja() -> Any:
    """Import the module. Raises Missing if it is not installed."""
    return needed("jinja2", "cli", "a page")


def render(template: str, **values: Any) -> str:
    """The whole HTML document. Raises Missing without jinja2, and UndefinedError if a value is missing."""
    jinja = need_jinja()
    pages = jinja.Environment(
        loader=jinja.PackageLoader("remap_serve.cli"),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return str(pages.get_template(f"{template}.html.j2").render(values))
