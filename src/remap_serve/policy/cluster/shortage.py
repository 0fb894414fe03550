# SPDX-License-Identifier: Apache-2.0
"""What dropping cannot free: how many tokens of KV, and how many more instances would have them. Pure.

Source: KunServe, sections 4.1 and 5.6, which then falls back to preemption and adds instances, and does not say how many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from remap_serve.policy.activations import Line

from .dispatch import needed
from .drop import plan
from .pipeline import Network
from .placement import UNLIMITED, Instance, Placement, ServedLayers, alone

__all__ = ["Shortage", "shortage"]

_ANY = Network(Line(0.0, 0.0), 1.0)  # how long things take does not say how much there is room for


@dataclass(frozen=True)
class Shortage:
    """tokens: of KV for which there is no room, whatever merges; instances: how many more, each alone and as small as the
    smallest that there is, have room for them."""

    tokens: int = 0
    instances: int = 0


def shortage(placement: Placement, ahead: int = 0, drops: bool = True) -> Shortage:
    """Of all that runs and waits, or of the demand when it has risen by `ahead`, if that is more. drops: whether groups may
    merge. None without instances: how much one has is not known."""
    model, tokens = placement.model, needed(placement, ahead)
    memory = tuple(sorted(stage.instance.memory_bytes for group in placement.groups for stage in group.stages))
    if not tokens or not memory:
        return Shortage()
    if drops:
        present = sum(max(0, group.capacity(model)) for group in placement.groups)
        tokens -= max(0, _most(model, memory) - present)
    return Shortage(tokens, -(-tokens // max(1, _capacity(_alone(model, memory[:1]))))) if tokens > 0 else Shortage()


@lru_cache(maxsize=8)
def _most(model: ServedLayers, memory: tuple[int, ...]) -> int:
    """Tokens of KV that instances with so many bytes have room for at most, whichever of them merge."""
    return _capacity(plan(_alone(model, memory), UNLIMITED, _ANY).placement)


def _alone(model: ServedLayers, memory: tuple[int, ...]) -> Placement:
    return alone(model, tuple(Instance(str(number), nbytes) for number, nbytes in enumerate(memory)))


def _capacity(placement: Placement) -> int:
    return sum(max(0, group.capacity(placement.model)) for group in placement.groups)
