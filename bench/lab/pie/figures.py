"""What `bench.lab pie` runs, and how the figures of the paper are reckoned from it. Pure description.

A place is a load and its rate, as a share of c: what `recompute` serves a second of that load when all requests are
there at once. The paper's text gives neither its rates nor the KV of Figure 6 but for OPT-13B; those are 3 GB here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.lab.paper.experiment_list import KV_STREAM, MANY
from bench.lab.paper.experiments import BASELINE, IDEAL, Panel
from bench.lab.pie_events import ANYTIME, PREFIX
from bench.lab.seeds import Point

from remap.policy.hardware import model
from remap_serve.sim.serving import Setup

__all__ = [
    *(
        "ADAPTIVE",
        "ALL",
        "CLAIMS",
        "CLOSED_FORM",
        "EXPANSIONS",
        "FIGURES",
        "FLEXGEN",
        "KV_ONLY",
        "NOT_SIMULATED",
        "PIE",
    ),
    *("Claim", "Figure", "Place", "anytime_of", "closed_form_of", "gain", "latency_s"),
]

EXPANSIONS = tuple(f"{PREFIX}:{value}" for value in (1.2, 1.4, 1.6, 1.8, 2.0, 2.2))
"""Fixed expansions of Pie; 1.0 is `recompute`."""
KV_ONLY = KV_STREAM
"""Of the library only what Pie has too: complete blocks of KV stream from host memory, weights stay."""
PIE, CLOSED_FORM = PREFIX, "pie"
"""Event by event, deciding at layer starts alone, and `remap_serve.sim`'s closed form."""
SWAP = "remap:weights+swap"
RATES = (BASELINE, PIE, CLOSED_FORM, KV_ONLY, SWAP, IDEAL)
ADAPTIVE = (BASELINE, PIE, ANYTIME, *RATES[2:])


def closed_form_of(policy: str) -> str:
    """The same policy of Pie in closed form."""
    return policy.replace(PIE, CLOSED_FORM, 1)


def anytime_of(policy: str) -> str:
    """The same policy of Pie, deciding when copies end, too."""
    return policy.replace(PIE, ANYTIME, 1)


CLOSED, AT_ANY_TIME = (tuple(map(of, EXPANSIONS)) for of in (closed_form_of, anytime_of))
FIXED = (BASELINE, *EXPANSIONS, *CLOSED, *ADAPTIVE[1:])
ALL = (*FIXED, *AT_ANY_TIME)

Place = tuple[Panel, float]
At = Callable[[Panel, float, str], Point]
"""The point of one seed. Raises KeyError where it was not run."""


def _panel(model: str, lengths: str, gigabytes: int, like: str = "") -> Panel:
    name = {"alpaca": "Alpaca", "sharegpt": "ShareGPT"}[lengths]
    return Panel(
        f"{model} {name}, KV {gigabytes} GB",
        model,
        (lengths,),
        arrivals="poisson",
        kv_bytes=gigabytes * 10**9,
        like=like,
        factors=(),  # a place names its own
        requests=MANY if lengths == "alpaca" else 1.0,
    )


def _sizes(smallest: Panel) -> tuple[Panel, ...]:
    """The same load with 3 to 12 GB of KV. All sizes get the requests of the smallest one."""
    (lengths,) = smallest.lengths
    return (smallest, *(_panel(smallest.tenants, lengths, size, smallest.name) for size in (5, 7, 9, 12)))


PIE_30 = tuple(_panel("OPT-30b", lengths, 3) for lengths in ("alpaca", "sharegpt"))
PIE_LLAMA = _panel("Llama-2-13b", "alpaca", 3)
SIZES_ALPACA, SIZES_CHAT = (_sizes(_panel("OPT-13b", lengths, 3)) for lengths in ("alpaca", "sharegpt"))
PIE_13, PIE_13_7 = SIZES_CHAT[0], SIZES_CHAT[2]

FULL = 3.0
"""Times c where the figure is of a full memory: no policy can serve more than three times what `recompute` does."""
_6: tuple[Place, ...] = tuple((panel, FULL) for panel in (*PIE_30, PIE_13, PIE_13_7, PIE_LLAMA))
_7: tuple[Place, ...] = tuple((panel, FULL) for panel in (*SIZES_ALPACA, *SIZES_CHAT))
_8: tuple[Place, ...] = tuple((panel, factor) for panel in PIE_30 for factor in (1.0, 2.0, FULL))
_9: tuple[Place, ...] = ((PIE_13, FULL),)


@dataclass(frozen=True)
class Figure:
    """One figure of the paper: the places where it is simulated, and the policies there. shown: has a table of its own."""

    number: int
    title: str
    places: tuple[Place, ...]
    policies: tuple[str, ...] = FIXED
    shown: bool = True


FIGURES = (
    Figure(6, "throughput against the expansion", _6),
    Figure(7, "throughput from 3 to 12 GB of KV", _7, ADAPTIVE),
    Figure(8, "throughput over the request rate", _8, RATES),
    Figure(9, "the adaptive expansion, and latency", _9),
    Figure(6, "other readings of Pie, where copies bind", _6[2:], ALL, shown=False),
)


def gain(at: At, places: tuple[Place, ...], policies: tuple[str, ...]) -> float:
    """tokens/s, `recompute` = 1: the most over places and policies."""
    return max(
        at(panel, factor, policy)["tokens_per_s"] / at(panel, factor, BASELINE)["tokens_per_s"]
        for panel, factor in places
        for policy in policies
    )


def latency_s(point: Point) -> float:
    """Seconds of a token, queueing included: all that requests took by all tokens of answers (Pie, section 5.1)."""
    return point["before_first_s"] + point["after_first_s"]


def _best(at: At, places: tuple[Place, ...], policies: tuple[str, ...]) -> float:
    """The expansion of most tokens/s."""
    ((panel, factor),) = places
    return float(max(policies, key=lambda policy: at(panel, factor, policy)["tokens_per_s"]).partition(":")[2])


def _begins(at: At, places: tuple[Place, ...], policies: tuple[str, ...]) -> float:
    """The lowest rate, requests a second, at which tokens/s are 5 % more than those of `recompute`."""
    rates = [at(*place, BASELINE)["rate"] for place in places if gain(at, (place,), policies) >= 1.05]
    return min(rates, default=float("nan"))


def _less(at: At, places: tuple[Place, ...], policies: tuple[str, ...]) -> float:
    """tokens/s less than those of the best fixed expansion, %."""
    of = {CLOSED_FORM: closed_form_of, ANYTIME: anytime_of}.get(policies[0], str)
    fixed = tuple(map(of, EXPANSIONS))
    return 100.0 * (1.0 - gain(at, places, policies) / gain(at, places, fixed))


def _expansion(at: At, places: tuple[Place, ...], policies: tuple[str, ...]) -> float:
    """The largest expansion that was in use."""
    ((panel, factor),), (policy,) = places, policies
    point = at(panel, factor, policy)
    return point["kv_blocks_peak"] / point["kv_blocks_start"]


def _host_gb(at: At, places: tuple[Place, ...], policies: tuple[str, ...]) -> float:
    """The most KV in host memory, GB: blocks in use beyond those that the device holds, times the bytes of a block."""
    (policy,) = policies
    return max(
        (point["kv_blocks_peak"] - point["kv_blocks_start"])
        * Setup.block_tokens
        * model(panel.tenants).kv_bytes_per_token
        / 1e9
        for panel, factor in places
        for point in (at(panel, factor, policy),)
    )


def _blocked(at: At, places: tuple[Place, ...], policies: tuple[str, ...]) -> float:
    """Latency of a token at an expansion of 2.2, by that at 2.0."""
    ((panel, factor),), (policy,) = places, policies
    return latency_s(at(panel, factor, policy)) / latency_s(at(panel, factor, policy.replace("2.2", "2.0")))


def _sooner(at: At, places: tuple[Place, ...], policies: tuple[str, ...]) -> float:
    """Latency of a token under `recompute`, by this one's."""
    ((panel, factor),), (policy,) = places, policies
    return latency_s(at(panel, factor, BASELINE)) / latency_s(at(panel, factor, policy))


HOW: Mapping[str, tuple[str, Callable[[At, tuple[Place, ...], tuple[str, ...]], float]]] = {
    "gain": ("tokens/s, `recompute` = 1", gain),
    "best": ("expansion of most tokens/s", _best),
    "begins": ("requests/s, the lowest of the rates run at which tokens/s are 5 % more", _begins),
    "less": ("tokens/s less than of the best fixed expansion, %", _less),
    "expansion": ("largest expansion in use", _expansion),
    "host_gb": ("the most KV in host memory, GB", _host_gb),
    "blocked": ("latency of a token at 2.2, by that at 2.0 (above 1: copies hold up)", _blocked),
    "sooner": ("latency of a token under `recompute`, by this one's", _sooner),
}


@dataclass(frozen=True)
class Claim:
    """A figure of the paper (by its id in paper/headlines.json), the places that it is reckoned from, and how. pie: the
    policies of Pie that it is of, of several the best. ours: whether the library has the like."""

    headline: str
    how: str
    places: tuple[Place, ...]
    pie: tuple[str, ...] = (PIE,)
    ours: bool = True

    @property
    def about(self) -> str:
        return HOW[self.how][0]

    def of(self, at: At, policies: tuple[str, ...]) -> float:
        """Of one seed. Raises KeyError where a run is missing."""
        return HOW[self.how][1](at, self.places, policies)


CLAIMS = (
    Claim("pie-01", "gain", _6[1:2], EXPANSIONS),
    Claim("pie-02", "gain", _6[:1], EXPANSIONS),
    Claim("pie-03", "gain", _6[2:4], EXPANSIONS),
    Claim("pie-04", "gain", _6[4:], EXPANSIONS),
    Claim("pie-05", "best", _6[2:3], EXPANSIONS, ours=False),
    Claim("pie-06", "best", _6[3:4], EXPANSIONS, ours=False),
    Claim("pie-08", "gain", _7[:5]),
    Claim("pie-09", "gain", _7[5:]),
    Claim("pie-10", "gain", (_7[4], _7[9])),
    Claim("pie-11", "gain", _8[:3]),
    Claim("pie-12", "gain", _8[3:]),
    Claim("pie-13", "begins", _8[:3]),
    Claim("pie-14", "begins", _8[3:]),
    Claim("pie-15", "less", _9),
    Claim("pie-16", "expansion", _9, ours=False),
    Claim("pie-17", "blocked", _9, EXPANSIONS[-1:], ours=False),
    Claim("pie-18", "sooner", _9),
    Claim("pie-22", "host_gb", (*_6, *_7, *_8), ours=False),
)
NOT_SIMULATED = {
    "pie-07": "a saving of memory at equal throughput, of no one configuration; Figure 7 compares the sizes",
}
"""By id in paper/headlines.json: why."""
FLEXGEN: Mapping[str, Place] = {"pie-19": _6[0], "pie-20": _6[1]}
"""By id: where Pie stands beside FlexGen (flexgen.py)."""
