"""Instances as Ray actors, each a process: requests answered while one is killed, and without Ray's head."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest
from control_worlds import MODEL, NETWORK
from test_cluster_front import answer, expected, until

pytest.importorskip("ray")

from test_cluster_ends import TELLS

from remap.errors import InvalidArgument
from remap_serve.cluster.control import Control, GroupPolicy
from remap_serve.cluster.front import Front, InstanceFailed
from remap_serve.cluster.ray_cluster import RayInstances
from remap_serve.engine.request import Request

pytestmark = pytest.mark.slow


@pytest.fixture
def instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Two of them, on a Ray of their own; the actors import the double from this folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    made = RayInstances("cluster_double:TinyInstance", ["a", "b"], {"folder": str(tmp_path)}, {"CPU": 1})
    yield made
    made.close()


def front_of(instances: RayInstances, policy: str = "remap") -> Front[Request]:
    control = Control(MODEL, NETWORK, GroupPolicy(policy, 2), timeout_s=10.0)
    return Front[Request](control, instances.connections, lambda request: len(request.prompt))


def head_of_ray() -> int:
    """The process id of this process' own GCS."""
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "gcs_server"], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[0])


def test_actors_serve_and_come_back_when_they_are_killed_and_serve_on_without_rays_head(
    instances: RayInstances,
) -> None:
    async def run() -> None:
        front = front_of(instances)
        await front.start()
        pids = {each.name: (await each.call("describe")).pid for each in instances.connections}
        assert len({os.getpid(), *pids.values()}) == 3

        # A burst that merges the two; then one of the group's processes is killed. The burst may be over by then, so more come,
        # and the first of these has begun its answer.
        ids = [f"r{number}" for number in range(16)]
        tasks = [asyncio.create_task(answer(front, id, 8, 30)) for id in ids]
        await until(lambda: [(len(v.stages), v.phase) for v in front.groups] == [(2, "serving")])
        more = [f"more{number}" for number in range(8)]
        late = [asyncio.create_task(answer(front, id, 8, 60)) for id in more]
        await until(lambda: more[0] in front.service.ledger and len(front.service.ledger.tokens(more[0])) > 0)
        os.kill(pids["b"], signal.SIGKILL)
        assert await asyncio.gather(*tasks) == [expected(id, 30) for id in ids]
        assert await asyncio.gather(*late) == [expected(id, 60) for id in more]
        assert front.restarts > 0
        death = front.service.deaths[0]
        assert (death.instance, death.outside) == ("b", False) and death.node
        assert f"process {pids['b']} on {death.node}" in death.why and f"-{pids['b']}.err" in death.why
        if TELLS:
            assert "SIGKILL" in death.why
        if "RAY_worker_niceness" not in os.environ:
            assert os.getpriority(os.PRIO_PROCESS, pids["a"]) == os.nice(0)  # as nice as this process
        await until(lambda: {part.instance for view in front.groups for part in view.stages} == {"a", "b"})
        assert (await instances.connections[1].call("describe")).pid != pids["b"]

        # Errors of this library pass through; others name the instance.
        with pytest.raises(InvalidArgument):
            await answer(front, "long", 100, 100)
        with pytest.raises(InstanceFailed) as caught:
            await instances.connections[0].call("poll", "soon")
        assert (caught.value.instance, caught.value.cause) == ("a", "TypeError")

        # Ray's head is killed: what is in flight and what is new is answered.
        task = asyncio.create_task(answer(front, "before", 4, 30))
        await until(lambda: "before" in front.service.ledger and len(front.service.ledger.tokens("before")) > 0)
        os.kill(head_of_ray(), signal.SIGKILL)
        assert await task == expected("before", 30)
        assert await answer(front, "after", 4, 30) == expected("after", 30)
        assert front.failure is None
        await front.close()

    asyncio.run(asyncio.wait_for(run(), 180.0))


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_instances_need_names_of_their_own(names: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        RayInstances("cluster_double:TinyInstance", names, {}, {"CPU": 1})
