"""What KunServe's cluster is asked for: lengths of its three data sets, and arrivals with bursts. Pure.

The paper gives the mean lengths (section 5.1), that requests come twice as fast from 45 s on, that memory is overloaded twice
within 640 s (section 2.2, Figure 2), the second time at about 440 s (Figure 16), and that demand for KV is 47 to 60 % of what
there is in the mean. Decided here: Poisson arrivals, both bursts of BURST_S seconds. `swells` come as BurstGPT's do
when its time is compressed (`sim.loads.BURSTGPT`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from remap_serve.sim.lengths import Quantiles
from remap_serve.sim.loads import BURSTGPT
from remap_serve.sim.workload import Arrivals, Item, Lengths, Load, Lognormal, generate

__all__ = ["BURSTS", "BURST_S", "LENGTHS", "bursts", "swells"]

BURSTS = (45.0, 440.0)
"""When requests begin to come twice as fast."""
BURST_S = 60.0
LONGEST = 1 << 15
"""Tokens of an answer, at most, where answers are made longer: Qwen2.5's context."""

_SHARES = (0.0, 0.1, 0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99, 0.999, 1.0)
# BurstGPT: quantiles of a reconstruction of its first week, scaled to the paper's means. ShareGPT: of its conversations cut to 4K
# tokens, with all turns but the last as the prompt and the last as the answer, weighted so that the means are the paper's.
# LongBench: no lengths were at hand; lognormal, the spread assumed.
LENGTHS: Mapping[str, Lengths] = {
    "burstgpt": Lengths(
        Quantiles(_SHARES, (4, 21, 121, 470, 860, 1110, 1312, 1520, 1825, 2153, 2401, 3978, 4095)),
        Quantiles(_SHARES, (1, 36, 109, 226, 333, 406, 460, 512, 607, 762, 890, 1648, 1757)),
    ),
    "sharegpt-4k": Lengths(
        Quantiles(_SHARES, (4, 347, 1225, 1797, 2002, 2179, 2308, 2522, 2971, 3563, 3904, 4066, 4087)),
        Quantiles(_SHARES, (4, 85, 184, 316, 442, 551, 634, 749, 903, 1071, 1262, 1828, 3493)),
    ),
    "longbench": Lengths(Lognormal(6030, 0.6, 256, 24576), Lognormal(505, 0.5, 16, 2048)),
}


def bursts(
    lengths: str,
    rate: float,
    seconds: float,
    seed: int,
    at: Sequence[float] = BURSTS,
    burst_s: float = BURST_S,
    longer: float = 1.0,
    times: float = 2.0,
) -> tuple[Item, ...]:
    """Requests of these lengths (of LENGTHS; KeyError) at `rate` a second, and `times` that within bursts. longer: times as long
    answers."""
    chosen = LENGTHS[lengths]
    if longer != 1.0:
        chosen = replace(chosen, output=chosen.output.scaled(longer, LONGEST))
    extra = [
        Load("all", Arrivals(rate * (times - 1.0)), chosen, begin, begin + burst_s) for begin in at if begin < seconds
    ]
    return generate([Load("all", Arrivals(rate), chosen), *extra], seconds, seed)


def swells(lengths: str, rate: float, seconds: float, seed: int) -> tuple[Item, ...]:
    """Requests of these lengths (of LENGTHS; KeyError) at `rate` a second in the mean, in swells."""
    return generate([Load("all", BURSTGPT.at(rate), LENGTHS[lengths])], seconds, seed)
