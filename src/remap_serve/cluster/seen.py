# SPDX-License-Identifier: Apache-2.0
"""A cluster's state as /health and /cluster show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .front import Front

__all__ = ["cluster_state", "health_of"]


def health_of(front: Front[Any]) -> dict[str, Any]:
    """status: ok; degraded, when some of the instances do not serve; draining, when no request is taken any more; or that none
    serves. How many do (0 then), and how many should."""
    expected = len(front.up)
    serving = 0 if front.failure is not None or front.draining else sum(front.up.values())
    status = "draining" if front.draining else "no instance serves"
    if serving:
        status = "ok" if serving == expected else "degraded"
    return {"status": status, "serving": serving, "instances_expected": expected}


def cluster_state(front: Front[Any]) -> dict[str, Any]:
    """How the cluster is now, of JSON's types; `remap top` shows it. kv_tokens of a group are held, kv_capacity have room."""
    groups = [
        {
            "epoch": view.epoch,
            "changing": view.changing,
            "phase": view.phase,
            "stages": [{"instance": part.instance, "first": part.first, "end": part.end} for part in view.stages],
            "running": view.load.running,
            "waiting": len(view.load.waiting),
            "kv_tokens": view.load.tokens,
            "kv_capacity": view.capacity,
        }
        for view in front.groups
    ]
    return {
        "epoch": front.service.control.epoch,
        "groups": groups,
        "unfinished": front.unfinished,
        "restarts": front.restarts,
        "suspects": front.service.suspects,
        "deaths": [{"instance": each.instance, "node": each.node, "why": each.why} for each in front.service.deaths],
        "rejected": {name: str(error) for name, error in front.rejected.items()},
    }
