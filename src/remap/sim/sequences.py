"""One request as the simulated engine keeps it, and what one pass computes. Pure.

A `Sequence` has the attributes that `remap.engine.scheduler.Scheduler` works with, so that the production scheduler runs here as
it is; token values do not exist, only how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from remap.engine.request import State

__all__ = ["Batch", "Sequence"]


class Sequence:
    """tokens known = prompt + generated; `computed` of them have their KV in `blocks`; it ends at `end` tokens.

    high_water: the most tokens whose KV ever existed, so computing token i < high_water is recomputing. last_s: when its last
    token came; None before the first one.
    """

    __slots__ = (
        "arrival_s",
        "blocks",
        "computed",
        "end",
        "first_s",
        "high_water",
        "last_s",
        "length",
        "order",
        "preemptions",
        "prompt",
        "state",
        "swapped",
        "tenant",
    )

    def __init__(self, order: int, tenant: str, arrival_s: float, prompt: int, output: int) -> None:
        self.order = order
        self.tenant = tenant
        self.arrival_s = arrival_s
        self.prompt = prompt
        self.length = prompt
        self.end = prompt + output
        self.computed = 0
        self.high_water = 0
        self.blocks: list[int] = []
        self.swapped = 0  # blocks that lie in host memory while it is swapped out
        self.preemptions = 0
        self.state = State.WAITING
        self.first_s: float | None = None
        self.last_s: float | None = None

    @property
    def tokens(self) -> range:
        """As many as there are tokens."""
        return range(self.length)


@dataclass
class Batch:
    """What one pass computes: parts of prompts (sequence, first token, tokens), and sequences that decode one token each.

    decode_context: tokens whose KV the decoding rows read. swapped_in, swapped_out: blocks copied from and to host memory
    before it.
    """

    prefills: list[tuple[Sequence, int, int]] = field(default_factory=list)
    rows: list[Sequence] = field(default_factory=list)
    decode_context: int = 0
    preempted: int = 0
    swapped_in: int = 0
    swapped_out: int = 0

    @property
    def prefill_tokens(self) -> int:
        return sum(count for _, _, count in self.prefills)

    @property
    def prefill_pairs(self) -> int:
        """Pairs of query and key, causal."""
        return sum(count * start + count * (count + 1) // 2 for _, start, count in self.prefills)

    def __bool__(self) -> bool:
        return bool(self.prefills or self.rows)
