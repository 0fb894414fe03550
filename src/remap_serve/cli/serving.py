# SPDX-License-Identifier: Apache-2.0
"""Of the commands that serve models by HTTP: their options, how they listen and answer, and where a model's files are."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remap.cli.errors import needed
from remap.errors import InvalidArgument
from remap.sizes import parse_size

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from remap_serve.cluster.limits import FrontLimits
    from remap_serve.cluster.server import Fronting

__all__ = [
    "AccessLines",
    "AllowHost",
    "DeadlineSeconds",
    "GraceSeconds",
    "Http",
    "ListenHost",
    "ListenPort",
    "LogLevel",
    "MaxBody",
    "MaxRequests",
    "http_at",
    "limits_of",
    "model_folder",
    "open_socket",
    "require_packages",
]

SMOLLM2 = "SmolLM2"

ListenHost = Annotated[str, typer.Option(help="Address to listen at.")]
ListenPort = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")]
MaxBody = Annotated[str, typer.Option(help="Largest body of a request; a larger one is answered with 413.")]
MaxRequests = Annotated[
    int, typer.Option(min=1, help="Requests that are open at once, at most; others are answered with 429.")
]
DeadlineSeconds = Annotated[
    float, typer.Option(min=0.001, help="Seconds that a request may take with its answer; then it ends with 504.")
]
GraceSeconds = Annotated[
    float, typer.Option(min=0.0, help="Seconds that unfinished answers have when it is asked to end (SIGTERM, SIGINT).")
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        help="Name by which callers may reach it (their Host header); may be repeated.",
        show_default="at a loopback address its own names, else any",
    ),
]
AccessLines = Annotated[bool, typer.Option("--access-log", help="A line on stderr for each request.")]
LogLevel = Annotated[str, typer.Option(help="What is said on stderr at least: debug, info, warning or error.")]


def require_packages(command: str, extra: str, *more: str) -> None:
    """Those of every command that serves, and more of its extra. Raises Missing."""
    for package in (*more, "msgspec", "fastapi", "uvicorn", "prometheus_client"):
        needed(package, extra, f"`{command}`")
    for package in ("torch", "transformers"):
        needed(package, "transformers", f"`{command}`")


def limits_of(max_body: str, max_requests: int, deadline: float) -> FrontLimits:
    """Raises InvalidArgument for a size that is none."""
    from remap_serve.cluster.limits import FrontLimits

    return FrontLimits(parse_size(max_body, "max-body"), max_requests, deadline_s=deadline)


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
