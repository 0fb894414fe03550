"""Oneiros' Algorithm 1 as it is printed (sections 5.1 to 5.5). This decides; the library's session carries out.

In each step of the scheduler:

    out of KV blocks    one layer more is remapped, whatever the need: of an inactive model, the most recently used first, up to
                        its cap; when all are at theirs, of the model that is out of blocks (lines 3 to 5, 15 to 23)
    otherwise           a layer comes home for each added KV tensor that is empty (lines 7 to 12)
    the cap             T_T N <= T_Compute: a decoding pass of an active model, the prefill of an inactive one (section 5.3)
    m                   alpha + 1 while Eq. 4 holds, alpha + 2 beyond (section 5.4)

Decided here, where the pseudo-code contradicts the text or is silent. Lines 7 to 9 call the function that only grows; here they
bring layers home (section 5.1: "restored for parameter usage"). Line 19 lets a model go whole; here two layers stay (section 5.2:
"no model is ever remapped in its entirety"). Line 23 has no cap; here it has that of section 5.3. A tensor counts as empty when
as many blocks are free as it has: the library moves those that lie in it. A model whose pages are another's KV when its turn
comes streams those layers, as under `remap:weights+oneiros`. Before its first pass a model's cap is one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from remap import advanced
from remap.errors import ArenaBroken, Error
from remap_serve.sim.policies import Policy

from .experiments import ALGORITHM_1

__all__ = ["POLICY", "AlgorithmOne", "Remappable", "buffers_for", "next_to_give"]


@dataclass(frozen=True)
class Remappable:
    """A model in one step. used: the number of its last activation, larger is later. remapped: N. transfer_s: T_T. compute_s:
    T_Compute, 0 before its first pass."""

    name: str
    active: bool
    used: int
    layers: int
    remapped: int
    transfer_s: float
    compute_s: float

    @property
    def cap(self) -> int:
        """The most layers that are remapped: T_T N <= T_Compute."""
        hidden = int(self.compute_s / self.transfer_s) if self.compute_s and self.transfer_s else 1
        return max(0, min(self.layers - 2, hidden))


def next_to_give(models: Sequence[Remappable], out: str) -> Remappable | None:
    """The model that gives one layer more to `out`, which is out of blocks; None if all are at their caps."""
    givers = [one for one in models if one.remapped < one.cap]
    inactive = [one for one in givers if not one.active]
    if inactive:
        return max(inactive, key=lambda one: one.used)
    return next((one for one in givers if one.name == out), None)


def buffers_for(model: Remappable, remapped: int) -> int:
    """m - alpha of an active model: one buffer if Eq. 4 holds, T_T (alpha + 1) <= T_c (n - alpha - 1), else two."""
    each_s = model.compute_s / model.layers
    return 1 if model.transfer_s * (remapped + 1) <= each_s * (model.layers - remapped - 1) else 2


class AlgorithmOne:
    """A session as `SharedEngines` sees it, decided by Algorithm 1. follow: told of blocks that have moved, before anything else
    moves. refused: changes that the library could not carry out; the step goes on without them."""

    broker = ""

    def __init__(self, session: Any, follow: Callable[[Mapping[str, Mapping[int, int]]], None]) -> None:
        self._session, self._follow = session, follow
        self._used: dict[str, int] = {}
        self._turns = 0
        self._added: list[
            tuple[str, str]
        ] = []  # (giver, whose KV it is), one for each layer that is away; the newest last
        self.refused = 0

    def activate(self, name: str, *, alone: bool, partial: bool | float) -> Any:
        """The session's: layers that can come home do."""
        report = self._session.activate(name, alone=alone, partial=partial)
        if report.activated:
            self._turns += 1
            self._used[name] = self._turns
            self._forget(name)
        return report

    def deactivate(self, name: str) -> None:
        """The session's."""
        self._session.deactivate(name)

    def snapshot(self) -> Any:
        """The session's."""
        return self._session.snapshot()

    def step(self, demand: Mapping[str, Any]) -> Any:
        """One iteration of the loop of line 2."""
        tenants = self._tenants()
        short = {name: wanted.blocks - tenants[name].kv.free_blocks for name, wanted in demand.items()}
        out = max(short, key=lambda name: short[name]) if short else ""
        changed = self._grow(tenants, out) if short.get(out, 0) > 0 else self._restore(tenants, short)
        return SimpleNamespace(moved={}, changed=changed, wanted={})

    def _grow(self, tenants: Mapping[str, advanced.Internals], out: str) -> bool:
        models = [self._model(each) for each in tenants.values()]
        giver = next_to_give(models, out)
        if giver is None:
            return False
        layers = giver.remapped + 1
        done = self._remap(giver, layers) if giver.name == out else self._lend(giver.name, layers, out)
        if done:
            self._added.append((giver.name, out))
        return done

    def _restore(self, tenants: Mapping[str, advanced.Internals], short: Mapping[str, int]) -> bool:
        """A layer for each tensor that is empty, the last added first."""
        changed = False
        spare = {name: -short.get(name, -each.kv.free_blocks) for name, each in tenants.items()}
        for giver, holder in self._added[::-1]:
            each = tenants[giver]
            blocks = -(-max(each.layer_bytes) // tenants[holder].kv.spec.block_bytes)
            if spare[holder] < blocks:
                continue
            model = self._model(each)
            fewer = model.remapped - 1
            # Of a model with layers in others' KV the library chooses which one: evenly spaced anew, they would all have to move.
            alone = giver == holder and not each.lent_pages
            if not (self._remap(model, fewer) if alone else self._lend(giver, fewer)):
                break
            spare[holder] -= blocks
            self._added.remove((giver, holder))
            changed = True
        return changed

    def _remap(self, model: Remappable, layers: int) -> bool:
        buffers = buffers_for(model, layers)
        return self._told(lambda: advanced.remap(self._session, model.name, layers, buffers, "uniform"))

    def _lend(self, name: str, layers: int, to: str | None = None) -> bool:
        return self._told(lambda: advanced.lend(self._session, name, layers, to=to))

    def _told(self, verb: Callable[[], Any]) -> bool:
        """Whether the library carried it out."""
        try:
            self._follow(verb().moved)
        except ArenaBroken:
            raise
        except Error:
            self.refused += 1
            return False
        return True

    def _forget(self, name: str) -> None:
        """Those of its layers that have come home."""
        away = [pair for pair in self._added if pair[0] == name]
        for pair in away[int(self._tenants()[name].remapped) :]:
            self._added.remove(pair)

    def _tenants(self) -> dict[str, advanced.Internals]:
        return {name: advanced.internals(each) for name, each in self._session.tenants.items()}

    def _model(self, tenant: advanced.Internals) -> Remappable:
        times = tenant.times() if tenant.active else tenant.prefill_times()
        return Remappable(
            tenant.name,
            tenant.active,
            self._used.get(tenant.name, -1),
            tenant.layers,
            int(tenant.remapped),
            tenant.copy_seconds(),
            sum(times.compute_s) if times is not None else 0.0,
        )


POLICY = Policy(
    ALGORITHM_1,
    "Oneiros' Algorithm 1 as printed: one layer a step, T_T N <= T_Compute, m = alpha + 1 or alpha + 2",
    "remap",
    partial=True,
    manager=AlgorithmOne,
)
