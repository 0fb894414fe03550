# SPDX-License-Identifier: Apache-2.0
"""Lines of log of the commands that go on until they are interrupted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from remap.errors import InvalidArgument

__all__ = ["log_lines"]

LEVELS = ("debug", "info", "warning", "error")


@contextmanager
def log_lines(level: str, of: str) -> Iterator[None]:
    """Send to stderr, a line each, the logs of `of`, of uvicorn and Ray from this level on. The library itself leaves
    that to the program that runs it. Raises InvalidArgument (fields field, value) for a level that is none."""
    if level not in LEVELS:
        raise InvalidArgument(
            f"log-level: must be {', '.join(LEVELS)}, got {level!r}; nothing was started",
            field="log-level",
            value=level,
        )
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in (of, "uvicorn", "ray")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.addHandler(handler)
    loggers[0].setLevel(level.upper())
    try:
        yield
    finally:
        for each, before in zip(loggers, levels):
            each.removeHandler(handler)
            each.setLevel(before)
