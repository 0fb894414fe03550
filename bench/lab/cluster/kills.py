"""Kill instances of a cluster at random while it serves, and look whether a request is lost, answered twice, or otherwise.

python -m bench.lab.cluster.kills [KILLS] [RESULT]      200 kills of three instances of a tiny model, and a line of JSON
python -m bench.lab.cluster.kills [KILLS] [RESULT] shared      of servers, keepers and instances of a shared cluster: `shared`

Bursts of requests and silences alternate, so that groups merge and part all the time; each answer is compared with that of one
engine with room for everybody. What is computed again, in another batch, may round otherwise: an answer whose first other token
is as good (`as_good`) counts by itself. Who was there at three kills, at the last on trial, is given up, as the server does
(`remap_serve.cluster.service`); that is counted, too. Each kill waits for an instance in the phase of a change in which the
fewest were killed so far (`PHASES`), as long as such a phase comes within `PATIENCE_S`; else it hits whoever is there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from remap_serve.cli.shared_world import build
from remap_serve.cluster.control import Control, GroupPolicy
from remap_serve.cluster.front import Front, Lost
from remap_serve.cluster.ray_cluster import RayInstances
from remap_serve.cluster.service import Fatal
from remap_serve.cluster.transport import ASSUMED
from remap_serve.engine.request import Request

from .cases import QUICK, Case
from .instances import as_good, engine_answers

__all__ = ["run"]

"""Two tokens whose logits, in float32, are no further apart are as good."""

INSTANCES = 3
AT_ONCE = 24
MEAN_GAP_S = 2.0
"""Between two kills. An instance takes some seconds to come back."""
LOAD_S = 5.0
"""A burst lasts, on average."""
SILENCE_S = 15.0
"""A silence, at most: until every instance serves alone."""
PHASES = ("serving, alone", "serving, in a group", "preparing", "switching", "exchanging", "fetching")
PATIENCE_S = 20.0
COUNTED = (
    "answered",
    "answered otherwise",
    "answered otherwise, as good",
    "given up",
    "ended twice",
    "tokens out of place",
)
WITHIN_S = 0.03
"""A kill comes so long after its phase has begun, at most."""


async def _client(
    front: Front[Request],
    pool: list[Request],
    wanted: dict[str, Any],
    model: Any,
    found: Counter[str],
    load: asyncio.Event,
    stop: asyncio.Event,
    number: int,
) -> None:
    """Ask for one request after another, during a load; compare each answer."""
    turn = 0
    while await load.wait() and not stop.is_set():
        one = pool[(number + turn * AT_ONCE) % len(pool)]
        turn += 1
        tokens: list[int] = []
        ends = 0
        try:
            async for delivery in front.generate(f"{number}-{turn}", replace(one, id=f"{number}-{turn}")):
                if delivery.first != len(tokens):
                    found["tokens out of place"] += 1
                tokens += delivery.tokens
                if delivery.finish_reason is not None:
                    ends += 1
                    found[f"ended by {delivery.finish_reason}"] += 1
        except Fatal:
            found["given up"] += 1
            continue
        found["answered"] += 1
        if tuple(tokens) != wanted[one.id]:
            as_right = as_good(model, one, wanted[one.id], tokens)
            found["answered otherwise, as good" if as_right else "answered otherwise"] += 1
        found["ended twice"] += ends != 1


async def _loads(front: Front[Request], load: asyncio.Event, rng: random.Random) -> None:
    """Bursts, and silences in which layers come home."""
    while True:
        load.set()
        await asyncio.sleep(rng.expovariate(1.0 / LOAD_S))
        load.clear()
        end = time.monotonic() + SILENCE_S
        while time.monotonic() < end and (front.unfinished or any(len(view.stages) > 1 for view in front.groups)):
            await asyncio.sleep(0.05)


def _alive(front: Front[Request], pids: dict[str, int]) -> list[tuple[str, str]]:
    """(instance, phase), of all that serve."""
    found = []
    for view in front.groups:
        serving = "serving, alone" if len(view.stages) == 1 else "serving, in a group"
        phase = serving if view.phase == "serving" else view.phase
        found += [(part.instance, phase) for part in view.stages if part.instance in pids and phase in PHASES]
    return found


async def _kill(
    front: Front[Request], pids: dict[str, int], kills: int, phases: Counter[str], rng: random.Random
) -> None:
    while phases.total() < kills:
        await asyncio.sleep(rng.expovariate(1.0 / MEAN_GAP_S))
        rarest = min(PHASES, key=phases.__getitem__)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and rarest not in [phase for _, phase in _alive(front, pids)]:
            await asyncio.sleep(0.001)
        await asyncio.sleep(rng.uniform(0.0, WITHIN_S))
        alive = _alive(front, pids)
        victims = [each for each in alive if each[1] == rarest] or alive
        if not victims:
            continue
        name, phase = rng.choice(victims)
        try:
            os.kill(pids.pop(name), signal.SIGKILL)
        except ProcessLookupError:
            continue  # it was evicted a moment ago
        phases[phase] += 1


async def _pids(front: Front[Request], instances: RayInstances, pids: dict[str, int]) -> None:
    """Keep up with who runs where: a process that was killed comes back as another."""
    while True:
        known = front.service.control.descriptions
        for name, description in known.items():
            if pids.get(name) != description.pid and not _gone(description.pid):
                pids[name] = description.pid
        await asyncio.sleep(0.1)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class _Heard(logging.Handler):
    """What the front has to say but that somebody is gone: an instance that failed by itself, or had to be evicted."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        if not (isinstance(record.args, tuple) and any(isinstance(each, Lost) for each in record.args)):
            self.messages.append(record.getMessage())


async def _run(case: Case, instances: RayInstances, kills: int, seed: int) -> dict[str, Any]:
    pool = case.requests()
    wanted = engine_answers(case, pool)
    model, _ = build(case.model, case.dtype, case.seed)
    described = await instances.connections[0].call("describe")
    control = Control(described.model, ASSUMED, GroupPolicy("remap"), timeout_s=60.0)
    heard = _Heard()
    logging.getLogger("remap").addHandler(heard)
    front = Front[Request](control, instances.connections, lambda request: len(request.prompt))
    await front.start()
    found, phases, pids = Counter[str](), Counter[str](), dict[str, int]()
    load, stop = asyncio.Event(), asyncio.Event()
    begin = time.monotonic()
    watch = asyncio.create_task(_pids(front, instances, pids))
    clients = [
        asyncio.create_task(_client(front, pool, wanted, model, found, load, stop, number)) for number in range(AT_ONCE)
    ]
    loads = asyncio.create_task(_loads(front, load, random.Random(f"loads {seed}")))
    await _kill(front, pids, kills, phases, random.Random(f"kills {seed}"))
    loads.cancel()
    stop.set()
    load.set()
    await asyncio.gather(*clients)
    watch.cancel()
    epoch, restarts, unfinished = control.epoch, front.restarts, front.unfinished
    await front.close()
    return {
        "kills": kills,
        "seconds": round(time.monotonic() - begin, 1),
        "phases": dict(phases),
        "epochs": epoch,
        "restarts": restarts,
        "unfinished": unfinished,
        "heard": heard.messages,
        **{key: found[key] for key in COUNTED},
        **{key: found[key] for key in sorted(found) if key.startswith("ended by")},
    }


def run(kills: int, seed: int = 0) -> dict[str, Any]:
    """Counts of one run. Raises what serving raises."""
    (case,) = QUICK.cases
    instances = RayInstances(
        "bench.lab.cluster.instances:make",
        [f"i{number}" for number in range(INSTANCES)],
        {"suite": "quick", "case": case.name, "policy": "remap"},
        {"CPU": 1},
    )
    try:
        return asyncio.run(_run(case, instances, kills, seed))
    finally:
        instances.close()


def main(arguments: list[str]) -> None:
    """[KILLS] [RESULT(path)] [shared]."""
    from .shared import run_shared

    kills = run_shared if "shared" in arguments else run
    arguments = [each for each in arguments if each != "shared"]
    found = json.dumps(kills(int(arguments[0]) if arguments else 200))
    if len(arguments) > 1:
        Path(arguments[1]).write_text(found + "\n", encoding="utf-8")
    else:
        sys.stdout.write(found + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
