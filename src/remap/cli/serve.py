"""`remap serve`: the broker of an arena that several processes share."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from remap.errors import InvalidArgument
from remap.sizes import parse_size

from .errors import exit_on_error

__all__ = ["serve"]


def serve(
    socket: Annotated[Path, typer.Option(help="Where members join: a path for a Unix-domain socket.")],
    capacity: Annotated[str, typer.Option(help="Memory of all members together, such as 24GiB.")],
    page_bytes: Annotated[str, typer.Option(help="Size of a page.")] = "2MiB",
    device: Annotated[str, typer.Option(help="Where the pages are; only cpu yet.")] = "cpu",
) -> None:
    """Share one arena among processes: each opens remap.Session(device="unix:SOCKET"). Until it is interrupted."""
    with exit_on_error():
        if device != "cpu":
            raise InvalidArgument(
                f"device: pages of {device} cannot be shared between processes yet; nothing was started; leave it out",
                device=device,
            )
        from remap.broker.server import Broker

        with Broker(socket, parse_size(capacity, "capacity"), parse_size(page_bytes, "page_bytes")) as broker:
            signal.signal(signal.SIGTERM, _interrupt)
            said = f"{broker.ledger.pages} pages of {page_bytes}; join with remap.Session(device='unix:{socket}')"
            Console(soft_wrap=True).print(said, markup=False, highlight=False)
            try:
                broker.wait()
            except KeyboardInterrupt:
                return


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
