# SPDX-License-Identifier: Apache-2.0
"""Control's decision about an instance's next group: prepared, committed, aborted (see `messages`).

Control's threads and the loop share it, under one lock. It serves nothing itself: the loop carries out the decisions
(`switch`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from remap.errors import InvalidArgument, InvalidState, StalePlan
from remap_serve.cluster.prepared import Ears, PreparedGroup, meet
from remap_serve.policy.cluster.placement import Group, Instance, Placement, PlannedStage, check

if TYPE_CHECKING:
    from collections.abc import Callable

    from remap_serve.cluster.member import Member
    from remap_serve.cluster.messages import GroupPlan

__all__ = ["InstanceChanges"]

NEVER_AGAIN = 1 << 62
"""An epoch above all others."""


class InstanceChanges:
    """Of the instance with this name. host: under which others reach it. ears: the listeners to the links of what is prepared.
    timeout_s: for others to come."""

    def __init__(self, name: str, host: str, ears: Ears, timeout_s: float) -> None:
        self._name = name
        self._host = host
        self._ears = ears
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._prepared: PreparedGroup | None = None
        self._meeting = 0
        self._committed = 0
        self._aborted = 0

    def prepare(self, plan: GroupPlan, member: Member, check: Callable[[], None]) -> None:
        """See `ClusterInstance.prepare`. member: the instance now. check: raises if something stands against it; from before it
        is called, the change is pending. Waits for the other instances."""
        with self._lock:
            self._require_newer(plan.epoch)
            _check_plan(plan, member, self._committed)
            self._meeting += 1
        try:
            check()
            self._meet(plan)
        finally:
            with self._lock:
                self._meeting -= 1

    def _meet(self, plan: GroupPlan) -> None:
        with self._lock:
            self._require_newer(plan.epoch)
            older, self._prepared = self._replaced(plan.epoch), None
        if older is not None:
            older.close()
        made = meet(plan, self._name, self._host, self._timeout_s)
        with self._lock:
            try:
                self._require_newer(plan.epoch)
                older, self._prepared = self._replaced(plan.epoch), made
            except StalePlan:
                made.close()
                raise
            made.open(self._ears)
        if older is not None:
            older.close()

    @property
    def newest(self) -> int:
        """The highest epoch that was committed or aborted here, or is prepared."""
        with self._lock:
            prepared = 0 if self._prepared is None else self._prepared.plan.epoch
            return max(self._committed, self._aborted, prepared)

    def pending(self, epoch: int) -> bool:
        """Whether a change is being prepared, is prepared, or is decided and the instance, at this epoch, has not switched."""
        with self._lock:
            return self._meeting > 0 or self._prepared is not None or self._committed != epoch

    def commit(self, epoch: int) -> PreparedGroup | None:
        """The next group of the instance; None the second time. Raises StalePlan (fields plan_epoch, epoch) if this epoch is
        not prepared; nothing changed then."""
        with self._lock:
            if epoch == self._committed:
                return None
            if self._prepared is None or self._prepared.plan.epoch != epoch:
                raise self._stale(epoch)
            return self._take()

    def ended(self, epoch: int) -> PreparedGroup | None:
        """The ring has ended for this epoch. So it was decided, whether or not the commit came here yet: what to switch to, if
        `commit` did not return it already."""
        with self._lock:
            if self._prepared is None or self._prepared.plan.epoch != epoch:
                return None
            return self._take()

    def abort(self, epoch: int) -> bool:
        """Forbid this epoch, and leave the links prepared for it. False, with nothing changed, if it was committed."""
        with self._lock:
            if epoch <= self._committed:
                return False
            self._aborted = max(self._aborted, epoch)
            prepared = self._prepared
            if prepared is not None and prepared.plan.epoch == epoch:
                self._prepared = None
                prepared.close()
        return True

    def require_newer(self, epoch: int) -> None:
        """Raises StalePlan (fields plan_epoch, epoch) for an epoch that is over or was aborted."""
        with self._lock:
            self._require_newer(epoch)

    def recover(self, epoch: int) -> None:
        """Commit this epoch, and leave the prepared links. Raises StalePlan unless it is above the one that was committed."""
        with self._lock:
            if epoch <= self._committed:
                raise self._stale(epoch)
            prepared, self._prepared = self._prepared, None
            self._committed = epoch
        if prepared is not None:
            prepared.close()

    def close(self) -> None:
        """Prepare nothing any more, and leave the prepared links."""
        with self._lock:
            prepared, self._prepared = self._prepared, None
            self._aborted = NEVER_AGAIN
        if prepared is not None:
            prepared.close()

    # -- under the lock ------------------------------------------------------------------------------------------------------

    def _replaced(self, epoch: int) -> PreparedGroup | None:
        """The group whose place this epoch takes. Raises StalePlan if a call for a later one was quicker."""
        older = self._prepared
        if older is not None and older.plan.epoch > epoch:
            raise self._stale(epoch)
        return older

    def _take(self) -> PreparedGroup:
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        self._committed = prepared.plan.epoch
        return prepared

    def _require_newer(self, epoch: int) -> None:
        if epoch <= max(self._committed, self._aborted):
            raise self._stale(epoch)

    def _stale(self, epoch: int) -> StalePlan:
        return StalePlan(
            f"instance {self._name!r} is at epoch {self._committed}, and the aborted ones end with {self._aborted}: epoch "
            f"{epoch} is over, or not prepared; nothing changed; plan anew",
            plan_epoch=epoch,
            epoch=self._committed,
            aborted=self._aborted,
        )


def _check_plan(plan: GroupPlan, now: Member, committed: int) -> None:
    """Raises InvalidArgument, IncompleteCopy and InvalidState as `ClusterInstance.prepare` says. committed: the last epoch."""
    has = now.has
    names = [part.instance for part in plan.stages]
    if has.name not in names:
        raise InvalidArgument(
            f"the plan for epoch {plan.epoch} must name {has.name!r}, and names {names}; nothing changed",
            instance=has.name,
        )
    if plan.fingerprint != has.fingerprint:
        mine, its = vars(has.fingerprint), vars(plan.fingerprint)
        differs = tuple(key for key in mine if mine[key] != its[key])
        raise InvalidArgument(
            f"the plan for epoch {plan.epoch} is for another model than {has.name!r} has: {', '.join(differs)} differ; "
            "nothing changed; start instances with the same files, dtype and version",
            differs=differs,
            expected=has.fingerprint,
            got=plan.fingerprint,
        )
    stages = tuple(
        PlannedStage(Instance(part.instance, has.memory_bytes), part.first, part.end) for part in plan.stages
    )
    check(Placement(has.model, (Group(stages),), plan.epoch))
    before = {part.instance for group in plan.before for part in group}
    mine_now = next((group for group in plan.before if any(part.instance == has.name for part in group)), ())
    merges = before == set(names)
    if mine_now != now.stages or len(before) == 1 or not (merges or (len(names) == 1 and len(plan.before) == 1)):
        raise InvalidArgument(
            f"the plan for epoch {plan.epoch} must begin with the group that {has.name!r} is in, {now.stages}, and merge "
            f"whole groups or leave an instance alone; it begins with {plan.before}; nothing changed; plan anew",
            expected=now.stages,
            got=plan.before,
        )
    if now.exchange is not None or now.next is not None or committed != now.epoch:
        raise InvalidState(
            f"KV of the last change still moves at {has.name!r}; nothing changed; prepare when it serves",
            instance=has.name,
        )
    part = plan.part(has.name)
    missing = [] if now.home else sorted({*range(part.first, part.end)} - {*range(now.part.first, now.part.end)})
    if missing:
        raise InvalidState(
            f"{has.name!r} cannot compute the layers {missing}, which others have for it: it holds {now.part.first} to "
            f"before {now.part.end} of {has.layers}; nothing changed; fetch first",
            instance=has.name,
            layers=tuple(missing),
        )
