# SPDX-License-Identifier: Apache-2.0
"""Simulated requests: arrivals in bursts and lengths of prompts and answers, for any number of tenants. Pure.

    loads = [Load("chat", Arrivals(rate=2.0, cv=4.0), SHAREGPT.scaled(0.25)), Load("code", Arrivals(rate=0.5), ALPACA)]
    for item in generate(loads, seconds=60, seed=1): ...

Arrivals above a coefficient of variation of 1 are an interrupted Poisson process (a Poisson process that a two-state Markov
chain switches on and off), the simplest that is as bursty as serving traces are: most seconds are empty, and what comes,
comes together. Its gaps have the mean and the coefficient of variation that were asked for, exactly. With the on-rate h,
the rates of leaving on and off w1 and w2, and s = w1 + w2 (derived from the renewal form of the process, Kuczura 1973):

    rate = h w2 / s        cv^2 = 1 + 2 h w1 / s^2        duty = w2 / s

so that s = 2 rate (1 - duty) / (duty (cv^2 - 1)). Speeding up a trace (as Oneiros, section 7.1, does) changes the rate and
leaves cv and duty as they are. At most 1, gaps are gamma distributed (1: Poisson arrivals).

Bursts of one height are too even: the trace that Oneiros replays has seconds with 26 times the mean. With `spread` above 0 a
burst is a row of spells, each with a rate of its own (lognormal). The gaps keep their mean and their cv: with the mean wait
R for the next arrival from a moment of the time axis, cv^2 = 2 rate R - 1 for any stationary process, and with n spells a
burst

    R = A / (duty (1 - n w1 A)) + (1 - duty) / w2        A = the mean over the spells' rates x of 1 / (x + n w1)

which is solved for s by bisection. With spread 0 it is the formula above.

Lengths are lognormal with a given mean, cut to a range, or as `lengths` has them. Every draw depends on the seed and on the
tenant's name alone: the same seed gives the same work, whatever other tenants there are.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from remap.config import invalid
from remap_serve.sim.lengths import Quantiles, Uniform

__all__ = [
    "ALPACA",
    "AZURE_CODE",
    "AZURE_CONVERSATION",
    "SHAREGPT",
    "Arrivals",
    "Item",
    "Lengths",
    "Load",
    "Lognormal",
    "Summary",
    "generate",
    "merge",
    "summary",
]


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise invalid(name, value, "a finite number above 0")


@dataclass(frozen=True)
class Item:
    """One request: which tenant's, when it arrives (seconds from the start), tokens of prompt and answer (at least 1)."""

    tenant: str
    time_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Arrivals:
    """When requests come. rate: requests per second on average. cv: coefficient of variation of the gaps between them.

    duty: share of the time in which anything comes at all. spread: coefficient of variation of the rates of a burst's spells;
    spells: how many of them a burst has on average. These three are of meaning above cv = 1 only. Raises InvalidArgument
    (field).
    """

    rate: float
    cv: float = 1.0
    duty: float = 0.25
    spread: float = 0.0
    spells: float = 1.0

    def __post_init__(self) -> None:
        _positive("rate", self.rate)
        _positive("cv", self.cv)
        if not 0 < self.duty < 1:
            raise invalid("duty", self.duty, "above 0 and below 1")
        if not 0 <= self.spread < math.inf:
            raise invalid("spread", self.spread, "a finite number of at least 0")
        if not 1 <= self.spells < math.inf:
            raise invalid("spells", self.spells, "a finite number of at least 1")

    @property
    def burst_s(self) -> float:
        """Mean length of a burst in seconds; infinite if there are none (cv <= 1)."""
        return 1.0 / ((1.0 - self.duty) * self._switching) if self.cv > 1 else math.inf

    @property
    def silence_s(self) -> float:
        """Mean time between two bursts in seconds; 0 if there are none."""
        return 1.0 / (self.duty * self._switching) if self.cv > 1 else 0.0

    @property
    def burst_rate(self) -> float:
        """Requests per second within a burst, on average."""
        return self.rate / self.duty if self.cv > 1 else self.rate

    @property
    def _switching(self) -> float:
        if self.spread == 0:
            return 2.0 * self.rate * (1.0 - self.duty) / (self.duty * (self.cv * self.cv - 1.0))
        # The process looks the same in any unit of time: solved once, at rate 1.
        return _switching_of_spells(self.cv, self.duty, self.spread, self.spells) * self.rate

    def at(self, rate: float) -> Arrivals:
        """The same pattern sped up or slowed down to `rate`."""
        return replace(self, rate=rate)

    def times(self, seconds: float, rng: random.Random) -> Iterator[float]:
        """Arrival times in [0, seconds), ascending. The process starts in its steady state."""
        if self.cv <= 1:
            shape = 1.0 / (self.cv * self.cv)
            # The first arrival falls anywhere into its gap, and long gaps are hit more often: the gap that covers time 0 has
            # the shape + 1 (length-biased gamma).
            scale = 1.0 / (self.rate * shape)
            now = rng.random() * rng.gammavariate(shape + 1.0, scale)
            while now < seconds:
                yield now
                now += rng.gammavariate(shape, scale)
            return
        now, on = 0.0, rng.random() < self.duty
        leave_burst, leave_silence = 1.0 / self.burst_s, 1.0 / self.silence_s
        while now < seconds:
            end = now + rng.expovariate(leave_burst if on else leave_silence)
            if on and self.spread > 0:
                yield from self._spells(now, min(end, seconds), leave_burst, rng)
            while on and self.spread == 0:
                now += rng.expovariate(self.burst_rate)
                if now >= min(end, seconds):
                    break
                yield now
            now, on = end, not on

    def _spells(self, now: float, end: float, leave_burst: float, rng: random.Random) -> Iterator[float]:
        """The arrivals of one burst, spell by spell."""
        sigma = math.sqrt(math.log1p(self.spread * self.spread))
        middle = math.log(self.burst_rate) - sigma * sigma / 2.0
        while now < end:
            rate = rng.lognormvariate(middle, sigma)
            change = now + rng.expovariate((self.spells - 1.0) * leave_burst) if self.spells > 1 else end
            while True:
                now += rng.expovariate(rate)
                if now >= min(change, end):
                    break
                yield now
            now = change


@functools.cache
def _switching_of_spells(cv: float, duty: float, spread: float, spells: float) -> float:
    """s = w1 + w2 at rate 1, from the equation in this module's text. R falls as s grows, hence bisection."""
    sigma = math.sqrt(math.log1p(spread * spread))
    places = 256
    normal = statistics.NormalDist()
    rates = [math.exp(sigma * normal.inv_cdf((place + 0.5) / places)) for place in range(places)]
    unit = math.fsum(rates) / places * duty  # the mean rate within a burst is 1 / duty

    def squared(s: float) -> float:
        leave = spells * (1.0 - duty) * s
        a = math.fsum(1.0 / (rate / unit + leave) for rate in rates) / places
        return 2.0 * (a / (duty * (1.0 - leave * a)) + (1.0 - duty) / (duty * s)) - 1.0

    low, high = 1e-12, 1e6
    for _ in range(120):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if squared(middle) > cv * cv else (low, middle)
    return math.sqrt(low * high)


@dataclass(frozen=True)
class Lognormal:
    """Lengths in tokens: lognormal with this mean and this standard deviation of the logarithm, then cut to [least, most].

    The cut lowers the mean where it bites (ShareGPT's prompts: from 161 to 134).
    """

    mean: float
    sigma: float
    least: int = 1
    most: int = 1 << 20

    def __post_init__(self) -> None:
        _positive("mean", self.mean)
        if not 0 <= self.sigma < math.inf:
            raise invalid("sigma", self.sigma, "a finite number of at least 0")
        if not 1 <= self.least <= self.most:
            raise invalid("least", self.least, f"from 1 to most ({self.most})")

    @property
    def cut_mean(self) -> float:
        """The mean after the cut, in closed form (but for rounding to whole tokens)."""
        mu, sigma = math.log(self.mean) - self.sigma * self.sigma / 2.0, self.sigma
        if sigma == 0:
            return max(self.least, min(self.mean, self.most))

        def below(length: int, shift: float = 0.0) -> float:
            return 0.5 * math.erfc(-(math.log(length) - mu - shift) / (sigma * math.sqrt(2.0)))

        inside = self.mean * (below(self.most, sigma * sigma) - below(self.least, sigma * sigma))
        return self.least * below(self.least) + inside + self.most * (1.0 - below(self.most))

    def draw(self, rng: random.Random) -> int:
        """One length."""
        length = rng.lognormvariate(math.log(self.mean) - self.sigma * self.sigma / 2.0, self.sigma)
        return max(self.least, min(round(length), self.most))

    def scaled(self, factor: float, most: int) -> Lognormal:
        """`factor` times as long, the longest `most` tokens."""
        return replace(self, mean=self.mean * factor, least=min(self.least, most), most=most)


@dataclass(frozen=True)
class Lengths:
    """Prompts and answers, independent of each other. total: most tokens of both together; a prompt beyond that is cut.

    Raises InvalidArgument (total) if it is below 2.
    """

    prompt: Lognormal | Quantiles | Uniform
    output: Lognormal | Quantiles | Uniform
    total: int | None = None

    def __post_init__(self) -> None:
        if self.total is not None and self.total < 2:
            raise invalid("total", self.total, "at least 2, or None")

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Tokens of one prompt and of its answer."""
        prompt, output = self.prompt.draw(rng), self.output.draw(rng)
        if self.total is not None and prompt + output > self.total:
            output = min(output, self.total - 1)
            prompt = min(prompt, self.total - output)
        return prompt, output

    def scaled(self, factor: float, *, most: int | None = None) -> Lengths:
        """Both `factor` times as long, the longest `most` tokens: for models that hold less context."""
        _positive("factor", factor)

        def top(lengths: Lognormal | Quantiles | Uniform) -> int:
            return most if most is not None else max(1, round(lengths.most * factor))

        return Lengths(
            self.prompt.scaled(factor, top(self.prompt)),
            self.output.scaled(factor, top(self.output)),
            None if self.total is None else max(2, round(self.total * factor)),
        )


# Means: vLLM (Kwon et al., SOSP 2023), Figure 11. Spread: prompt of ShareGPT, the standard deviation of the logarithm; the
# others, ln(p90 / p50) / 1.2816 of the data set's own lengths. Cut at 2048 tokens in all, as vLLM's evaluation does.
SHAREGPT = Lengths(Lognormal(161.31, 1.53, 4, 1024), Lognormal(337.99, 0.70, 4, 1024))
"""Chats: short and long prompts, long answers."""
ALPACA = Lengths(Lognormal(19.31, 0.56, 4, 256), Lognormal(58.45, 0.85, 1, 640))
"""Instructions: short prompts, short answers."""

# Azure LLM inference trace 2023 (Splitwise, Patel et al., ISCA 2024), code: rate and cv are those of its gaps. duty, spread and
# spells are fitted to the counts in windows. Trace / this, of 1 s windows: index of dispersion 13.2 / 13.5, empty 73 / 73 %,
# peak over mean 26 / 25 (median of runs as long as the trace), correlation with the next second 0.76 / 0.79, ten seconds on
# 0.26 / 0.23; of 10 s windows: dispersion 71 / 77, empty 56 / 59 %; of 60 s windows: 161 / 165, 21 / 20 %.
AZURE_CODE = Arrivals(rate=2.567, cv=13.15, duty=0.27, spread=0.85, spells=8.0)
"""The replay of Oneiros, section 7.1: silence, then 150 requests at once. `AZURE_CODE.at(rate)` is its rescaling."""
AZURE_CONVERSATION = Arrivals(rate=5.530, cv=1.094, duty=0.6)
"""The calm one: nearly Poisson."""


@dataclass(frozen=True)
class Load:
    """One tenant's requests: when and how long. begin_s, end_s: it is silent before and after (a phase of a longer run)."""

    tenant: str
    arrivals: Arrivals
    lengths: Lengths
    begin_s: float = 0.0
    end_s: float = math.inf


def generate(loads: Iterable[Load], seconds: float, seed: int = 0) -> tuple[Item, ...]:
    """All requests that arrive within `seconds`, in order of time (of equal times: in order of `loads`).

    A tenant may have several loads: peak and off-peak phases, or a mix of kinds. Raises InvalidArgument unless seconds > 0.
    """
    _positive("seconds", seconds)
    streams: list[list[Item]] = []
    seen: dict[str, int] = {}
    for load in loads:
        number = seen[load.tenant] = seen.get(load.tenant, -1) + 1
        when, what = (random.Random(f"{seed}:{load.tenant}:{number}:{purpose}") for purpose in ("when", "what"))
        length = min(seconds, load.end_s) - load.begin_s
        times = load.arrivals.times(length, when) if length > 0 else ()
        streams.append([Item(load.tenant, load.begin_s + time, *load.lengths.draw(what)) for time in times])
    return merge(*streams)


def merge(*streams: Iterable[Item]) -> tuple[Item, ...]:
    """Several streams, each ascending in time, as one. Equal times keep the order of the arguments."""
    return tuple(heapq.merge(*streams, key=lambda item: item.time_s))


@dataclass(frozen=True)
class Summary:
    """The figures of a stream of requests. cv: of the gaps. empty_share: of whole 1 s windows from 0 to the last arrival."""

    requests: int
    rate: float
    cv: float
    peak_rate: float  # most arrivals in a 1 s window
    empty_share: float
    mean_prompt: float
    mean_output: float


def summary(items: Sequence[Item]) -> Summary:
    """Of one tenant's or a merged stream, in order of time. All zero for fewer than two items."""
    if len(items) < 2:
        return Summary(len(items), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    gaps = [b.time_s - a.time_s for a, b in zip(items, items[1:], strict=False)]
    mean = math.fsum(gaps) / len(gaps)
    variance = math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    windows = [0] * (int(items[-1].time_s) + 1)
    for item in items:
        windows[int(item.time_s)] += 1
    return Summary(
        requests=len(items),
        rate=1.0 / mean if mean > 0 else math.inf,
        cv=math.sqrt(variance) / mean if mean > 0 else 0.0,
        peak_rate=float(max(windows)),
        empty_share=windows.count(0) / len(windows),
        mean_prompt=math.fsum(item.prompt_tokens for item in items) / len(items),
        mean_output=math.fsum(item.output_tokens for item in items) / len(items),
    )
