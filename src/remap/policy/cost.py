# SPDX-License-Identifier: Apache-2.0
"""The cost of a pass, learnt from measured passes: per-layer compute and copy times for `remap.schedule`. Pure.

This module reads no clock: callers measure durations and pass them in, in seconds. One `CostModel` belongs to one
tenant. Compute time depends on the phase and the batch, so it is kept per ("prefill" | "decode", power-of-two bucket of
tokens). Copy time depends only on bytes and on the link, so one estimate of seconds per byte serves all layers. Source:
the "r, c <- EWMA" line of the corrected Oneiros controller. The ratio of copy to compute time decides, so it is
measured and never a constant.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from remap.errors import InvalidArgument, InvalidState

__all__ = ["CLIP", "REPEATS", "BatchTime", "CostModel", "Ewma", "LayerTimes", "Phase", "Range", "bucket_of"]

Phase = Literal["prefill", "decode"]

CLIP = 8.0
"""A sample counts as at most this many times the current estimate ..."""
REPEATS = 3
"""... unless it is at least the third such sample in a row: then the change is real."""
_FADES = 0.98
"""The weight of a measurement of `BatchTime` after another one."""
_SPREAD = 0.02
"""Of the mean: so far must live blocks have been apart, or the line may have any slope."""


def _finite(value: object) -> float | None:
    """The value as a float if it is a finite number >= 0, else None."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        return None
    number = float(value)
    return number if math.isfinite(number) and number >= 0.0 else None


class Ewma:
    """Exponentially weighted mean of durations that survives a clock jump or one hiccup.

    The weight of a sample falls by e every `time_constant` samples. It takes the first sample as it is, and refuses
    negative and non-finite samples (from a clock that jumped back). It clips a sample above `CLIP` times the estimate
    to that value, unless the sample is at least the `REPEATS`-th such in a row.
    """

    __slots__ = ("_gain", "_high_streak", "_samples", "_value")

    def __init__(self, time_constant: float = 16.0) -> None:
        """`time_constant` in samples, > 0."""
        self._gain = -math.expm1(-1.0 / time_constant)
        self._value: float | None = None
        self._samples = self._high_streak = 0

    @property
    def value(self) -> float | None:
        """The estimate, None before the first sample or seed."""
        return self._value

    @property
    def samples(self) -> int:
        """Samples taken, clipped ones included; seeds are not samples."""
        return self._samples

    def seed(self, value: float) -> None:
        """Replace the estimate."""
        self._value = value
        self._high_streak = 0

    def update(self, sample: float) -> bool:
        """Take one sample. False, and no change of the estimate, if it is negative or not finite."""
        number = _finite(sample)
        if number is None:
            return False
        self._samples += 1
        if self._value is None:
            self._value = number
            return True
        ceiling = CLIP * self._value
        if number > ceiling:
            self._high_streak += 1
            if self._high_streak < REPEATS:
                number = ceiling
        else:
            self._high_streak = 0
        self._value += self._gain * (number - self._value)
        return True


@dataclass(frozen=True)
class LayerTimes:
    """Seconds to compute, and to copy in, each of n layers: the input of `remap.schedule`.

    wait_s: seconds that each piece of a copy waits for other tenants' copies (`remap.policy.link`); not in transfer_s.
    alone: the share of compute_s that a pass takes while no other tenant computes, and so none copies.

    Raises InvalidArgument (fields: compute_s, transfer_s) unless both hold n >= 1 finite numbers >= 0.
    """

    compute_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    wait_s: float = 0.0
    alone: float = 1.0

    def __post_init__(self) -> None:
        values = [_finite(value) for value in (*self.compute_s, *self.transfer_s)]
        if len(self.compute_s) != len(self.transfer_s) or not self.compute_s or None in values:
            raise InvalidArgument(
                "compute_s and transfer_s must hold the same number >= 1 of finite seconds >= 0, got lengths "
                f"{len(self.compute_s)} and {len(self.transfer_s)}; nothing changed; correct the measurement",
                compute_s=self.compute_s,
                transfer_s=self.transfer_s,
            )
        object.__setattr__(self, "compute_s", tuple(float(value) for value in self.compute_s))
        object.__setattr__(self, "transfer_s", tuple(float(value) for value in self.transfer_s))


def bucket_of(tokens: int) -> int:
    """The smallest power of two >= tokens, which is at least 1."""
    return 1 << (tokens - 1).bit_length()


class Range:
    """The least and the largest duration of `REPEATS` samples in a row: all three were at most `least`, or at least
    `most`. Before that inf and 0."""

    __slots__ = ("_last", "least", "most")

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=REPEATS)
        self.least, self.most = math.inf, 0.0

    def update(self, sample: float) -> None:
        """Take one sample."""
        self._last.append(sample)
        if len(self._last) == REPEATS:
            self.least = min(self.least, max(self._last))
            self.most = max(self.most, min(self._last))


class CostModel:
    """Estimates of one tenant's times. Only whole passes are measured, so all computed layers count as equally long."""

    def __init__(self, layer_bytes: Iterable[int], computed: range | None = None) -> None:
        """layer_bytes: bytes copied to bring in each layer. computed: the layers that passes compute; None: all."""
        self._layer_bytes = tuple(layer_bytes)
        self._computed = range(len(self._layer_bytes)) if computed is None else computed
        self._compute: dict[tuple[Phase, int], Ewma] = {}  # seconds of a pass
        self._ranges: dict[tuple[Phase, int], Range] = {}
        self._link = Range()  # of seconds per byte
        self._s_per_byte = Ewma()
        if not any(self._layer_bytes):
            self._s_per_byte.seed(0.0)  # nothing is ever copied, so no link will be measured and none is needed

    @property
    def measured(self) -> bool:
        """Whether `estimate` can answer: some computation and the bandwidth are known."""
        return bool(self._compute) and self._s_per_byte.value is not None

    @property
    def passes(self) -> dict[tuple[Phase, int], int]:
        """The number of passes behind each estimate."""
        return {key: bucket.samples for key, bucket in self._compute.items()}

    @property
    def seconds_per_byte(self) -> float | None:
        """The estimate of the link; None before the first copy or calibration."""
        return self._s_per_byte.value

    def calibrate(self, bytes_per_s: float) -> None:
        """Replace the estimate of the link. Raises InvalidArgument (field: bytes_per_s) unless it is finite and > 0."""
        rate = _finite(bytes_per_s)
        if not rate:
            raise InvalidArgument(
                f"bytes_per_s must be finite and > 0, got {bytes_per_s!r}; nothing changed; correct it",
                bytes_per_s=bytes_per_s,
            )
        self._s_per_byte.seed(1.0 / rate)
        self._link.least = 1.0 / rate

    def observe_pass(
        self, phase: Phase, tokens: int, compute_s: float, copy_s: float = 0.0, bytes_copied: int = 0
    ) -> None:
        """Learn from one pass. Ignores values that are negative or not finite.

        compute_s: seconds of the pass's computation WITHOUT stalls. copy_s, bytes_copied: of the copies that ended
        during the pass, the seconds for which the copy engine was busy with them, and their bytes; a pass with none
        says nothing about the link.
        """
        key = phase, bucket_of(tokens)
        bucket = self._compute.get(key) or Ewma()
        if bucket.update(compute_s):
            self._compute[key] = bucket
            self._ranges.setdefault(key, Range()).update(compute_s)
        if bytes_copied and copy_s > 0.0:  # zero seconds for some bytes is a broken timer
            self._s_per_byte.update(copy_s / bytes_copied)
            self._link.update(copy_s / bytes_copied)

    def estimate(self, phase: Phase, tokens: int) -> LayerTimes:
        """Per-layer times of a pass. If the bucket has no data, the phase's nearest bucket answers (on a logarithmic
        scale; the smaller of two, whose computation hides less), else the other phase's nearest.

        Raises InvalidState (fields: phase, tokens) if no observation can answer.
        """
        per_byte = self._s_per_byte.value
        if not self._compute or per_byte is None:
            lacking = "computation" if not self._compute else "bandwidth"
            raise InvalidState(
                f"no {lacking} was observed yet; nothing changed; call calibrate() or observe_pass() first",
                phase=phase,
                tokens=tokens,
            )

        whole = self._compute[self._nearest(phase, tokens)].value or 0.0
        each = 1.0 / max(1, len(self._computed)) * whole
        compute = tuple(each if layer in self._computed else 0.0 for layer in range(len(self._layer_bytes)))
        return LayerTimes(compute, tuple(size * per_byte for size in self._layer_bytes))

    def alone(self, phase: Phase, tokens: int, sharers: int) -> float:
        """The share of such a pass's estimated computation that it takes at least while none of the `sharers` - 1 other
        active tenants computes. Above 0, at most 1.

        A pass beside j others lasts at most j + 1 times as long as alone. So the slowest seen, divided by `sharers`, is a
        lower bound: the pass alone, once a pass beside all others was seen. The quickest seen is an upper bound.
        """
        key = self._nearest(phase, tokens)
        mean, seen = self._compute[key].value or 0.0, self._ranges[key]
        least = min(seen.least, max(mean, seen.most) / sharers)
        return least / mean if 0.0 < least < mean else 1.0

    @property
    def undisturbed_seconds_per_byte(self) -> float | None:
        """The link's quickest: measured copies may have waited for others' copies. None before the first."""
        known = self._s_per_byte.value
        return None if known is None else min(known, self._link.least)

    def _nearest(self, phase: Phase, tokens: int) -> tuple[Phase, int]:
        wanted = bucket_of(tokens).bit_length()

        def distance(known: tuple[Phase, int]) -> tuple[bool, int, int]:
            return known[0] != phase, abs(known[1].bit_length() - wanted), known[1]

        return min(self._compute, key=distance)


class BatchTime:
    """A decode pass by its live KV blocks: least squares of seconds over blocks, the newest measurement counting most.

    A pass reads the weights once and every live block once, and computes for every request: of requests of like length its
    time is a line in the live blocks (Oneiros section 4 has the same two terms). Only the slope is asked for: the time of one
    more block. Old measurements fade, since lengths change.
    """

    def __init__(self) -> None:
        self._count = self._blocks = self._seconds = 0.0
        self._squares = self._products = 0.0  # of the differences from the means
        self._last = (0, 0.0)
        self.slope = 0.0
        """Seconds of one block more, at least 0; 0 while nothing is known."""

    def observe(self, blocks: int, seconds: float) -> None:
        """A pass with `blocks` live blocks computed for `seconds`."""
        self._last = blocks, seconds
        old, self._count = self._count * _FADES, self._count * _FADES + 1.0
        ahead, later = blocks - self._blocks, seconds - self._seconds
        self._blocks += ahead / self._count
        self._seconds += later / self._count
        weight = old / self._count
        self._squares = self._squares * _FADES + weight * ahead * ahead
        self._products = self._products * _FADES + weight * ahead * later
        if self._squares > self._count * (1.0 + _SPREAD * self._blocks) ** 2:
            self.slope = max(0.0, self._products / self._squares)

    def blocks_within(self, seconds: float) -> float:
        """The most live blocks whose pass takes `seconds`, by the slope from the last measurement on; infinite while nothing is
        known."""
        if self.slope <= 0.0:
            return float("inf")
        blocks, last_s = self._last
        return blocks + (seconds - last_s) / self.slope
