# SPDX-License-Identifier: Apache-2.0
"""`remap top`: what the members of a broker do, or the groups of a running cluster, as its server's /cluster says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any
from urllib.error import URLError
from urllib.request import urlopen

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from remap.errors import InvalidArgument

from .errors import exit_on_error, needed
from .options import Json, print_json, print_whole, whole

__all__ = ["top"]

EVERY_S = 0.5
ANSWER_S = 5.0
URL = "http://127.0.0.1:8000"
View = Callable[[], tuple[dict[str, Any], list[Table]]]


def top(
    socket: Annotated[Path | None, typer.Option(help="Of `remap serve`, or of a session that shows itself.")] = None,
    url: Annotated[str | None, typer.Option(help=f"Of `remap cluster serve`; {URL} by default.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    as_json: Json = False,
) -> None:
    """Show who has the memory of a broker (--socket), with layers away, KV, waits and decisions; or the groups of a cluster,
    their layers, requests and KV cache. Until it is interrupted; as JSON once."""
    console = Console()
    with exit_on_error():
        if socket is not None and url is not None:
            raise InvalidArgument("give --socket or --url, not both", socket=str(socket), url=url)
        with _cluster(url or URL) if socket is None else _broker(socket) as view:
            document, tables = view()
            if as_json:  # one object has an end
                print_json(document)
                return
            if once:
                for table in tables:
                    print_whole(console, table)
                return
            try:
                with Live(_shown(console, tables), console=console, auto_refresh=False) as live:
                    while True:
                        time.sleep(EVERY_S)
                        live.update(_shown(console, view()[1]), refresh=True)
            except KeyboardInterrupt:
                return


def _shown(console: Console, tables: list[Table]) -> Group:
    return Group(*(whole(console, each) for each in tables))


@contextmanager
def _broker(socket: Path) -> Iterator[View]:
    needed("msgspec", "broker", "--socket")
    from remap.broker.observer import Observer

    from .top_broker import document, tables

    with Observer(str(socket)) as observer:

        def view() -> tuple[dict[str, Any], list[Table]]:
            seen = observer.look()
            return document(seen), tables(seen)

        yield view


@contextmanager
def _cluster(url: str) -> Iterator[View]:
    def view() -> tuple[dict[str, Any], list[Table]]:
        state = _state(url)
        return state, [_table(state)]

    yield view


def _state(url: str) -> dict[str, Any]:
    """Raises InvalidArgument (fields field, value) if no cluster answers there."""
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("the address must begin with http:// or https://")
        with urlopen(f"{url.rstrip('/')}/cluster", timeout=ANSWER_S) as answer:
            state = json.loads(answer.read())
        if not isinstance(state, dict) or "groups" not in state:
            raise ValueError("what answers is no cluster")
    except (URLError, HTTPException, OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"url: {url} shows no cluster: {error}; give --socket PATH of a broker (`remap serve`), or the address that "
            "`remap cluster serve` said",
            field="url",
            value=url,
        ) from error
    return state


def _table(state: dict[str, Any]) -> Table:
    title = f"epoch {state['epoch']}, {state['unfinished']} requests unfinished, {state['restarts']} restarted"
    table = Table(title=title, title_justify="left")
    for name in ("group", "epoch", "phase", "stages: layers"):
        table.add_column(name, overflow="fold")
    for name in ("running", "waiting", "KV tokens", "of", "used"):
        table.add_column(name, justify="right", overflow="fold")
    for group in state["groups"]:
        stages = group["stages"]
        capacity, tokens = group["kv_capacity"], group["kv_tokens"]
        changing = "" if group["changing"] is None else f" -> {group['changing']}"
        table.add_row(
            stages[0]["instance"],
            f"{group['epoch']}{changing}",
            group["phase"],
            "  ".join(_layers(stage) for stage in stages),
            *(str(group[name]) for name in ("running", "waiting")),
            *(str(tokens), str(capacity), f"{tokens / capacity:.0%}" if capacity else "-"),
        )
    for name, why in state["rejected"].items():
        table.add_row(name, "-", "rejected", why, *5 * ["-"])
    return table


def _layers(stage: dict[str, Any]) -> str:
    first, end = stage["first"], stage["end"]
    return f"{stage['instance']}: {f'{first}-{end - 1}' if first < end else 'none'}"
