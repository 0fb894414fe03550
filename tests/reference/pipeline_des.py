"""A pipeline of stages and links, event by event. Tests `remap_serve.policy.cluster.pipeline`: no recurrence, no formula.

Every machine (stage or link) has a queue and serves it in the order of arrival, one job at a time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count


def run(jobs: int, machines: int, takes: Callable[[int, int], float], turns: int = 1) -> list[list[float]]:
    """When each job has passed the last machine, for each of its turns: a job comes back to the first machine then."""
    queues: list[deque[int]] = [deque() for _ in range(machines)]
    busy = [False] * machines
    ends: list[list[float]] = [[] for _ in range(jobs)]
    order = count()
    events: list[tuple[float, int, int, int]] = []  # time, tie, machine, job: a machine has finished a job
    queues[0].extend(range(jobs))

    def start(machine: int, now: float) -> None:
        if queues[machine] and not busy[machine]:
            job = queues[machine].popleft()
            busy[machine] = True
            heapq.heappush(events, (now + takes(job, machine), next(order), machine, job))

    start(0, 0.0)
    while events:
        now, _, machine, job = heapq.heappop(events)
        busy[machine] = False
        following = machine + 1
        if following == machines:
            ends[job].append(now)
            following = 0 if len(ends[job]) < turns else -1
        if following >= 0:
            queues[following].append(job)
            start(following, now)
        start(machine, now)
    return ends


def with_links(seconds: Sequence[Sequence[float]], hop_s: Sequence[float]) -> list[list[float]]:
    """Each job's seconds on stage, link, stage, link, ..., stage."""
    rows = []
    for row, hop in zip(seconds, hop_s):
        machines = [row[0]]
        for takes in row[1:]:
            machines += [hop, takes]
        rows.append(machines)
    return rows
