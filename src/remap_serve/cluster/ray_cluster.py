# SPDX-License-Identifier: Apache-2.0
"""Instances as Ray actors: where they run, that they come back, and what Ray says when they do not.

Ray places them (a placement group, spread over the nodes), starts them, starts them again (`max_restarts`), and carries
calls. Data between instances, activations and KV, goes its own way (`transport`). Calls run in threads of the actor, for
a poll waits there; Ray does not keep their order then, which the epochs of `messages` allow for.

Without Ray's own head process (GCS) calls go on, for they go from process to process; actors that die are not started again
then. Ray ends processes that have not reached it for a minute. Here they wait for a day: a cluster that serves is worth more
than one that can restart (`GCS_PATIENCE_S`). On a cluster that runs already, that is its operator's setting.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from remap.errors import Error, InvalidArgument, OutOfMemory
from remap.sizes import show_size

from . import ray_sessions
from .ends import ProcessEnd, last_words, log_here
from .front import InstanceFailed, Lost
from .messages import Description

__all__ = [
    "GCS_PATIENCE_S",
    "NAMESPACE",
    "RayAway",
    "RayConnection",
    "RayInstances",
    "head_lost",
    "in_thread",
    "in_time",
    "join_ray",
    "leave_ray",
    "unless_lost",
]

LOG = logging.getLogger(__name__)
T = TypeVar("T")
NAMESPACE = "remap"
GCS_PATIENCE_S = 86_400
LOOK_S = 2.0
"""Seconds between two looks whether Ray's head process is there."""
GONE_S = 10.0
"""A head process that this server started, and that does not answer for so long, does not come back."""
AWAY_S = 60.0
"""One of a cluster that ran already may: for so long Ray itself waits for it. So long joining such a cluster waits as well."""
LEAVE_S = 20.0
"""Ray's own end of this process's part of it takes so long at most, while its head process answers."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How HTTP/2 begins. A head process that runs answers it, or ends the connection (TLS). For one that is stopped, the kernel still
accepts connections."""
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes is 75 MiB: nothing large goes through it
PLACING_S = 60.0
ENDING_S = 0.2
"""A process whose connections are closed has ended so much later, or runs on."""
MISSED_S = 30.0
"""An instance that is being started again, and is not there after so long, is missed; then after twice as long, and so on."""
THREADS = 8
"""Commands of one instance at a time."""

APART = {"poll": 1, "submit": 4}
"""Calls that have threads of their own: however many requests wait for the end of a pass, reports come, and so do commands."""


class RayAway(Error):
    """The Ray at this address did not answer while this process joined it. Fields: address, waited_s."""


class _Actor:
    """An instance in an actor. It answers ("ok", value) or ("error", error): Ray wraps errors that a call raises. One that
    cannot be made answers everything with why."""

    def __init__(self, factory: str, name: str, arguments: Mapping[str, Any]) -> None:
        module, _, function = factory.partition(":")
        self._refused: Error | None = None
        try:
            self._instance = getattr(importlib.import_module(module), function)(name=name, **arguments)
        except Error as error:
            self._refused = error

    def call(self, method: str, arguments: Sequence[Any]) -> tuple[str, Any]:
        if self._refused is not None:
            return "error", self._refused
        try:
            value = getattr(self._instance, method)(*arguments)
        except Error as error:
            return "error", error
        if isinstance(value, Description):
            value = replace(value, node=str(ray.util.get_node_ip_address()), log=log_here())
        return "ok", value


class RayConnection:
    """A `front.Connection` to an actor. logs: Ray's folder of them, of a Ray that this process started. apart: calls that have
    threads of their own."""

    def __init__(self, name: str, actor: Any, logs: str = "", apart: Iterable[str] = ()) -> None:
        self.name = name
        self._actor = actor
        self._logs = logs
        self._process: ProcessEnd | None = None  # of the last one that described itself
        self._node = ""
        self._missed: asyncio.Task[None] | None = None
        self._apart = {method: actor.call.options(concurrency_group=method) for method in apart}

    async def call(self, method: str, *arguments: object) -> Any:
        """See `front.Connection`."""
        try:
            call = self._apart.get(method, self._actor.call)
            outcome, value = await call.remote(method, arguments)
        except RayActorError as error:
            returns = not isinstance(error, ActorDiedError)
            if not returns:
                self._back()
            elif self._missed is None:
                self._missed = asyncio.get_running_loop().create_task(self._miss())
            if method == "describe" and self._logs:
                ray_sessions.trim(Path(self._logs))
            why, known = await self._end_of(error)
            raise Lost(
                f"instance {self.name!r} is gone, and {'is being' if returns else 'cannot be'} started again; what it had "
                f"starts elsewhere: {why}",
                instance=self.name,
                returns=returns,
                why=why,
                outside=error.preempted,
                **known,
            ) from error
        except RayTaskError as error:
            raise InstanceFailed(
                f"instance {self.name!r} failed in {method!r} with {type(error.cause).__name__}: {_reason(error.cause)}; it is "
                "to be started again",
                instance=self.name,
                method=method,
                cause=type(error.cause).__name__,
            ) from error
        except RayError as error:  # an answer that was lost, a node that is full
            raise InstanceFailed(
                f"the answer of instance {self.name!r} to {method!r} did not come: {_reason(error)}; it is to be started again",
                instance=self.name,
                method=method,
                cause=type(error).__name__,
            ) from error
        self._back()
        if outcome == "error":
            raise value
        if isinstance(value, Description):
            self._note(value)
        return value

    def kill(self) -> None:
        """See `front.Connection`."""
        ray.kill(self._actor, no_restart=False)

    def remove(self) -> None:
        """End its process for good."""
        ray.kill(self._actor, no_restart=True)

    def end(self) -> None:
        """Kill the process, if it is on this machine and still runs: without its raylet no other process does."""
        self._back()
        if self._process is not None:
            self._process.kill()
            self._process.close()
            self._process = None

    def _note(self, described: Description) -> None:
        """It is there, in this process."""
        if self._process is not None:
            self._process.close()
        self._process, self._node = ProcessEnd(described.pid, described.log), described.node

    def _back(self) -> None:
        """It answers, or never will again: it is not missed."""
        if self._missed is not None:
            self._missed.cancel()
        self._missed = None

    async def _end_of(self, error: RayActorError) -> tuple[str, dict[str, object]]:
        """Why its process ended, for people and as fields: what the kernel tells, or else what Ray says, and its log."""
        process = self._process
        if process is None:
            return f"it had not begun to serve; {_reason(error)}", {}
        looks = 10
        while process.here and not process.over() and looks:
            looks -= 1
            await asyncio.sleep(ENDING_S / 10)
        killer, code = process.status()
        if killer is not None:
            how = f"was ended by {killer}"
        elif code is not None:
            how = f"ended with exit code {code}"
        elif process.here and not process.over():
            how = f"is out of Ray's reach, and runs; {_reason(error)}"
        else:
            how = f"has ended; {_reason(error)}"
        said = last_words(process.log) if process.here else ""
        quoted = f", which ends with: {said}" if said else ""
        known = {"pid": process.pid, "node": self._node, "log": process.log, "signal": killer, "exit_code": code}
        return f"process {process.pid} on {self._node} {how}; its log there is {process.log}{quoted}", known

    async def _miss(self) -> None:
        """Say, now and then, that it does not come back: Ray tries again for ever, and says nothing."""
        away_s = MISSED_S
        await asyncio.sleep(away_s)
        while True:
            logs = self._logs or (str(Path(self._process.log).parent) if self._process is not None else "")
            where = f"; its logs, and Ray's, are in {logs}" if logs else ""
            with suppress(OSError):  # it is a folder of another machine
                disk = shutil.disk_usage(logs)
                full = ": nothing starts that cannot write there, so make room" if disk.free < disk.total // 100 else ""
                where += f", with {show_size(disk.free)} of the disk free{full}"
            LOG.warning(
                "instance %s has not come back for %.0f s, and Ray starts it again and again%s",
                self.name,
                away_s,
                where,
            )
            await asyncio.sleep(away_s)
            away_s *= 2


def _reason(error: BaseException | None) -> str:
    """The last line of what Ray says, where the reason is; the text before it is of the actor, or a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class RayInstances:
    """Actors, one for each name, with these resources each; they end with `close`.

    factory: "module:function" that makes an instance in its actor, called with `name` and these arguments. resources: such as
    {"CPU": 1} or {"GPU": 1}. address: of a Ray cluster; None starts one on this machine, without a dashboard. Where that listens
    is said by the environment that Ray was imported with (docs/cluster.md, "Who can reach it").

    kept: a name, for a process that is in Ray already, and may be started again: actors outlive it, and are found again by this.

    Raises InvalidArgument for a name that occurs twice, and OutOfMemory (field resources) if Ray has no room for all of them
    within a minute; then nothing is left behind.
    """

    def __init__(
        self,
        factory: str,
        names: Sequence[str],
        arguments: Mapping[str, Any],
        resources: Mapping[str, float],
        address: str | None = None,
        kept: str | None = None,
    ) -> None:
        if len(set(names)) < len(names) or not names:
            raise InvalidArgument(
                f"instances need names, each its own, got {list(names)}; nothing was started", names=names
            )
        logs = ""
        if kept is not None:
            pass
        elif address is None:
            started: Any = ray.init(
                "local",  # else it joins whatever cluster it finds on this machine
                num_cpus=max(1, round(sum(resources.get("CPU", 0) for _ in names))),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                _system_config={"gcs_rpc_server_reconnect_timeout_s": GCS_PATIENCE_S, **_niceness()},
            )
            session = Path(str(started.address_info["session_dir"]))
            logs = str(session / "logs")
            self._mark = ray_sessions.mark(session)
            removed = ray_sessions.remove_old(session.parent)
            LOG.info("Ray's logs of this server are in %s; %d folders of former ones are removed", logs, len(removed))
        else:
            join_ray(address)
        self.connections: list[RayConnection] = []
        self._shared, self._headless, self._kept = address is not None, False, kept
        self._patience_s = GONE_S if address is None else AWAY_S
        try:
            self._group = _answer(lambda: _placed([dict(resources) for _ in names], kept), address, AWAY_S)
            placed = _answer(lambda: self._group.wait(PLACING_S), address, PLACING_S + AWAY_S)
        except RayAway:
            if kept is None:
                leave_ray()
            raise
        if not placed:
            self.close()
            raise OutOfMemory(
                f"{len(names)} instances need {dict(resources)} each, and Ray did not find that within {PLACING_S:.0f} s; "
                "nothing was left behind; start fewer, or add nodes",
                resources=dict(resources),
            )
        make = ray.remote(concurrency_groups=APART)(_Actor).options  # type: ignore[call-overload]  # it is documented
        gpus, cpus = resources.get("GPU", 0), resources.get("CPU", 0)
        more = {key: value for key, value in resources.items() if key not in ("CPU", "GPU")}
        self.connections = [
            RayConnection(
                name,
                make(
                    num_cpus=cpus,
                    num_gpus=gpus,
                    resources=more,
                    max_restarts=-1,
                    max_concurrency=THREADS,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
                    **_outliving(kept, name),
                ).remote(factory, name, dict(arguments)),
                logs,
                APART,
            )
            for bundle, name in enumerate(names)
        ]

    async def head_lost(self) -> str:
        """`head_lost`, as long as this Ray's head process is waited for."""
        found = await head_lost(self._patience_s)
        self._headless = True
        return found

    async def reached(self, work: Coroutine[Any, Any, T]) -> T:
        """`unless_lost`, of this Ray."""
        return await unless_lost(work, self.head_lost(), self._patience_s)

    def close(self) -> None:
        """End the actors and this process's part of Ray."""
        if self._kept is not None:
            for connection in self.connections:
                connection.remove()
            remove_placement_group(self._group)
            return
        # Ray's head process answers this; without it the call waits until its patience ends, which here is a day. `leave_ray`
        # ends what this process started, with or without it.
        if self._shared and not self._headless:
            with suppress(RayError):
                remove_placement_group(self._group)
        leave_ray()
        for connection in self.connections:
            connection.end()


def in_thread(call: Callable[[], T]) -> Future[T]:
    """The outcome of a call of Ray. One that does not return holds up neither the caller nor the end of this process."""
    found = Future[T]()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # noqa: BLE001  # raised where the outcome is asked for
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


def _answer(call: Callable[[], T], address: str | None, within_s: float) -> T:
    """The outcome of a call that Ray's head process has to answer. Raises RayAway."""
    found = in_thread(call)
    if not wait([found], within_s).done:
        where = "this machine" if address is None else address
        raise _away(f"Ray at {where} has not answered for {within_s:.0f} s", address, within_s)
    return found.result()


def _away(what: str, address: str | None, waited_s: float) -> RayAway:
    return RayAway(
        f"{what}; nothing is served; see whether its head process (gcs_server) runs and can be reached from here, and start this "
        "again, or give another address",
        address=address,
        waited_s=waited_s,
    )


def join_ray(address: str) -> None:
    """This process joins the Ray at this address, until `leave_ray`. Raises RayAway if that does not answer within AWAY_S; the
    process's end, when it comes, is sudden then, with code 1: a thread of it is inside of Ray, and crashes where the interpreter
    ends around it."""
    # Ray warns that, in a thread, it cannot end this process at SIGTERM. The server does that itself.
    logging.getLogger("ray._private.worker").addFilter(lambda record: "SIGTERM" not in record.getMessage())
    try:
        _answer(
            lambda: ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False),
            address,
            AWAY_S,
        )
    except RayAway:
        atexit.register(_end)
        raise


def leave_ray() -> None:
    """End this process's part of Ray, and what this process started of it.

    While Ray's head process does not answer, Ray's own end of this does not end. A head process that this process started is
    killed then. If it is another's, this process's own end, when it comes, is sudden, with code 1: Ray has the same called there
    once more, and its threads crash without it.
    """
    ended = in_thread(ray.shutdown)
    if not wait([ended], LEAVE_S).done:
        _kill_head()
        if not wait([ended], LEAVE_S).done:
            atexit.register(_end)
            return
    ended.result()


def _kill_head() -> None:
    for listed in Path("/proc/self/task").glob("*/children"):
        for child in listed.read_text().split():
            with suppress(OSError):  # it has ended meanwhile
                if Path(f"/proc/{child}/comm").read_text() == "gcs_server\n":
                    os.kill(int(child), signal.SIGKILL)


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


async def in_time(work: Coroutine[Any, Any, T], within_s: float) -> T:
    """As `asyncio.wait_for`, which before Python 3.12 may take a cancellation for the end of the work, and goes on."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=within_s)
        if task.done():
            return task.result()
    finally:
        task.cancel()
    raise asyncio.TimeoutError


async def unless_lost(work: Coroutine[Any, Any, T], lost: Coroutine[Any, Any, str], patience_s: float = AWAY_S) -> T:
    """What this work comes to. Raises RayAway, and ends the work, when that is lost first which the work waits for."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(lost)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        address = str(ray.get_runtime_context().gcs_address)
        raise _away(tasks[1].result(), address, patience_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def head_lost(patience_s: float = AWAY_S) -> str:
    """Waits until the head process (GCS) of this process's Ray has not been there for patience_s, and returns what is wrong: no
    actor that dies is started again then."""
    address = str(ray.get_runtime_context().gcs_address)
    host, _, port = address.rpartition(":")
    clock = asyncio.get_running_loop().time
    seen_s = looked_s = clock()
    while clock() - seen_s < patience_s:
        await asyncio.sleep(LOOK_S)
        if clock() - looked_s > 2 * LOOK_S + patience_s:
            seen_s = clock()  # this process did not run
        looked_s = clock()
        with suppress(OSError, asyncio.TimeoutError):
            await in_time(_answers(host.strip("[]"), int(port)), LOOK_S)
            seen_s = clock()
    return f"Ray's head process (GCS, {address}) has not answered for {patience_s:.0f} s"


async def _answers(host: str, port: int) -> None:
    """Returns when the server there says something."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(PREFACE)
        await reader.read(1)
    finally:
        writer.close()


def _niceness() -> dict[str, int]:
    """Workers as nice as this server. Ray makes them 15 nicer, so that beside any other program they hardly run, and as slowly as
    that are missed. What Ray's environment says holds."""
    return {} if "RAY_worker_niceness" in os.environ else {"worker_niceness": 0}


def _outliving(kept: str | None, name: str) -> dict[str, Any]:
    """An actor's options by which it outlives the process that made it, and is found again."""
    return {} if kept is None else {"name": f"{kept}/{name}", "lifetime": "detached", "get_if_exists": True}


def _placed(bundles: list[dict[str, float]], kept: str | None) -> Any:
    if kept is None:
        return placement_group(bundles, strategy="SPREAD")
    with suppress(ValueError):  # there is none of this name
        return get_placement_group(kept)
    return placement_group(bundles, strategy="SPREAD", name=kept, lifetime="detached")
