# SPDX-License-Identifier: Apache-2.0
"""What an instance's loop has for `poll`: tokens, a report, and why it does not go on. Its lock is between the loop and
callers."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from remap.errors import InvalidState

if TYPE_CHECKING:
    from remap_serve.cluster.messages import InstanceReport, Tokens

__all__ = ["HUNG", "Outbox"]

HUNG = 10
"""Times an instance's `timeout_s` that one round of its loop takes at most: else it hangs, in a driver or in a lock."""


class Outbox:
    """Of the instance with this name. report: the first one."""

    def __init__(self, name: str, report: InstanceReport) -> None:
        self.report = report
        """The last one."""
        self.taken = False
        """Somebody has had it."""
        self.failed: BaseException | None = None
        """What ended the loop's work."""
        self.round_s = math.inf
        """When the loop began its round; inf while it waits. The loop writes it, `take` reads it: one number."""
        self._name = name
        self._changed = threading.Condition()
        self._tokens: list[Tokens] = []

    def take(self, wait_s: float, timeout_s: float) -> tuple[list[Tokens], InstanceReport]:
        """See `ClusterInstance.poll`. timeout_s: of the instance."""
        with self._changed:
            self._changed.wait_for(lambda: self._tokens or self.failed is not None, wait_s)
            tokens, self._tokens = self._tokens, []
            if self.failed is not None and not tokens:
                raise self.failed
            busy_s = time.monotonic() - self.round_s
            if busy_s > HUNG * timeout_s and not tokens:
                raise InvalidState(
                    f"instance {self._name!r} has been in one round of its loop for {busy_s:.0f} s: it hangs; end its process",
                    instance=self._name,
                    busy_s=busy_s,
                )
            self.taken = True
            return tokens, self.report

    def put(self, tokens: list[Tokens]) -> None:
        """These were made."""
        if tokens:
            with self._changed:
                self._tokens += tokens
                self._changed.notify_all()

    def show(self, report: InstanceReport) -> None:
        """How things are now."""
        with self._changed:
            self.report, self.taken = report, False

    def fail(self, error: BaseException | None) -> None:
        """What ended the loop's work; None: it goes on."""
        with self._changed:
            self.failed = error
            self._changed.notify_all()
