# SPDX-License-Identifier: Apache-2.0
"""Of the commands that serve models by HTTP: how they listen and answer, and where a model's files are."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remap.errors import InvalidArgument

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from remap_serve.cluster.limits import FrontLimits
    from remap_serve.cluster.server import Fronting

__all__ = ["Http", "http_at", "model_folder", "open_socket"]

SMOLLM2 = "SmolLM2"


def open_socket(host: str, port: int) -> socket.socket:
    """Raises InvalidArgument (fields host, port) if this process cannot listen there."""
    try:
        return socket.create_server((host, port))
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(
            f"host and port: {host}:{port} cannot be listened at: {error}; nothing was started; choose another",
            host=host,
            port=port,
        ) from error


@dataclass(frozen=True)
class Http:
    """How a command serves. app: what makes the endpoints takes it. started: ends the answers "starting"."""

    listening: socket.socket
    app: tuple[FrontLimits, frozenset[str] | None, bool]
    grace_s: float
    started: Callable[[], None]

    @property
    def url(self) -> str:
        """Where it answers."""
        host, port = self.listening.getsockname()[:2]
        return f"http://{host}:{port}"

    async def serve(
        self,
        front: Fronting,
        app: ASGIApp,
        ready: Callable[[], None],
        broken: Callable[[], Coroutine[Any, Any, str]] | None = None,
    ) -> None:
        """As `remap_serve.cluster.server.serve`, from now on."""
        from remap_serve.cluster.server import serve

        await asyncio.to_thread(self.started)
        await serve(front, app, self.listening, ready, self.grace_s, broken)


@contextmanager
def http_at(
    host: str, port: int, limits: FrontLimits, allow_host: Collection[str] | None, access_log: bool, grace_s: float
) -> Iterator[Http]:
    """Listen, and answer that the server is starting, until it serves. Raises InvalidArgument as `open_socket` does."""
    from remap_serve.cluster.app import make_starting
    from remap_serve.cluster.guard import hosts_of
    from remap_serve.cluster.server import starting

    hosts = hosts_of(host, allow_host or ())
    with open_socket(host, port) as listening, starting(listening, make_starting(hosts, access_log)) as started:
        yield Http(listening, (limits, hosts, access_log), grace_s, started)


def model_folder(name: str) -> str:
    """The model's folder or hub name, as another process may have it. SmolLM2 is converted first, if it has not been. Raises
    InvalidArgument for files that are cut off."""
    from remap_serve.cluster.served_model import check_files

    if name == SMOLLM2:
        from remap.cli import smollm2

        path = smollm2.cached_folder(smollm2.find_gguf(), "float32")
        if not path.is_dir():
            smollm2.load("float32")  # converts it
        return str(path)
    if os.path.isdir(name):
        folder = str(Path(name).resolve())  # instances have working folders of their own
        check_files(folder)
        return folder
    return name
