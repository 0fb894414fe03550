# SPDX-License-Identifier: Apache-2.0
"""The keeper of a cluster as a Ray actor, which every server of the cluster finds by the cluster's name.

The first server makes it, and it makes the instances. All of them outlive the servers' processes, and instances outlive the
keeper's, which Ray starts again. It ends with the instances when its last server has left, or none has been there for a minute.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from remap.errors import Error
from remap_serve.engine.request import Request

from .control import Control
from .front import REJOIN_S, Front, InstanceFailed, Lost
from .keeper import Keeper
from .ray_cluster import NAMESPACE, RayConnection, RayInstances, head_lost, in_thread, in_time, unless_lost

if TYPE_CHECKING:
    from remap_serve.policy.cluster.pipeline import Network

    from .control import GroupPolicy

__all__ = ["ClusterPlan", "join_cluster"]

LOG = logging.getLogger(__name__)
CALLS = 4096
"""Of servers at once, most of which wait."""
TRIES = 25
"""To find a cluster that is just ending, or beginning, under the name: some seconds."""
SILENT_S = 120.0
"""A keeper that does not say for so long that it is there does not start. Its process imports torch first."""
SAID_S = 2.0
"""A cluster that cannot be made says why for so long, to servers that ask."""


@dataclass(frozen=True)
class ClusterPlan:
    """A cluster as each of its servers would make it. The first four are arguments of `RayInstances`, the others of `Control`."""

    factory: str
    names: tuple[str, ...]
    arguments: Mapping[str, Any]
    resources: Mapping[str, float]
    policy: GroupPolicy
    network: Network
    timeout_s: float

    @property
    def options(self) -> dict[str, object]:
        """All of it, by name."""
        found = {name: value for name, value in vars(self).items() if name != "arguments"}
        return found | dict(self.arguments)


class _Kept:
    """The actor. It answers as `ray_cluster._Actor` does."""

    def __init__(self, name: str, plan: ClusterPlan) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")  # Ray has files of it
        self._plan = plan
        self._refused: Error | None = None
        self._starting: asyncio.Task[Keeper] | None = None
        try:
            self._instances = RayInstances(plan.factory, plan.names, plan.arguments, plan.resources, kept=name)
        except Error as error:
            self._refused = error

    async def call(self, method: str, arguments: Sequence[Any]) -> tuple[str, Any]:
        loop = asyncio.get_running_loop()
        if self._refused is not None:
            loop.call_later(SAID_S, _end)
            return "error", self._refused
        if method == "here":
            return "ok", None
        if self._starting is None:
            self._starting = loop.create_task(self._start())
        try:
            keeper = await asyncio.shield(self._starting)
            value = getattr(keeper, method)(*arguments)
            return "ok", await value if inspect.isawaitable(value) else value
        except Error as error:
            return "error", error

    async def _start(self) -> Keeper:
        plan = self._plan
        try:
            control = Control((await self._described()).model, plan.network, plan.policy, plan.timeout_s)
            front = Front[Request](control, self._instances.connections, lambda request: len(request.prompt))
            keeper = Keeper(front, plan.options)
            await keeper.start()
        except Error as error:
            LOG.error("the cluster cannot be served: %s", error)
            asyncio.get_running_loop().call_later(SAID_S, self._close)
            raise
        self._ending = asyncio.get_running_loop().create_task(self._until_over(keeper))
        return keeper

    async def _described(self) -> Any:
        """By the first instance that is there."""
        while True:
            for connection in self._instances.connections:
                with suppress(Lost, InstanceFailed):
                    return await connection.call("describe")
            await asyncio.sleep(REJOIN_S)

    async def _until_over(self, keeper: Keeper) -> None:
        await keeper.over.wait()
        await keeper.close()
        self._close()

    def _close(self) -> None:
        self._instances.close()
        _end()


def _end() -> None:
    """End this actor for good."""
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


async def join_cluster(name: str, plan: ClusterPlan) -> RayConnection:
    """A connection to the keeper of the cluster of this name in this process's Ray. If there is none it is made, with its
    instances. These take as long as they need to load, while Ray and the keeper answer.

    Raises, with nothing left behind, OutOfMemory as `RayInstances` does, and what an instance says that cannot be made. Raises
    RayAway if Ray's head process or the keeper does not answer.
    """
    return await unless_lost(_keeper(name, plan), head_lost())


async def _keeper(name: str, plan: ClusterPlan) -> RayConnection:
    make = ray.remote(_Kept).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=CALLS,
        num_cpus=0,
    )
    left = TRIES
    while True:
        try:
            made = await asyncio.wrap_future(in_thread(lambda: make.remote(name, plan)))
            connection = RayConnection("keeper", made)
            await unless_lost(connection.call("figures"), _silent(name, connection), SILENT_S)
        except (Lost, RayError):
            left -= 1
            if not left:
                raise
            await asyncio.sleep(REJOIN_S)
        else:
            return connection


async def _silent(name: str, keeper: RayConnection) -> str:
    """Returns, with what is wrong, when the keeper has not answered for SILENT_S."""
    while True:
        try:
            await in_time(keeper.call("here"), SILENT_S)
        except asyncio.TimeoutError:
            return f"the keeper of the cluster {name!r} has not answered for {SILENT_S:.0f} s"
        except Error:
            pass  # the call that waits for it has it as well
        await asyncio.sleep(REJOIN_S)
