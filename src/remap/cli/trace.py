# SPDX-License-Identifier: Apache-2.0
"""`remap trace`: what the members of a broker do for a while, or a session that shows itself, as a file for Perfetto."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from remap.errors import InvalidArgument

from .errors import exit_on_error, needed

__all__ = ["trace"]

EVERY_S = 0.2
"""A session keeps its last events; who looks so often loses none of one that makes a thousand a second."""


def trace(
    out: Annotated[Path, typer.Argument(help="The file to write: JSON, which https://ui.perfetto.dev opens.")],
    socket: Annotated[Path, typer.Option(help="Of `remap serve`, or of a session that shows itself.")],
    seconds: Annotated[float, typer.Option(min=0.0, help="For how long.")] = 10.0,
) -> None:
    """Write what sessions do from now on: passes with their waits and copies, steps, decisions with reasons, and pages that come
    from and go to other processes. For `seconds`, or until it is interrupted. Nothing is synchronised for it; a session keeps
    events only while it is traced."""
    with exit_on_error():
        needed("msgspec", "broker", "remap trace")
        from remap.broker.observer import Observer

        from .trace_events import Recording

        if out.exists() and not out.is_file():
            raise InvalidArgument(f"out: {out} is no file; nothing was traced", field="out", value=str(out))
        recording = Recording()
        with Observer(str(socket)) as observer:
            end = time.monotonic() + seconds
            try:
                while True:
                    recording.add(observer.look(events=True))
                    left = end - time.monotonic()
                    if left <= 0:
                        break
                    time.sleep(min(EVERY_S, left))
            except KeyboardInterrupt:
                pass  # what has been seen is written
        try:
            out.write_text(json.dumps(recording.document(), allow_nan=False))
        except OSError as error:
            raise InvalidArgument(
                f"out: {out} cannot be written: {error}; give another file", field="out", value=str(out)
            ) from error
    lost = f", {recording.lost} more were lost" if recording.lost else ""
    said = f"{out}: {recording.events} events of {recording.members} sessions{lost}; open it at https://ui.perfetto.dev"
    Console(soft_wrap=True).print(said, markup=False, highlight=False)
