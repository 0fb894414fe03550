"""A pool whose blocks can go to host memory, in virtual time: what swapping needs of `tenant.kv`. Pure.

Copies go over the instance's own link, one after another in each direction. On the baseline's side: host memory is without end,
and nobody waits for copies out, only for those that come back.
"""

from __future__ import annotations

from remap_serve.sim.pools import CountedPool

from .events import Events

__all__ = ["HostPool"]


class HostPool(CountedPool):
    """block_bytes: of one block in all layers. wait_s: until then the next pass waits for what comes back."""

    streamable_blocks = free_streamable_blocks = 0

    def __init__(
        self,
        events: Events,
        usable: int,
        block_tokens: int,
        block_bytes: int,
        out_bytes_per_s: float,
        in_bytes_per_s: float,
    ) -> None:
        super().__init__(usable, block_tokens)
        self._events = events
        self._out_s, self._in_s = block_bytes / out_bytes_per_s, block_bytes / in_bytes_per_s
        self._out_free_s = self._in_free_s = 0.0
        self._ends: dict[int, float] = {}
        self._tickets = self._joined = 0
        self.wait_s = 0.0
        self.copied_blocks = 0

    def copy_out(self, ids: list[int], below: int | None = None) -> list[int]:
        """Host blocks for these."""
        self._out_free_s = max(self._events.now, self._out_free_s) + len(ids) * self._out_s
        self.copied_blocks += len(ids)
        return [0] * len(ids)

    def copy_in(self, host_ids: list[int], ids: list[int]) -> int:
        """A ticket; behind what is still to go out."""
        begin = max(self._events.now, self._in_free_s)
        self._in_free_s = begin + len(host_ids) * self._in_s
        self.copied_blocks += len(host_ids)
        self._tickets += 1
        self._ends[self._tickets] = self._in_free_s
        return self._tickets

    def kept(self, host_ids: list[int]) -> bool:
        """Nothing is lost."""
        return True

    def arrived(self, ticket: int) -> bool:
        """Whether its copy has ended, or will have when the next pass begins."""
        return ticket <= self._joined or self._ends[ticket] <= self._events.now

    def join(self, ticket: int | None = None) -> None:
        """The next pass begins behind this copy."""
        self._joined = max(self._joined, self._tickets if ticket is None else ticket)
        self.wait_s = max(self.wait_s, self._ends.get(self._joined, 0.0))

    def free_host(self, host_ids: list[int]) -> None:
        """Host memory is without end."""

    def stream(self, host_ids: list[int]) -> list[int]:
        """Nothing streams here."""
        raise NotImplementedError
