# SPDX-License-Identifier: Apache-2.0
"""Sessions in which models come and go whole, for comparison: what a sleep mode does, and an LRU of whole models.

Both take and give pages by the same calls as `Session` does, so only the order differs: whole models leave until there is
room, the next one's layers all load, and only then does its first pass begin.
"""

from __future__ import annotations

import time

from remap import Session, advanced
from remap.errors import InvalidState
from remap.internals import internals
from remap.memory.activate import ActivationReport

__all__ = ["LRUModels", "SleepingModels"]

LOOK_S = 2e-4
"""Between two looks whether all layers have come."""


class SleepingModels(Session):
    """One model is awake at a time, as with a sleep mode that wakes it whole."""

    one_at_a_time = True
    keeps = False
    """Whether other models stay while there is room."""

    def activate(self, name: str, *, alone: bool = False, partial: bool | float = False) -> ActivationReport:
        """As `Session.activate`; returns when all layers are there."""
        if not alone:  # no model wakes up before its turn
            raise InvalidState("whole models are not prepared ahead of their turn; nothing has changed", tenant=name)
        # By last use, the model used longest ago first.
        before = self.snapshot().tenants
        awake = [each for each in before.values() if each.name != name and len(each.cold) < each.layers]
        for other in sorted(awake, key=lambda each: each.last_use):
            if not self.snapshot().tenants[name].cold or (self.keeps and not self._lacks(name)):
                break
            self.deactivate(other.name, pages="none")
        report = super().activate(name, alone=alone, partial=partial)
        if report.activated:
            advanced.settle(self)
            tenant = self.tenants[name]
            while not all(map(internals(tenant).ready, set(range(tenant.layers)) - set(tenant.streamed))):
                time.sleep(LOOK_S)
        return report

    def expect(self, name: str, *, blocks: int = 0) -> tuple[int, ...]:
        """Nothing comes ahead of its turn."""
        return ()

    def _lacks(self, name: str) -> bool:
        tenant = internals(self.tenants[name])
        first = tenant.kv.geometry.pages_for_blocks(tenant.kv.spec.min_blocks)
        return self.snapshot().pages.free < tenant.away_pages + first


class LRUModels(SleepingModels):
    """As many whole models as fit stay; the one used longest ago leaves first."""

    keeps = True
