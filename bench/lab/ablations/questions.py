"""What `bench.lab ablations` compares: for each question two or three ways to serve the same arrivals, and what the paper says.

Sources of the figures: Oneiros, sections 7.2 to 7.6. Its machine copies a layer about ten times slower than it reads one; the
report tells the ratio of the machine it ran on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from remap_serve.cli.shared_world import SharedWorld, Wiring
from remap_serve.sim.workload import ALPACA, SHAREGPT, Arrivals, Lengths, Load

__all__ = ["ABLATIONS", "Ablation", "Claim", "Side", "select"]

# Demand decides alone: no bound on the stall.
UNBOUNDED = 1e6
# Bursts as they are in Oneiros' trace, in shorter runs: a dozen requests at once, then nothing.
BURSTY = Arrivals(rate=1.0, cv=4.0, duty=0.25)


@dataclass(frozen=True)
class Side:
    """One way to serve."""

    name: str
    wiring: Wiring


@dataclass(frozen=True)
class Claim:
    """The paper's figure: `metric` of side `test` against side `base` changes by so much (-0.22: 22 % less).

    change None: the paper gives a direction only, in `sign`.
    """

    metric: str
    base: str
    test: str
    where: str
    change: float | None
    sign: int = 0

    @property
    def direction(self) -> int:
        """-1: less, 1: more."""
        return self.sign if self.change is None else (1 if self.change > 0 else -1)


@dataclass(frozen=True)
class Ablation:
    """One question. loads(world, rate, seconds): who asks for what, if `rate` requests a second of ALPACA's lengths, of all
    tenants together, keep the machine busy. load: share of that rate. tenants: the first so many models, None for all.
    max_num_seqs: requests that run at once, None for the preset's. quiet_from: share of the run after which the off-peak figures
    count.
    """

    name: str
    question: str
    sides: tuple[Side, ...]
    claims: tuple[Claim, ...]
    loads: Callable[[SharedWorld, float, float], list[Load]]
    mode: str = "temporal"
    tenants: int | None = None
    load: float = 0.8
    max_num_seqs: int | None = None
    quiet_from: float | None = None


def _remap(partial: bool | None = None, **settings: object) -> Wiring:
    """What weights are worth by themselves: each tenant keeps its KV, and nothing goes to host memory."""
    return Wiring(controller=MappingProxyType(settings), partial=partial, own=1.0, swap=False)


RECOMPUTE = Side("recompute", Wiring())
REMAP = Side("remap", _remap())
# Enough requests at once that one tenant alone has to give a good part of its layers.
CROWD = 40


def _mix(world: SharedWorld, rate: float, seconds: float) -> list[Load]:
    """As many tokens a second for each tenant; chats for the first and every other one, instructions for the rest."""
    made = []
    for index, name in enumerate(world.names):
        lengths = world.lengths(ALPACA, 1.0) if index % 2 else _chat(world)
        made.append(Load(name, BURSTY.at(rate / len(world.names) * _relative(world, lengths)), lengths))
    return made


def _relative(world: SharedWorld, lengths: Lengths) -> float:
    """How many requests of these lengths ask for as many tokens as one of ALPACA's."""
    return world.lengths(ALPACA, 1.0).output.cut_mean / lengths.output.cut_mean


def _chat(world: SharedWorld) -> Lengths:
    return world.lengths(SHAREGPT, 0.3)


def _chats(world: SharedWorld, rate: float, seconds: float) -> list[Load]:
    """One burst after the other of chats, whose answers need the most memory."""
    chat = _chat(world)
    fewer = rate / len(world.names) * _relative(world, chat)
    return [Load(name, BURSTY.at(fewer), chat) for name in world.names]


def _phases(world: SharedWorld, rate: float, seconds: float) -> list[Load]:
    """Each tenant in its own part of the time, as if it were alone: bursts of chats, while the other models are idle."""
    chat = _chat(world)
    part = seconds / len(world.names)
    share = rate * _relative(world, chat)
    return [
        Load(name, BURSTY.at(share), chat, begin_s=index * part, end_s=(index + 0.6) * part)
        for index, name in enumerate(world.names)
    ]


def _unequal(world: SharedWorld, rate: float, seconds: float) -> list[Load]:
    """The first tenant asks four times as often as each of the others."""
    parts = [4.0] + [1.0] * (len(world.names) - 1)
    return [
        Load(name, BURSTY.at(rate * part / sum(parts)), world.lengths(ALPACA, 1.0))
        for name, part in zip(world.names, parts, strict=True)
    ]


def _long_and_short(world: SharedWorld, rate: float, seconds: float) -> list[Load]:
    """Long requests for the first tenant, short ones for the others: 1734 to 634 tokens, as in the paper."""
    share = rate / len(world.names)
    made = []
    for index, name in enumerate(world.names):
        lengths = world.lengths(ALPACA, 1734 / 634 if index == 0 else 1.0)
        made.append(Load(name, BURSTY.at(share * _relative(world, lengths)), lengths))
    return made


def _peak_then_quiet(world: SharedWorld, rate: float, seconds: float) -> list[Load]:
    """A peak, then a fifth of its rate (section 7.6.1)."""
    end = 0.4 * seconds
    lengths = _chat(world)
    share = rate / len(world.names) * _relative(world, lengths)
    made = []
    for name in world.names:
        made.append(Load(name, Arrivals(2.0 * share), lengths, end_s=end))
        made.append(Load(name, Arrivals(0.4 * share), lengths, begin_s=end))
    return made


def _against_recompute(where: str, tbt: float, ttft: float, rate: float) -> tuple[Claim, ...]:
    return (
        Claim("tbt_p99_s", "recompute", "remap", where, tbt),
        Claim("ttft_p99_s", "recompute", "remap", where, ttft),
        Claim("tokens_per_s", "recompute", "remap", where, rate),
    )


_CAPS = (
    Side("not capped", _remap(slowdown=UNBOUNDED)),
    Side("capped", _remap(slowdown=0.02)),
)

ABLATIONS = (
    Ablation(
        "recompute",
        "Three tenants in turns: does remapping beat preemption by recompute?",
        (RECOMPUTE, REMAP),
        _against_recompute("Fig. 8 (C1)", -0.544, -0.967, 0.399),
        _mix,
    ),
    Ablation(
        "idle-models",
        "Each of three models is busy in its own part of the time: what do the idle ones' layers give the busy one?",
        (RECOMPUTE, REMAP),
        _against_recompute("Fig. 8 (C1)", -0.544, -0.967, 0.399),
        _phases,
        max_num_seqs=CROWD,
        load=1.0,
    ),
    Ablation(
        "recompute-unequal",
        "The same with unequal rates.",
        (RECOMPUTE, REMAP),
        _against_recompute("Fig. 9 (C2)", -0.825, -0.993, 0.867),
        _unequal,
    ),
    Ablation(
        "recompute-mixed",
        "The same with long requests for one tenant and short ones for the others.",
        (RECOMPUTE, REMAP),
        _against_recompute("Fig. 10 (C2)", -0.571, -0.981, 0.656),
        _long_and_short,
    ),
    Ablation(
        "recompute-spatial",
        "Three tenants side by side: does remapping beat preemption by recompute?",
        (RECOMPUTE, REMAP),
        _against_recompute("Fig. 12 (C1, MPS)", -0.655, -0.207, 0.066),
        _mix,
        mode="spatial",
    ),
    Ablation(
        "recompute-single",
        "One tenant alone, whose own layers are all there is to give.",
        (RECOMPUTE, REMAP),
        _against_recompute("Fig. 13 (MIG)", -0.574, -0.348, 0.079),
        _chats,
        mode="spatial",
        tenants=1,
        max_num_seqs=CROWD,
    ),
    Ablation(
        "activation",
        "A turn begins while others' requests live where its layers were: preempt them, or stream these layers meanwhile?",
        (
            Side("preempt", _remap(partial=False)),
            Side("stream", _remap()),
        ),
        (
            # The paper leaves the activation of a model that gave its layers open.
            Claim("tokens_per_s", "preempt", "stream", "derived (the paper leaves it open)", None, 1),
            Claim("recomputed_tokens", "preempt", "stream", "derived (the paper leaves it open)", None, -1),
        ),
        _mix,
    ),
    Ablation(
        "policy",
        "Which inactive tenant gives first: the one used last (MRU, next but all others in round robin) or LRU?",
        (Side("lru", _remap(policy="lru")), Side("mru", _remap(policy="mru"))),
        (
            Claim("ttft_p99_s", "lru", "mru", "Fig. 11 (up to)", -0.22),
            Claim("tbt_p99_s", "lru", "mru", "Fig. 11 (up to)", -0.22),
        ),
        _mix,
    ),
    Ablation(
        "buffers",
        "Streaming through one buffer (m = alpha + 1), through two (m = alpha + 2), or through what fits better?",
        (
            Side("double", _remap(buffers=2, slowdown=0.1)),
            Side("single", _remap(buffers=1, slowdown=0.1)),
            Side("auto", _remap(buffers="auto", slowdown=0.1)),
        ),
        (
            Claim("tokens_per_s", "double", "single", "Fig. 15", -0.127),
            Claim("tokens_per_s", "single", "auto", "Fig. 15", None, 1),
        ),
        _chats,
        mode="spatial",
        tenants=1,
        max_num_seqs=CROWD,
    ),
    Ablation(
        "reversion",
        "After a peak, do layers that move back in pay off? Off-peak figures: arrivals at a fifth of the peak.",
        (Side("stay", _remap(reversion=False, slowdown=0.5)), Side("revert", _remap(slowdown=0.5))),
        (
            Claim("quiet_tbt_p50_s", "stay", "revert", "Fig. 16, 1 RPS", -0.49),
            Claim("tbt_p99_s", "stay", "revert", "Fig. 16, 10 RPS (limited benefit)", None, -1),
        ),
        _peak_then_quiet,
        mode="spatial",
        tenants=1,
        max_num_seqs=CROWD,
        quiet_from=0.4,
    ),
    Ablation(
        "cap",
        "At high load, remapping no more than can be hidden (2 % stall) against as much as demand asks for.",
        _CAPS,
        (
            Claim("tbt_p99_s", "not capped", "capped", "Fig. 17, 10 RPS", -0.58),
            Claim("tbt_p50_s", "not capped", "capped", "Fig. 17, 10 RPS", -0.44),
        ),
        _chats,
        mode="spatial",
        tenants=1,
        max_num_seqs=CROWD,
        load=0.9,
    ),
    Ablation(
        "cap-light",
        "The same at light load, where the paper finds that aggressive remapping helps the tail and costs on average.",
        _CAPS,
        (
            Claim("tbt_p99_s", "not capped", "capped", "Fig. 17, 1 RPS", None, 1),
            Claim("tbt_mean_s", "not capped", "capped", "Fig. 17, 1 RPS", None, -1),
        ),
        _chats,
        mode="spatial",
        tenants=1,
        max_num_seqs=CROWD,
        load=0.25,
    ),
    Ablation(
        "selection",
        "Which layers an active tenant streams: evenly spaced, nested sets, or the same slice of every layer?",
        (
            Side("uniform", _remap(selection="uniform")),
            Side("nested", _remap(selection="nested")),
            Side("slices", _remap(selection="slices")),
        ),
        (
            # The paper has uniform sets only; that slices hide more and nested sets reload less is derived.
            Claim("tokens_per_s", "uniform", "nested", "derived (section 5.2 has uniform only)", None, 1),
            Claim("tokens_per_s", "uniform", "slices", "derived (section 5.2 has uniform only)", None, 1),
        ),
        _chats,
        mode="spatial",
        tenants=1,
        max_num_seqs=CROWD,
    ),
    Ablation(
        "static",
        "A fixed share of the layers remapped from the start against demand and measurement deciding.",
        (
            Side("static 10 %", Wiring(by_hand=0.1)),
            Side("static 33 %", Wiring(by_hand=0.33)),
            Side("dynamic", _remap()),
        ),
        (
            Claim("ttft_p99_s", "static 10 %", "dynamic", "section 7.6", None, -1),
            Claim("tbt_p50_s", "static 33 %", "dynamic", "section 7.6", None, -1),
        ),
        _chats,
        mode="spatial",
        tenants=1,
        max_num_seqs=CROWD,
    ),
)


def select(names: list[str]) -> tuple[Ablation, ...]:
    """The ablations of these names, in their own order; all of them for none. Raises InvalidArgument for an unknown name."""
    from remap.errors import InvalidArgument

    known = [one.name for one in ABLATIONS]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise InvalidArgument(
            f"no ablation {unknown[0]!r}, there are {', '.join(known)}; nothing was run", ablation=unknown[0]
        )
    return tuple(one for one in ABLATIONS if not names or one.name in names)
