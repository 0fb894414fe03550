"""What a pass costs, learnt from what passes took: per-layer compute and copy times for `remap.schedule`. Pure.

No clock is read here: durations are measured elsewhere and passed in, in seconds. One `CostModel` belongs to one
tenant. Compute time depends on the phase and the batch, so it is kept per ("prefill" | "decode", power-of-two bucket of
tokens); copy time depends only on bytes and on the link, so one estimate of seconds per byte serves all layers.
Source: the "r, c <- EWMA" line of the corrected Oneiros controller; the ratio of copy to compute time decides, so it is
measured and never a constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from remap.errors import InvalidArgument, InvalidState

__all__ = ["CLIP", "REPEATS", "BucketCost", "CostModel", "CostSnapshot", "Ewma", "LayerTimes", "Phase", "bucket_of"]

Phase = Literal["prefill", "decode"]
_PHASES: tuple[Phase, ...] = ("prefill", "decode")

CLIP = 8.0
"""A sample counts as at most this many times the current estimate ..."""
REPEATS = 3
"""... unless it is at least the third such sample in a row: then the change is real."""


def _finite(value: object) -> float | None:
    """The value as a float if it is a finite number >= 0, else None."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        return None
    number = float(value)
    return number if math.isfinite(number) and number >= 0.0 else None


class Ewma:
    """Exponentially weighted mean of durations that survives a clock jump or one hiccup.

    The weight of a sample falls by e every `time_constant` samples. The first sample is taken as it is. Negative and
    non-finite samples (a clock that jumped back) are refused. A sample above `CLIP` times the estimate is clipped to
    that, unless it is at least the `REPEATS`-th such sample in a row.
    """

    __slots__ = ("_gain", "_high_streak", "_rejected", "_samples", "_value")

    def __init__(self, time_constant: float = 16.0, value: float | None = None) -> None:
        """`time_constant` in samples, > 0. `value`: a starting estimate. Raises InvalidArgument for bad numbers."""
        constant = _finite(time_constant)
        if not constant:
            raise InvalidArgument(
                f"time_constant must be finite and > 0 (samples), got {time_constant!r}; nothing changed; correct it",
                time_constant=time_constant,
            )
        self._gain = -math.expm1(-1.0 / constant)
        self._value: float | None = None
        self._samples = self._rejected = self._high_streak = 0
        if value is not None:
            self.seed(value)

    @property
    def value(self) -> float | None:
        """The estimate, None before the first sample or seed."""
        return self._value

    @property
    def samples(self) -> int:
        """Samples taken, clipped ones included; seeds are not samples."""
        return self._samples

    @property
    def rejected(self) -> int:
        """Samples refused because they were negative or not finite."""
        return self._rejected

    def seed(self, value: float) -> None:
        """Replace the estimate. Raises InvalidArgument (field: value) unless it is finite and >= 0."""
        number = _finite(value)
        if number is None:
            raise InvalidArgument(
                f"an estimate must be finite and >= 0, got {value!r}; the old one stays; correct it", value=value
            )
        self._value = number
        self._high_streak = 0

    def continue_streak(self, other: Ewma) -> None:
        """Samples above the ceiling in a row count on from where `other` is."""
        self._high_streak = other._high_streak

    def update(self, sample: float) -> bool:
        """Take one sample. False, and no change of the estimate, if it is negative or not finite."""
        number = _finite(sample)
        if number is None:
            self._rejected += 1
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

    Raises InvalidArgument (fields: compute_s, transfer_s) unless both hold n >= 1 finite numbers >= 0.
    """

    compute_s: tuple[float, ...]
    transfer_s: tuple[float, ...]

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

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.compute_s)


@dataclass(frozen=True)
class BucketCost:
    """The estimate of one (phase, bucket): seconds of each layer, and the passes it rests on (0: calibrated only)."""

    compute_s: tuple[float, ...]
    passes: int


@dataclass(frozen=True)
class CostSnapshot:
    """What a `CostModel` knew at one moment. Later observations do not change it.

    buckets: (phase, bucket) -> BucketCost. bytes_per_s: None before any copy was seen. rejected: observations refused
    because a duration was negative or not finite.
    """

    layer_bytes: tuple[int, ...]
    buckets: Mapping[tuple[Phase, int], BucketCost]
    bytes_per_s: float | None
    copies: int
    bytes_copied: int
    rejected: int


def bucket_of(tokens: int) -> int:
    """The smallest power of two >= tokens. Raises InvalidArgument (field: tokens) unless tokens is an integer >= 1."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise InvalidArgument(
            f"tokens must be an integer >= 1, got {tokens!r}; nothing changed; give the batch's tokens", tokens=tokens
        )
    return 1 << (tokens - 1).bit_length()


class _Bucket:
    """The estimate of one (phase, bucket of tokens).

    Passes are nearly always known as a whole. While that is so, all layers move alike: each keeps its share, and one estimate
    of the sum stands for all of them, so that learning costs the same however many layers there are. From the first pass that
    is known layer by layer, each layer has an estimate of its own.
    """

    __slots__ = ("_constant", "_layers", "_shares", "_whole", "passes")

    def __init__(self, constant: float, seconds: Sequence[float] | None = None, layers: int = 0) -> None:
        """seconds: of each layer, to start from; otherwise nothing is known of `layers` layers."""
        self._constant = constant
        self.passes = 0
        self._layers: list[Ewma] | None = None
        self._whole = Ewma(constant)
        self._shares = [1.0 / layers] * layers if layers else []
        if seconds is not None:
            whole = math.fsum(seconds)
            self._shares = [value / whole if whole > 0.0 else 1.0 / len(seconds) for value in seconds]
            self._whole.seed(whole)

    def values(self) -> tuple[float, ...]:
        if self._layers is not None:
            return tuple(layer.value or 0.0 for layer in self._layers)
        whole = self._whole.value or 0.0
        return tuple([share * whole for share in self._shares])

    def update_whole(self, seconds: float) -> None:
        if self._layers is None:
            self._whole.update(seconds)
            return
        values = self.values()
        whole = math.fsum(values)
        for layer, value in zip(self._layers, values, strict=True):
            layer.update(seconds * value / whole if whole > 0.0 else seconds / len(values))

    def update_layers(self, seconds: Sequence[float]) -> None:
        if self._layers is None:
            known = self._whole.samples > 0 or self._whole.value is not None
            self._layers = [Ewma(self._constant, value if known else None) for value in self.values()]
            for layer in self._layers:
                layer.continue_streak(self._whole)
        for layer, value in zip(self._layers, seconds, strict=True):
            layer.update(value)


class CostModel:
    """Estimates of one tenant's per-layer times. Not thread-safe; `snapshot()` and `LayerTimes` are frozen."""

    def __init__(self, layer_bytes: Iterable[int], time_constant: float = 16.0) -> None:
        """layer_bytes: bytes copied to bring in each layer. time_constant: of the estimates, in passes.

        Raises InvalidArgument (fields: layer_bytes; time_constant).
        """
        self._layer_bytes = tuple(layer_bytes)
        if not self._layer_bytes or any(
            isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in self._layer_bytes
        ):
            raise InvalidArgument(
                "layer_bytes must hold an integer >= 0 for each of at least one layer; nothing changed; correct it",
                layer_bytes=self._layer_bytes,
            )
        self._time_constant = time_constant
        self._compute: dict[tuple[Phase, int], _Bucket] = {}
        self._s_per_byte = Ewma(time_constant)
        if not any(self._layer_bytes):
            self._s_per_byte.seed(0.0)  # nothing is ever copied, so no link will be measured and none is needed
        self._copies = self._bytes = self._rejected = 0

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self._layer_bytes)

    @property
    def measured(self) -> bool:
        """Whether `estimate` can answer: some computation and the bandwidth are known."""
        return bool(self._compute) and self._s_per_byte.value is not None

    @property
    def seconds_per_byte(self) -> float | None:
        """The estimate of the link; None before a copy was seen or calibrated."""
        return self._s_per_byte.value

    def calibrate(
        self,
        phase: Phase | None = None,
        tokens: int | None = None,
        compute_s: float | Sequence[float] | None = None,
        bytes_per_s: float | None = None,
    ) -> None:
        """Replace estimates by known ones: a bucket's compute time (seconds a pass, or of each layer), the bandwidth.

        Give phase, tokens and compute_s together, or bytes_per_s, or all. Raises InvalidArgument and changes nothing
        if a number is not finite, is negative (or zero, for bytes_per_s), or an argument is missing.
        """
        given = [value is not None for value in (phase, tokens, compute_s)]
        if any(given) != all(given) or not (any(given) or bytes_per_s is not None):
            raise InvalidArgument(
                "calibrate needs phase, tokens and compute_s together, or bytes_per_s; nothing changed; add the others",
                phase=phase,
                tokens=tokens,
            )
        if bytes_per_s is not None and not _finite(bytes_per_s):
            raise InvalidArgument(
                f"bytes_per_s must be finite and > 0, got {bytes_per_s!r}; nothing changed; correct it",
                bytes_per_s=bytes_per_s,
            )
        if phase is not None and tokens is not None and compute_s is not None:
            key = self._key(phase, tokens)
            given_s = self._checked(compute_s)
            if given_s is None:
                raise InvalidArgument(
                    "compute_s must be finite and >= 0; nothing changed; correct the measurement", compute_s=compute_s
                )
            seconds = given_s if isinstance(given_s, list) else self._shared_out(key, given_s)
            self._compute[key] = _Bucket(self._time_constant, seconds)
        if bytes_per_s is not None:
            self._s_per_byte.seed(1.0 / float(bytes_per_s))

    def observe_pass(
        self,
        phase: Phase,
        tokens: int,
        compute_s: float | Sequence[float],
        copies: int = 0,
        copy_s: float = 0.0,
        bytes_copied: int = 0,
    ) -> bool:
        """Learn from one pass. False if a duration was negative or not finite (that half of the observation is lost).

        compute_s: seconds of computation WITHOUT stalls, of the pass or of each layer; a pass's seconds are shared out
        as the bucket's layers have been so far, equally at first. copies, copy_s, bytes_copied: the copies that ended
        during the pass, the seconds for which the copy engine was busy with them, and their bytes; a pass with none
        says nothing about the link.

        Raises InvalidArgument and changes nothing for an unknown phase, tokens < 1, a wrong number of layers, or
        negative copies or bytes_copied.
        """
        key = self._key(phase, tokens)
        for name, count in (("copies", copies), ("bytes_copied", bytes_copied)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise InvalidArgument(
                    f"{name} must be an integer >= 0, got {count!r}; nothing changed; correct it", **{name: count}
                )
        seconds = self._checked(compute_s)
        taken = True
        if seconds is None:
            self._rejected += 1
            taken = False
        else:
            bucket = self._compute.get(key)
            if bucket is None:
                bucket = self._compute[key] = _Bucket(self._time_constant, layers=self.layers)
            if isinstance(seconds, list):
                bucket.update_layers(seconds)
            else:
                bucket.update_whole(seconds)
            bucket.passes += 1
        if copies and bytes_copied:
            busy = _finite(copy_s)
            if not busy:  # zero seconds for some bytes is a broken timer too
                self._rejected += 1
                taken = False
            else:
                self._s_per_byte.update(busy / bytes_copied)
                self._copies += copies
                self._bytes += bytes_copied
        return taken

    def estimate(self, phase: Phase, tokens: int) -> LayerTimes:
        """Per-layer times of a pass. Without data for the bucket the nearest one of the phase answers (on a logarithmic
        scale; the smaller of two, whose computation hides less), else the nearest one of the other phase.

        Raises InvalidState if nothing was observed or calibrated that can answer (fields: phase, tokens), and
        InvalidArgument as `observe_pass` does.
        """
        key = self._key(phase, tokens)
        if not self._compute or self._s_per_byte.value is None:
            lacking = "computation" if not self._compute else "bandwidth"
            raise InvalidState(
                f"no {lacking} was observed yet; nothing changed; call calibrate() or observe_pass() first",
                phase=phase,
                tokens=tokens,
            )

        def distance(known: tuple[Phase, int]) -> tuple[bool, int, int]:
            return known[0] != phase, abs(known[1].bit_length() - key[1].bit_length()), known[1]

        compute = self._compute[min(self._compute, key=distance)].values()
        per_byte = self._s_per_byte.value
        return LayerTimes(compute, tuple(size * per_byte for size in self._layer_bytes))

    def snapshot(self) -> CostSnapshot:
        """A frozen copy of everything known now."""
        per_byte = self._s_per_byte.value
        return CostSnapshot(
            layer_bytes=self._layer_bytes,
            buckets=MappingProxyType({key: BucketCost(b.values(), b.passes) for key, b in self._compute.items()}),
            bytes_per_s=1.0 / per_byte if per_byte else None,
            copies=self._copies,
            bytes_copied=self._bytes,
            rejected=self._rejected,
        )

    def _key(self, phase: Phase, tokens: int) -> tuple[Phase, int]:
        if phase not in _PHASES:
            raise InvalidArgument(
                f"phase must be one of {_PHASES}, got {phase!r}; nothing changed; pick one", phase=phase
            )
        return phase, bucket_of(tokens)

    def _checked(self, compute_s: float | Sequence[float]) -> list[float] | float | None:
        """Seconds of each layer, or of all of them; None if any is negative or not finite."""
        if not isinstance(compute_s, Iterable):
            return _finite(compute_s)
        given = [_finite(value) for value in compute_s]
        if len(given) != self.layers:
            raise InvalidArgument(
                f"compute_s must be one number or {self.layers} of them, got {len(given)}; nothing changed; "
                "give one for each layer",
                layers=self.layers,
                given=len(given),
            )
        return None if None in given else [value for value in given if value is not None]

    def _shared_out(self, key: tuple[Phase, int], total: float) -> list[float]:
        """A pass's seconds as the bucket's layers have shared them so far, equally at first."""
        shares = self._compute[key].values() if key in self._compute else ()
        whole = math.fsum(shares)
        if whole <= 0.0:
            return [total / self.layers] * self.layers
        return [total * share / whole for share in shares]
