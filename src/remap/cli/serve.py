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
from remap.sizes import parse_size

from .errors import exit_on_error, needed

__all__ = ["serve"]


def serve(
    socket: Annotated[Path, typer.Option(help="Where members join: a path for a Unix-domain socket.")],
    capacity: Annotated[str, typer.Option(help="Memory of all members together, such as 24GiB.")],
    page_bytes: Annotated[str, typer.Option(help="Size of a page.")] = "2MiB",
    device: Annotated[str, typer.Option(help="Where the pages are; only cpu yet.")] = "cpu",
    metrics: Annotated[
        str | None, typer.Option(help="Answer GET /metrics at this port of this machine, or at HOST:PORT.")
    ] = None,
) -> None:
    """Share one arena among processes: each opens remap.Session(device="unix:SOCKET"). Until it is interrupted."""
    with exit_on_error():
        if device != "cpu":
            raise InvalidArgument(
                f"device: pages of {device} cannot be shared between processes yet; nothing was started; leave it out",
                device=device,
            )
        sizes = parse_size(capacity, "capacity"), parse_size(page_bytes, "page_bytes")
        if metrics is not None:
            needed("prometheus_client", "metrics", "--metrics")
        try:
            with ExitStack() as undo:
                _serve(socket, sizes, page_bytes, metrics, undo)
        except KeyboardInterrupt:
            return


def _serve(socket: Path, sizes: tuple[int, int], page: str, metrics: str | None, undo: ExitStack) -> None:
    """Until a signal interrupts it. page: the size of one, as it was given."""
    from remap.broker.server import Broker

    at = None if metrics is None else _address(metrics)
    broker = undo.enter_context(Broker(socket, *sizes))
    signal.signal(signal.SIGTERM, _interrupt)
    said = f"{broker.ledger.pages} pages of {page}; join with remap.Session(device='unix:{socket}')"
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
