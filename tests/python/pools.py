# SPDX-License-Identifier: Apache-2.0
"""A block pool whose pages come and go without a session: the steps of a change one by one, of which listeners hear at once."""

from __future__ import annotations

from collections.abc import Sequence

from remap.kv.pool import BlockPool

__all__ = ["OwnPool"]


class OwnPool(BlockPool):
    def add_pages(self, slots: Sequence[int]) -> Sequence[int]:
        return self._heard(self.mark_owned(slots))

    def drain(self, slots: Sequence[int]) -> Sequence[int]:
        return self._heard(self.mark_withdrawn(slots))

    def cancel_drain(self, slots: Sequence[int]) -> Sequence[int]:
        return self._heard(self.mark_open(slots))

    def _heard(self, ids: Sequence[int]) -> Sequence[int]:
        self.tell()
        return ids
