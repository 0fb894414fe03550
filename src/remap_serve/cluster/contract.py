# SPDX-License-Identifier: Apache-2.0
"""An instance as control and the front know it, whatever computes behind it.

    asked of an instance        where
    submit, abort a request     `submit`, `cancel`
    offer                       `InstanceReport.offers` and `load`, with each `poll`: control asks for nothing, it reads
    grow, give                  the engine itself, between two of its passes, when requests ask for KV or have ended
    KV out and in               `prepare`, `commit`, `abort`, `fetch` (`MergingInstance`)

Each instance serves alone, and its requests can start again elsewhere behind the tokens that were delivered: `ServingInstance` is
all that this takes. One that also takes part in changes of groups says so (`Description.merges`); of the others control asks
nothing but these calls.

The calls come from several threads, and may overtake each other on their way; epochs say which are old (`messages`). Every
call raises errors of this library alone: any other is a defect of the instance, whose process is then replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from remap.errors import InvalidState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from remap_serve.engine.request import Request
    from remap_serve.policy.cluster.restore import Copy

    from .messages import Description, GroupPlan, InstanceReport, Tokens

__all__ = ["MergingInstance", "ServingInstance", "require_not_recovered"]


class ServingInstance(Protocol):
    """An instance that serves by itself."""

    def describe(self) -> Description:
        """The instance's name and capacity."""

    def recover(self, epoch: int) -> tuple[str, ...]:
        """Forget every request and serve alone from this epoch on. Returns the ids of the requests that were here. Raises
        StalePlan (fields plan_epoch, epoch) unless it is above the instance's own; nothing changed then."""

    def submit(self, request: Request, attempt: int, tokens: Sequence[int] = (), epoch: int | None = None) -> None:
        """Queue a request behind the tokens that it has generated until now. epoch: of this instance, when the request was sent
        to it; None: now.

        Raises, with nothing queued: InvalidState (field instance) if it has to go to another instance, or be submitted again;
        InvalidArgument for a request that the model cannot serve, or whose id is in use.
        """

    def cancel(self, id: str, attempt: int | None = None) -> None:
        """Take a request out; its end comes with the reason "abort". attempt: not if a later one is here. Unknown ids are
        ignored."""

    def release(self, id: str) -> int | None:
        """Forget a request without an answer, if it is still stuck (`InstanceReport.stuck`): its attempt. None for others."""

    def give_up(self, id: str) -> None:
        """End a request with the reason "out_of_blocks", if it is still stuck. Others are ignored."""

    def poll(self, timeout_s: float = 0.0) -> tuple[list[Tokens], InstanceReport]:
        """The tokens computed since the last call, and a report. Waits for `timeout_s` for any tokens. Raises what ended the
        instance's work: it has to `recover`, or go."""


class MergingInstance(ServingInstance, Protocol):
    """An instance that can also be a stage of a group (`messages` has the order of these calls)."""

    def prepare(self, plan: GroupPlan) -> None:
        """Check the plan and make ready to give and take KV; go on serving as before."""

    def commit(self, epoch: int) -> None:
        """Switch to the prepared plan at the next pass boundary."""

    def abort(self, epoch: int) -> None:
        """Undo the preparations for this epoch, and refuse it from now on."""

    def fetch(self, epoch: int, copies: Iterable[Copy]) -> None:
        """Bring the layers home that `copies` names for this instance, while it serves."""


def require_not_recovered(instance: str, id: str, epoch: int | None, recovered: int) -> None:
    """For `submit`: a request that was sent before the instance recovered, and comes behind that, has been started again
    elsewhere since. Raises InvalidState (fields instance, epoch, recovered)."""
    if epoch is not None and epoch < recovered:
        raise InvalidState(
            f"instance {instance!r} has recovered at epoch {recovered}, and request {id!r} was sent to it at {epoch}; nothing "
            "was queued; submit it again",
            instance=instance,
            epoch=epoch,
            recovered=recovered,
        )
