"""What is compared: KunServe's baselines, its own steps, and the library. Pure description."""

from __future__ import annotations

from dataclasses import dataclass

from remap_serve.cluster.control import GroupPolicy
from remap_serve.policy.cluster.foresight import Outlook
from remap_serve.sim.policies import IDEAL_MEMORY

from .lanes import Cut

__all__ = ["SYSTEMS", "System"]

_ALONE = GroupPolicy("alone")


@dataclass(frozen=True)
class System:
    """policy: of the production control. cut: how prompts are cut in groups of several stages. coordinated: whether activations
    go before KV on the network, and KV in chunks. swap: preempted KV goes to host memory. migrates: requests move to the
    instance with the most room. shares: the next part of a prompt may go with the next microbatch, whatever lane that is;
    otherwise a request stays in its lane. memory: how many times the KV there is; control does not know of it, so only where
    instances stay alone."""

    name: str
    policy: GroupPolicy = _ALONE
    cut: Cut = "tokens"
    coordinated: bool = True
    swap: bool = False
    migrates: bool = False
    shares: bool = False
    memory: int = 1


SYSTEMS = {
    one.name: one
    for one in (
        System("vllm"),
        System("ideal", memory=IDEAL_MEMORY),
        System("vllm-pp", GroupPolicy("pipeline", 2)),
        System("infercept", swap=True),
        System("llumnix", migrates=True),
        System("kunserve", GroupPolicy("kunserve"), "halved", shares=True),
        System("remap", GroupPolicy("remap"), "balanced", shares=True),
        System("kunserve-ahead", GroupPolicy("kunserve", outlook=Outlook()), "halved", shares=True),
        System("remap-ahead", GroupPolicy("remap", outlook=Outlook()), "balanced", shares=True),
        System("remap-sticky", GroupPolicy("remap"), "balanced"),
        System("remap-tokens", GroupPolicy("remap"), "tokens", shares=True),
        # KunServe's own steps (its Figure 14, and 16).
        System("drop", GroupPolicy("kunserve", restores=False), "tokens", coordinated=False, shares=True),
        System("drop+exchange", GroupPolicy("kunserve", restores=False), "tokens", shares=True),
        System("drop+exchange+lookahead", GroupPolicy("kunserve", restores=False), "halved", shares=True),
    )
}
"""vllm: each instance alone, preemption by recompute. ideal: the same with six times the KV, what memory is worth.
vllm-pp: fixed pairs. infercept, llumnix: the essentials of swapping and of
migration. kunserve: the paper's greedy plan, its lookahead and its rule for restoring. remap: the exact plan, the balanced
lookahead, ski rental; remap-sticky is that without `shares`, remap-tokens with prompts cut by tokens. drop...: KunServe without
what follows, and without restoring."""
