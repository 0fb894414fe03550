# SPDX-License-Identifier: Apache-2.0
"""`remap cluster serve`: instances of one model behind OpenAI's endpoints (`remap_serve.cluster.server`)."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from remap.cli.errors import FAILED, exit_on_error, needed
from remap.cli.log_lines import log_lines
from remap.cli.options import MEMORY, MaxBatchTokens, MaxNumSeqs, memory_bytes
from remap.config import invalid
from remap.errors import InvalidArgument
from remap.sizes import parse_size

from . import serving
from .serving import Http, http_at, model_folder

if TYPE_CHECKING:
    from remap_serve.cluster.control import GroupPolicy
    from remap_serve.cluster.prompts import Served
    from remap_serve.cluster.ray_cluster import RayInstances
    from remap_serve.cluster.ray_keeper import ClusterPlan
    from remap_serve.policy.cluster.pipeline import Network

__all__ = ["app"]

TIMEOUT_S = 30.0
"""Without a report, or an answer to a command, for so long an instance is killed and started again."""

app = typer.Typer(help="Several instances of one model that answer bursts together.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Several instances of one model that answer bursts together."""


@app.command()
def serve(
    model: Annotated[
        str, typer.Option(help="Folder, or hub name, of a transformers model: Llama, Qwen, OPT, GPT-2; or SmolLM2.")
    ],
    instances: Annotated[int, typer.Option(min=1, help="Instances of the model, each a process.")] = 2,
    memory: Annotated[
        str | None,
        typer.Option(
            help=f"{MEMORY} Of each instance.",
            show_default="weights, and KV of 8192 tokens",
        ),
    ] = None,
    host_kv: Annotated[
        str | None,
        typer.Option(
            help="Host memory of each instance for KV that is preempted while it serves alone, such as 1GiB.",
            show_default="none: it is computed again",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="When instances merge: remap, kunserve, alone or pipeline. With vllm they never do.")
    ] = "remap",
    ahead: Annotated[
        bool, typer.Option("--ahead", help="remap and kunserve merge by a forecast of the demand, before KV runs out.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="What computes: remap, the reference engine; or vllm, on remap.")
    ] = "remap",
    engine_args: Annotated[
        str | None, typer.Option(help="More arguments of vLLM's, as JSON, such as '{\"max_model_len\": 4096}'.")
    ] = None,
    host: serving.ListenHost = "127.0.0.1",
    port: serving.ListenPort = 8000,
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute, of each instance.")] = 1,
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster, such as auto.", show_default="one on this machine")
    ] = None,
    shared: Annotated[
        str | None,
        typer.Option(
            help="Name of a cluster that several servers share, with the same options; needs --address.",
            show_default="the cluster ends with this server",
        ),
    ] = None,
    max_num_seqs: MaxNumSeqs = 32,
    max_batch_tokens: MaxBatchTokens = 512,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Bytes a second between two instances, such as 1GB, until it is measured.",
            show_default="2GB, until pieces show more",
        ),
    ] = None,
    latency_ms: Annotated[
        float | None, typer.Option(min=0.0, help="From instance to instance; never measured.", show_default="0.5")
    ] = None,
    max_body: serving.MaxBody = "4MiB",
    max_requests: serving.MaxRequests = 512,
    deadline: serving.DeadlineSeconds = 3600.0,
    grace: serving.GraceSeconds = 20.0,
    allow_host: serving.AllowHost = None,
    access_log: serving.AccessLines = False,
    log_level: serving.LogLevel = "info",
) -> None:
    """Serve a model with several instances. Interrupt it to end it."""
    console = Console(soft_wrap=True)
    with exit_on_error(), log_lines(log_level, "remap_serve.cluster"):
        if address is None:
            _keep_ray_to_itself()
        serving.require_packages("remap cluster serve", "cluster", "ray")
        from remap_serve.cluster.control import GroupPolicy
        from remap_serve.policy.cluster.foresight import Outlook

        if shared is not None and address is None:
            raise InvalidArgument(
                "shared: servers share a cluster in a Ray that outlives each of them; nothing was started; start Ray, and give "
                "--address",
                field="shared",
                value=shared,
            )
        outlook = Outlook() if ahead else None
        chosen = GroupPolicy(policy, instances, outlook=outlook)  # type: ignore[arg-type]  # it refuses other names
        budget = None if memory is None else memory_bytes(memory)
        room = 0 if host_kv is None else parse_size(host_kv, "host_kv")
        limits = serving.limits_of(max_body, max_requests, deadline)
        network = _network(bandwidth, latency_ms)
        common = {
            "memory": budget,
            "threads": threads,
            "max_num_seqs": max_num_seqs,
            "max_batch_tokens": max_batch_tokens,
        }
        if engine == "vllm":
            needed("vllm", "vllm", "`remap cluster serve --engine vllm`")
            chosen = _alone(chosen, host_kv)
            factory, served, more = _vllm(model, engine_args)
        else:
            _require_reference(engine, engine_args)
            if instances > 1 and (bandwidth is None or latency_ms is None):
                text = (
                    f"taken, not measured: between instances {network.bytes_per_s / 1e9:g} GB/s, until they have sent something, "
                    f"and {1e3 * network.hop_s.base_s:g} ms; --bandwidth and --latency-ms say otherwise"
                )
                Console(stderr=True, soft_wrap=True).print(text, style="yellow", markup=False, highlight=False)
            factory, served, more = _reference(model, budget, room)
            more |= {"host": "127.0.0.1" if address is None else None, "network": network}
        # Before instances are started, which takes longer than to say that the port is taken.
        with http_at(host, port, limits, allow_host, access_log, grace) as http:
            names = [f"i{number}" for number in range(instances)]
            resources = {"CPU": float(threads)}
            try:
                if shared is not None and address is not None:
                    from remap_serve.cluster.ray_keeper import ClusterPlan

                    plan = ClusterPlan(factory, tuple(names), common | more, resources, chosen, network, TIMEOUT_S)
                    asyncio.run(_serve_shared(shared, plan, address, served, console, http))
                else:
                    from remap_serve.cluster.ray_cluster import RayInstances

                    started = RayInstances(factory, names, common | more, resources, address=address)
                    try:
                        asyncio.run(_serve(started, chosen, network, served, console, http))
                    finally:
                        started.close()
            except KeyboardInterrupt:
                text = "interrupted while instances were being started, or ended; nothing is served"
                Console(stderr=True, soft_wrap=True).print(text, style="yellow", markup=False, highlight=False)
                raise typer.Exit(FAILED) from None
    console.print("ended", highlight=False)


def _keep_ray_to_itself() -> None:
    """Only this server reaches the Ray that it starts: that listens at the loopback address, and has a token that is in no file.

    By itself it listens at all addresses, on Linux (the first name is Ray's, for systems where it does not), and writes the token
    into ~/.ray, readable for all users. It reads these when it is imported. The operator's settings stay.
    """
    for name, value in (
        ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"),
        ("RAY_AUTH_MODE", "token"),
        ("RAY_AUTH_TOKEN", secrets.token_hex(32)),
    ):
        os.environ.setdefault(name, value)


def _network(bandwidth: str | None, latency_ms: float | None) -> Network:
    """As the operator says; the rest as the transport's default. Raises InvalidArgument for a size that is none, or 0."""
    from remap_serve.cluster.transport import ASSUMED
    from remap_serve.policy.activations import Line
    from remap_serve.policy.cluster.pipeline import Network

    hop_s = ASSUMED.hop_s if latency_ms is None else Line(latency_ms / 1e3, 0.0)
    bytes_per_s = ASSUMED.bytes_per_s if bandwidth is None else float(parse_size(bandwidth, "bandwidth"))
    if not bytes_per_s:
        raise invalid("bandwidth", bandwidth, "bytes a second, above 0")
    return Network(hop_s, bytes_per_s)


def _reference(name: str, memory: int | None, swap: int) -> tuple[str, Served, dict[str, Any]]:
    """The factory of instances that compute with the reference engine, what the server says of their model, and what the factory
    takes of it. Raises InvalidArgument if it cannot be served."""
    from remap_serve.cluster.prompts import Served
    from remap_serve.cluster.served_model import ends_of, layout_of, shapes, tokenizer_of

    folder = model_folder(name)
    layout, tokenizer = layout_of(shapes(folder), memory, swap), tokenizer_of(folder)
    shown = name.rstrip("/").rpartition("/")[2]
    served = Served(shown, tokenizer, layout.positions, ends_of(folder, tokenizer))
    return "remap_serve.cluster.served_model:make", served, {"model": folder, "swap": swap}


def _vllm(name: str, engine_args: str | None) -> tuple[str, Served, dict[str, Any]]:
    """As `_reference`, for instances that are vLLM engines."""
    from remap_serve.cluster.vllm_served import engine_args_of, vllm_model

    folder = model_folder(name)
    served, arguments = vllm_model(name, folder, engine_args_of(engine_args))
    return "remap_serve.cluster.vllm_engine:make", served, {"model": folder} | arguments


def _alone(policy: GroupPolicy, host_kv: str | None) -> GroupPolicy:
    """The policy of vLLM engines. Raises InvalidArgument (fields field, value) for what they do not have."""
    if policy.name not in ("remap", "alone"):
        raise InvalidArgument(
            f"policy: vLLM engines do not merge, so that {policy.name} does nothing; nothing was started; leave it out",
            field="policy",
            value=policy.name,
        )
    if policy.outlook is not None:
        raise InvalidArgument(
            "ahead: vLLM engines do not merge, so that no forecast is of use; nothing was started; leave it out",
            field="ahead",
            value=True,
        )
    if host_kv is not None:
        raise InvalidArgument(
            "host_kv: vLLM has its own way to keep KV in host memory; nothing was started; give --engine-args "
            "'{\"kv_offloading_size\": 4}' (GiB)",
            field="host_kv",
            value=host_kv,
        )
    return replace(policy, name="alone")


def _require_reference(engine: str, engine_args: str | None) -> None:
    if engine != "remap":
        raise InvalidArgument(
            f"engine: must be remap or vllm, got {engine!r}; nothing was started", field="engine", value=engine
        )
    if engine_args is not None:
        raise InvalidArgument(
            "engine-args: are vLLM's; nothing was started; leave them out, or give --engine vllm",
            field="engine-args",
            value=engine_args,
        )


async def _serve(
    instances: RayInstances,
    policy: GroupPolicy,
    network: Network,
    served: Served,
    console: Console,
    http: Http,
) -> None:
    from remap_serve.cluster.app import make_app
    from remap_serve.cluster.control import Control
    from remap_serve.cluster.front import Front
    from remap_serve.engine.request import Request

    described = await instances.reached(instances.connections[0].call("describe"))
    control = Control(described.model, network, policy, TIMEOUT_S)
    front = Front[Request](control, instances.connections, lambda request: len(request.prompt))
    try:
        await instances.reached(front.start())
        for name, error in front.rejected.items():
            console.print(f"{name} does not serve: {error}", style="yellow", markup=False, highlight=False)
        count = sum(len(view.stages) for view in front.groups)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, front.renew_soon)
        ready = f"{count} instances of {served.name} answer at {http.url}/v1; remap top --url {http.url}"
        await http.serve(
            front,
            make_app(front, served, *http.app),
            lambda: console.print(ready, markup=False, highlight=False),
            instances.head_lost,
        )
    finally:
        await front.close()


async def _serve_shared(
    name: str,
    plan: ClusterPlan,
    address: str,
    served: Served,
    console: Console,
    http: Http,
) -> None:
    from remap_serve.cluster.app import make_shared_app
    from remap_serve.cluster.ray_cluster import head_lost, join_ray, leave_ray, unless_lost
    from remap_serve.cluster.ray_keeper import join_cluster
    from remap_serve.cluster.shared_front import SharedFront

    try:
        join_ray(address)
        front = SharedFront(await join_cluster(name, plan), plan.options)
        try:
            await unless_lost(front.start(), head_lost())
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, front.renew_soon)
            where = f"{http.url}/v1; remap top --url {http.url}"
            ready = f"{len(plan.names)} instances of {served.name}, shared as {name}, answer at {where}"
            await http.serve(
                front,
                make_shared_app(front, served, *http.app),
                lambda: console.print(ready, markup=False, highlight=False),
                head_lost,
            )
        finally:
            await front.close()
    finally:
        leave_ray()
