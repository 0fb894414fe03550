# SPDX-License-Identifier: Apache-2.0
"""The times learnt from a tenant's passes: seconds of computation and of copies per layer. The thread of the tenant's
engine writes them at the end of passes; changes, which claim the tenant first, read them (locking.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from remap.policy.cost import CostModel, LayerTimes, Phase, bucket_of

if TYPE_CHECKING:
    from remap import _core

__all__ = ["PassTimes"]

_TIMES_EVERY = 32  # passes for which one estimate is used
_PREPARE_EVERY = 8  # passes at least between two preparations for growth: batches may change their shape in every pass
_PROMPTS = 64  # prefills that are known; if none of so many passes decoded, none will
_UNTIMED = 64  # passes whose times may still come, at most: the prefetcher times no more on a stream


class PassTimes:
    """One tenant's times. compute_s: seconds of computation of timed passes. abandoned: passes that taught nothing."""

    def __init__(self, layer_bytes: Sequence[int]) -> None:
        self._cost = CostModel(layer_bytes)
        self._layer_bytes = tuple(layer_bytes)
        self.compute_s = 0.0
        self.abandoned = 0
        # Called with new times at the end of a pass, to compute ahead what growth will ask
        # (bounds.StallBounds.prepare).
        self.prepare: Callable[[], None] | None = None
        self._prepared: LayerTimes | None = None
        self._prepared_age = _PREPARE_EVERY
        self._known: LayerTimes | None = None
        self._known_age = 0
        self.known_shared: tuple[LayerTimes, int, LayerTimes] | None = None  # (times, sharers, answer): `shared`
        self._asked = False
        self._shapes: deque[tuple[int, Phase, int]] = deque(maxlen=_UNTIMED)  # (number, phase, tokens), not timed yet
        # The shape of the last timed decode pass; before the first one, of the shortest pass.
        self._last_shape: tuple[Phase, int] | None = None
        self._prompts: deque[int] = deque(maxlen=_PROMPTS)  # tokens of the last prefills
        self._seen_copy_s = 0.0
        self._seen_bytes = 0
        self._seen_copies = 0

    def compute_only(self, layers: range) -> None:
        """From now on passes compute these layers alone: times of passes over others are forgotten. The link is the
        same."""
        rate = self._cost.undisturbed_seconds_per_byte
        self._cost = CostModel(self._layer_bytes, layers)
        if rate:
            self._cost.calibrate(1.0 / rate)
        self._known = self._prepared = self._last_shape = self.known_shared = None
        self._shapes.clear()
        self._prompts.clear()

    def completed(self, number: int, phase: str, tokens: int) -> None:
        """Pass `number` had this shape. Its times come now or, from a stream, some passes later."""
        self._shapes.append((number, "decode" if phase == "decode" else "prefill", max(1, tokens)))

    def take(self, stats: _core.PrefetchStats, number: int, seconds: float, stall_s: float) -> float | None:
        """Learn from one timed pass. Returns its seconds of computation; None if its shape is unknown. stats: the
        prefetcher's."""
        while self._shapes and self._shapes[0][0] < number:
            self._shapes.popleft()
        if not self._shapes or self._shapes[0][0] != number:
            return None
        _, kind, count = self._shapes.popleft()
        compute_s = max(0.0, seconds - stall_s)
        self._learn(stats, kind, count, compute_s)
        return compute_s

    def _learn(self, stats: _core.PrefetchStats, kind: Phase, tokens: int, compute: float) -> None:
        self.compute_s += compute
        copied = stats.timed_bytes - self._seen_bytes
        if copied:
            self._cost.observe_pass(
                kind,
                tokens,
                compute,
                copy_s=stats.copy_s - self._seen_copy_s,
                bytes_copied=copied if stats.copies > self._seen_copies else 0,
            )
            self._seen_copies, self._seen_copy_s, self._seen_bytes = stats.copies, stats.copy_s, stats.timed_bytes
        else:
            self._cost.observe_pass(kind, tokens, compute)
        if kind == "prefill":
            self._prompts.append(tokens)
        self._known_age += 1
        shape = (kind, bucket_of(tokens))
        last = self._last_shape
        # Until a decode pass comes, the shortest prefill stands in: longer ones hide copies that no decode pass hides.
        if shape != last and (kind == "decode" or last is None or (last[0] != "decode" and shape[1] < last[1])):
            self._last_shape = shape
            self._known_age = _TIMES_EVERY
        self._prepared_age += 1
        if self._asked and self._prepared_age >= _PREPARE_EVERY and self.prepare is not None:
            times = self.decode()
            if times is not None and times is not self._prepared:
                self.prepare()
                self._prepared, self._prepared_age = times, 0

    @property
    def known(self) -> LayerTimes | None:
        """The last estimate that was asked for."""
        return self._known

    def decode(self) -> LayerTimes | None:
        """Measured seconds per layer for the shape of the last decode pass; None before the first pass, and while no copy was
        timed: a layer's first load is timed with calls of the backend that may fail.

        The same object for some passes, so that answers computed from it (the exact bound) can be kept meanwhile.
        """
        self._asked = True
        if self._last_shape is None or not self._cost.measured:
            return None
        if self._known is None or self._known_age >= _TIMES_EVERY:
            self._known = self._cost.estimate(*self._last_shape)
            self._known_age = 0
        return self._known

    @property
    def early(self) -> bool:
        """Whether the first timed decode pass is about to come: passes hide less than known from then on."""
        last = self._last_shape
        return (last is None or last[0] != "decode") and len(self._prompts) < _PROMPTS

    def prefill(self) -> LayerTimes | None:
        """Seconds per layer of a short prefill (the tenth percentile of the prompts seen lately), to bound the cost of
        a reload for an inactive tenant; None before the first pass. Without a prefill, other passes stand in."""
        if not self._cost.measured:
            return None
        tokens = sorted(self._prompts)
        return self._cost.estimate("prefill", tokens[len(tokens) // 10] if tokens else 1)

    def copy_seconds(self) -> float:
        """Mean measured seconds to copy in one layer; 0 if the link was not measured."""
        rate = self._cost.seconds_per_byte
        return rate * sum(self._layer_bytes) / len(self._layer_bytes) if rate else 0.0

    def shared(self, sharers: int) -> LayerTimes | None:
        """`decode()` where `sharers` tenants share device and link: copies as if they had waited for none, and `alone`
        by what was seen. The same object while that is the same. None before the first decode pass: a prefill hides
        more than what follows it."""
        times = self.decode()
        if times is None or self._last_shape is None or self._last_shape[0] != "decode":
            return None
        known = self.known_shared
        if known is None or known[0] is not times or known[1] != sharers:
            rate = self.seconds_per_byte()
            copies = tuple(size * rate for size in self._layer_bytes)
            alone = self._cost.alone(*self._last_shape, sharers)
            known = self.known_shared = (times, sharers, LayerTimes(times.compute_s, copies, alone=alone))
        return known[2]

    def seconds_per_byte(self) -> float:
        """Seconds to copy one byte in while nothing else is copied; 0 if the link was not measured."""
        return self._cost.undisturbed_seconds_per_byte or 0.0

    def calibrate_link(self, bytes_per_s: float) -> None:
        """Set the estimate of the copy bandwidth, in bytes per second; measured copies refine it."""
        self._cost.calibrate(bytes_per_s)
        self._known = None
