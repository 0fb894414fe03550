# SPDX-License-Identifier: Apache-2.0
"""An object as a notebook shows it: a small HTML table, with everything escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from remap.errors import Error

__all__ = ["grid", "table"]


def table(title: object, read: Callable[[], Iterable[tuple[str, object]]]) -> str:
    """A row for each (name, value) that `read()` gives. An Error of remap that it raises is shown in their place: a
    notebook shows an object when it is closed, too."""
    try:
        rows = list(read())
    except Error as error:
        rows = [(type(error).__name__, error)]
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(str(title))}</caption><tbody>{body}</tbody></table>"


def grid(title: object, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a heading over each column."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    caption = f"<caption>{escape(str(title))}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
