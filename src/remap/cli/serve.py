# SPDX-License-Identifier: Apache-2.0
"""`remap serve`: the broker of an arena that several processes share."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from remap.errors import InvalidArgument
from remap.memory.device import Platform, usual_page_bytes
from remap.sizes import parse_size, show_size

from .errors import exit_on_error, needed
from .log_lines import log_lines

__all__ = ["serve"]


def serve(
    socket: Annotated[Path, typer.Option(help="Where members join: a path for a Unix-domain socket.")],
    capacity: Annotated[str, typer.Option(help="Memory of all members together, such as 24GiB.")],
    page_bytes: Annotated[
        str, typer.Option(help="Size of a page; auto: 2MiB, of a large arena on a GPU 4MiB.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Where the pages are: cpu or cuda:N.")] = "cpu",
    metrics: Annotated[
        str | None, typer.Option(help="Answer GET /metrics at this port of this machine, or at HOST:PORT.")
    ] = None,
) -> None:
    """Share one arena among processes: each opens remap.Session(device="unix:SOCKET"). Until it is interrupted."""
    with exit_on_error():
        size = parse_size(capacity, "capacity")
        page = (
            usual_page_bytes(size, device, Platform()) if page_bytes == "auto" else parse_size(page_bytes, "page_bytes")
        )
        needed("msgspec", "broker", "remap serve")
        if metrics is not None:
            needed("prometheus_client", "metrics", "--metrics")
        try:
            with ExitStack() as undo:
                _serve(socket, size, page, device, metrics, undo)
        except KeyboardInterrupt:
            return


def _serve(socket: Path, size: int, page: int, device: str, metrics: str | None, undo: ExitStack) -> None:
    """Until a signal interrupts it."""
    from remap.broker.server import Broker

    at = None if metrics is None else _address(metrics)
    undo.enter_context(log_lines("warning", "remap.broker"))
    broker = undo.enter_context(Broker(socket, size, page, device))
    signal.signal(signal.SIGTERM, _interrupt)
    said = (
        f"{broker.ledger.pages} pages of {show_size(page)} on {device}; join with remap.Session(device='unix:{socket}')"
    )
    if at is not None:
        from remap.broker.metrics import serve_metrics

        url, close = serve_metrics(str(socket), *at)
        undo.callback(close)
        said += f"; {url}"
    Console(soft_wrap=True).print(said, markup=False, highlight=False)
    broker.wait()


def _address(text: str) -> tuple[str, int]:
    """(host, port) of "HOST:PORT", or of a port of this machine alone. Raises InvalidArgument (fields field, value)."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdecimal()) or int(port) > 0xFFFF or (colon and not host):
        raise InvalidArgument(
            f"metrics must be a port, for this machine alone, or HOST:PORT, got {text!r}; nothing was started",
            field="metrics",
            value=text,
        )
    return host or "127.0.0.1", int(port)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
