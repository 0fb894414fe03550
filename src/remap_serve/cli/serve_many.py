# SPDX-License-Identifier: Apache-2.0
"""`remap serve-many`: several models on one arena behind OpenAI's endpoints (`remap_serve.cluster.many`)."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from remap.cli.errors import exit_on_error
from remap.cli.log_lines import log_lines
from remap.cli.options import MEMORY, MaxBatchTokens, MaxNumSeqs, memory_bytes
from remap.errors import InvalidArgument
from remap.sizes import show_size

from . import serving
from .serving import Http, http_at, model_folder

if TYPE_CHECKING:
    from remap import Session
    from remap_serve.cluster.prompts import Catalog
    from remap_serve.engine.sharing import SharedEngines

__all__ = ["serve_many"]


def serve_many(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Folders, or hub names, of transformers models (Llama, Qwen, OPT, GPT-2), or SmolLM2; or NAME=FOLDER."
        ),
    ],
    memory: Annotated[
        str | None,
        typer.Option(help=f"{MEMORY} Of all models together.", show_default="a broker's"),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Where they compute: cpu or cuda:N, or a broker's socket, unix:PATH, whose pages they use."),
    ] = "cpu",
    ttft: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds within which first tokens are due.", show_default="none")
    ] = None,
    tbt: Annotated[
        float | None, typer.Option(min=0.0001, help="Seconds from token to token.", show_default="none")
    ] = None,
    quantum: Annotated[
        float,
        typer.Option(
            help="Seconds of a model's turn: so long others wait for memory, and for layers that it has lent."
        ),
    ] = 1.0,
    host: serving.ListenHost = "127.0.0.1",
    port: serving.ListenPort = 8000,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that compute, on a CPU.", show_default="as torch has it")
    ] = None,
    max_num_seqs: MaxNumSeqs = 32,
    max_batch_tokens: MaxBatchTokens = 512,
    max_body: serving.MaxBody = "4MiB",
    max_requests: serving.MaxRequests = 512,
    deadline: serving.DeadlineSeconds = 3600.0,
    grace: serving.GraceSeconds = 20.0,
    allow_host: serving.AllowHost = None,
    access_log: serving.AccessLines = False,
    log_level: serving.LogLevel = "info",
) -> None:
    """Serve more models than memory has room for at once. Interrupt it to end it."""
    console = Console(soft_wrap=True)
    with exit_on_error(), log_lines(log_level, "remap_serve.cluster"):
        serving.require_packages("remap serve-many", "many")
        import torch

        from remap import Session
        from remap.config import Config
        from remap_serve.cluster.many_models import make_many, plan_many
        from remap_serve.cluster.prompts import Catalog, Served
        from remap_serve.cluster.served_model import ends_of, tokenizer_of

        _require_memory(device, memory)
        if not quantum > 0:
            raise InvalidArgument(
                f"quantum must be above 0, got {quantum}; nothing was started; give seconds, such as 1",
                field="quantum",
                value=quantum,
            )
        limits = serving.limits_of(max_body, max_requests, deadline)
        config = Config(ttft_s=ttft, tbt_s=tbt)
        folders = _folders(models)
        if threads is not None:
            torch.set_num_threads(threads)
        with ExitStack() as stack:
            if memory is None:
                session = stack.enter_context(closing(Session(device=device)))
                size, page_bytes = session.capacity_bytes, session.snapshot().page_bytes
                plans, _ = plan_many(folders, size, session.device, page_bytes)
            else:
                size = memory_bytes(memory, device)
                plans, page_bytes = plan_many(folders, size, device)
            served = []
            for name, folder in folders.items():
                tokenizer = tokenizer_of(folder)
                served.append(Served(name, tokenizer, plans[name].positions, ends_of(folder, tokenizer)))
            http = stack.enter_context(http_at(host, port, limits, allow_host, access_log, grace))
            began = time.perf_counter()
            if memory is not None:
                whole = size // page_bytes * page_bytes
                session = stack.enter_context(closing(Session(whole, device=device, page_bytes=page_bytes)))
            shared = make_many(plans, session, config, max_num_seqs, max_batch_tokens, quantum)
            weights = sum(plan.weights for plan in plans.values())
            text = (
                f"{len(plans)} models of {show_size(weights)} on {show_size(size)} of {session.broker or session.device}, "
                f"loaded in {time.perf_counter() - began:.1f} s: {', '.join(plans)}"
            )
            console.print(text, markup=False, highlight=False)
            asyncio.run(_serve(session, shared, Catalog(served), console, http))
    console.print("ended", highlight=False)


def _require_memory(device: str, memory: str | None) -> None:
    """A broker's pages have their own size. Raises InvalidArgument (fields field, value)."""
    joined = device.startswith("unix:")
    if joined is (memory is not None):
        what = f"{device}: the memory is the broker's" if joined else "a device needs --memory"
        raise InvalidArgument(
            f"memory: {what}; nothing was started; {'leave it out' if joined else 'give it, such as 16GiB'}",
            field="memory",
            value=memory,
        )


def _folders(models: list[str]) -> dict[str, str]:
    """name -> folder, or hub's name. Raises InvalidArgument (fields field, value) for a name that comes twice."""
    found: dict[str, str] = {}
    for each in models:
        named, mark, path = each.partition("=")
        if not mark or os.path.exists(each):
            named, path = each.rstrip("/").rpartition("/")[2], each
        if not named or not path or named in found:
            why = f"{named!r} names two models" if named in found else f"{each!r} is no folder, and no NAME=FOLDER"
            raise InvalidArgument(
                f"models: {why}; nothing was started; give each as NAME=FOLDER, with a name of its own",
                field="models",
                value=each,
            )
        found[named] = model_folder(path)
    return found


async def _serve(session: Session, shared: SharedEngines, catalog: Catalog, console: Console, http: Http) -> None:
    from remap_serve.cluster.app import make_endpoints
    from remap_serve.cluster.many import ManyModels
    from remap_serve.cluster.many_serving import serving_of

    front = ManyModels(shared)
    app = make_endpoints(serving_of(front, catalog, session), *http.app)
    await front.start()
    try:
        await http.serve(front, app, lambda: console.print(f"ready: {http.url}/v1", markup=False, highlight=False))
    finally:
        await front.close()
