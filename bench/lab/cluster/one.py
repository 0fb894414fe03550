"""One run of `bench.lab cluster`: one policy serves one case.

python -m bench.lab.cluster.one SUITE CASE POLICY RESULT(path)
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from remap_serve.cli.machine import machine_now
from remap_serve.cluster.control import Control
from remap_serve.cluster.front import Front
from remap_serve.cluster.messages import Command, Event
from remap_serve.cluster.ray_cluster import RayInstances
from remap_serve.cluster.transport import ASSUMED
from remap_serve.engine.request import Request
from remap_serve.sim.results import weighted_percentile

from .cases import POLICIES, Case, find

__all__ = ["serve"]

QUIET_S = 15.0
"""After the last answer the run goes on for so long, or until no group is left: what restoring takes is to be seen."""


class Watched(Control):
    """Control that notes when each change entered which phase. times: epoch -> phase -> second; "over" at its end."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.times: dict[int, dict[str, float]] = {}
        self.stages = 1
        self._open: set[int] = set()

    def on(self, event: Event, now_s: float) -> list[Command]:
        """As `Control.on`."""
        commands = super().on(event, now_s)
        now = {view.changing: view.phase for view in self.groups if view.changing is not None}
        for epoch, phase in now.items():
            self.times.setdefault(epoch, {}).setdefault(phase, now_s)
        for epoch in self._open - now.keys():
            self.times[epoch]["over"] = now_s
        self._open = set(now)
        self.stages = max(self.stages, *(len(view.stages) for view in self.groups), 1)
        return commands

    def lasted(self, first: str, then: str, dissolving: bool) -> list[float]:
        """Seconds from one phase to another, of all changes that were in both."""
        return [
            each[then] - each[first]
            for each in self.times.values()
            if first in each and then in each and ("fetching" in each) is dissolving and "switching" in each
        ]


@dataclass
class _Answer:
    """When the tokens of a request came. asked_s: when it was to be asked."""

    asked_s: float
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


async def _ask(front: Front[Request], request: Request, begin_s: float) -> _Answer:
    answer = _Answer(begin_s + request.arrival_s)
    await asyncio.sleep(max(0.0, answer.asked_s - time.monotonic()))
    async for delivery in front.generate(request.id, request):
        now = time.monotonic()
        answer.tokens += delivery.tokens
        answer.times_s += [now] * len(delivery.tokens)
    return answer


async def _serve(case: Case, policy_name: str, instances: RayInstances) -> dict[str, Any]:
    policy = POLICIES[policy_name]
    described = await instances.connections[0].call("describe")
    own = replace(policy.control, stages=len(instances.connections))  # of "pipeline" alone
    control = Watched(described.model, ASSUMED, own, timeout_s=60.0)
    front = Front[Request](control, instances.connections, lambda request: len(request.prompt))
    await front.start()
    if policy.control.name == "pipeline":
        while any(view.phase != "serving" for view in control.groups) or len(control.groups) > 1:
            await asyncio.sleep(0.05)
    requests = case.requests()
    begin = time.monotonic()
    answers = await asyncio.gather(*(_ask(front, request, begin) for request in requests))
    end = time.monotonic()
    while time.monotonic() < end + QUIET_S and policy.control.name != "pipeline":
        if len(control.groups) == len(instances.connections) and all(one.phase == "serving" for one in control.groups):
            break
        await asyncio.sleep(0.05)
    counts = [await connection.call("counts") for connection in instances.connections]
    restarts = front.restarts
    await front.close()
    tokens = {request.id: " ".join(map(str, answer.tokens)) for request, answer in zip(requests, answers)}
    return _figures(case, requests, answers, control, counts, begin) | {"restarts": restarts, "tokens": tokens}


def _figures(
    case: Case, requests: list[Request], answers: list[_Answer], control: Watched, counts: list[Any], begin: float
) -> dict[str, Any]:
    ttft = sorted(answer.times_s[0] - answer.asked_s for answer in answers)
    tpot = sorted(
        (answer.times_s[-1] - answer.times_s[0]) / max(1, len(answer.times_s) - 1)
        for answer in answers
        if len(answer.times_s) > 1
    )
    between = sorted(then - first for answer in answers for first, then in zip(answer.times_s, answer.times_s[1:]))
    tokens = sum(len(answer.tokens) for answer in answers)
    seconds = max(answer.times_s[-1] for answer in answers) - begin
    late = sum(
        answer.times_s[0] - answer.asked_s > case.ttft_s
        or answer.times_s[-1] - answer.times_s[0] > case.tpot_s * (len(answer.times_s) - 1)
        for answer in answers
    )

    def at(values: list[float], share: float) -> float:
        return weighted_percentile([(value, 1) for value in values], share) if values else math.nan

    def middle(values: list[float]) -> float:
        return statistics.median(values) if values else math.nan

    figures: dict[str, Any] = {
        "requests": len(requests),
        "ttft_p50_s": at(ttft, 0.5),
        "ttft_p99_s": at(ttft, 0.99),
        "tpot_p50_s": at(tpot, 0.5),
        "tpot_p99_s": at(tpot, 0.99),
        "tbt_p99_s": at(between, 0.99),
        "tokens_per_s": tokens / seconds,
        "violated": late / len(answers),
        "drops": len(control.lasted("preparing", "over", False)),
        "restores": len(control.lasted("preparing", "over", True)),
        "stages": control.stages,
        "drop_prepare_s": middle(control.lasted("preparing", "switching", False)),
        "drop_switch_s": middle(control.lasted("switching", "exchanging", False)),
        "exchange_s": middle(control.lasted("exchanging", "over", False)),
        "fetch_s": middle(control.lasted("fetching", "preparing", True)),
        "restore_s": middle(control.lasted("fetching", "over", True)),
    }
    for key in counts[0]:
        figures[key] = math.fsum(each[key] for each in counts)
    return figures


def serve(suite_name: str, case_name: str, policy_name: str) -> dict[str, Any]:
    """Serve the case's requests once: {"figures": numbers, "tokens": id -> ids in one string}, ready for JSON. Raises
    InvalidArgument for an unknown case, and what starting and serving raise."""
    _, case = find(suite_name, case_name)
    load = machine_now()["load_1min"]
    count = POLICIES[policy_name].instances or case.instances
    instances = RayInstances(
        "bench.lab.cluster.instances:make",
        [f"i{number}" for number in range(count)],
        {"suite": suite_name, "case": case_name, "policy": policy_name},
        {"CPU": 1},
    )
    try:
        return asyncio.run(_run(case, policy_name, instances, load))
    finally:
        instances.close()


async def _run(case: Case, policy_name: str, instances: RayInstances, load: float) -> dict[str, Any]:
    figures = await _serve(case, policy_name, instances)
    tokens = figures.pop("tokens")
    return {"figures": figures | {"load_1min_before": load}, "tokens": tokens}


def main(arguments: list[str]) -> None:
    """SUITE CASE POLICY RESULT(path)."""
    *names, result = arguments
    Path(result).write_text(json.dumps(serve(*names)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
