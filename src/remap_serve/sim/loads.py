# SPDX-License-Identifier: Apache-2.0
"""Names of arrivals and lengths to requests: what `remap simulate` serves. Pure.

    load(["a", "b"], requests=4000, rate=4.0, arrivals="azure-code", lengths=("sharegpt", "alpaca"), seed=1)

arrivals   azure-code, azure-conv, poisson, bursty, bursty:CV, bursty:CV:DUTY, burstgpt-like, or a CSV file (.gz or not) with
           the column arrival_s
lengths    sharegpt, alpaca, long, short, fixed:IN:OUT, or a CSV file with input_tokens and output_tokens

Of R requests at a rate of r in all, a tenant with the share s of the rate has s R (whole numbers that add up to R), and they
come within R / r seconds. Time is compressed or stretched so that every run has exactly the requested rate, as Oneiros
rescales its trace. A faster run of a seed is the same pattern, compressed.

A file of arrivals is a ring: tenants that share one begin at evenly spaced rows, and rows beyond the end go on at the
beginning. Lengths of a file are dealt in an order that the seed shuffles, each row once before any row twice; but if
arrivals and lengths are the same file, every arrival keeps the lengths of its own row (Oneiros uses two files).
"""

from __future__ import annotations

import csv
import gzip
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from remap.errors import InvalidArgument
from remap.policy.near_names import meant, nearest
from remap_serve.sim.lengths import Quantiles, Uniform
from remap_serve.sim.workload import AZURE_CODE, AZURE_CONVERSATION, Arrivals, Item, Lengths, merge

__all__ = [
    "ALPACA_PAPER",
    "ARRIVALS",
    "BURSTGPT",
    "LENGTHS",
    "LONG",
    "SHAREGPT_PAPER",
    "SHORT",
    "arrivals_known",
    "lengths_known",
    "load",
    "per_tenant",
]

# The data sets' own quantiles, with small changes between P50 and P97.5 so that the means are those of the papers (vLLM, Kwon et
# al., SOSP 2023, Figure 11: 161.31 and 337.99, 19.31 and 58.45). ShareGPT as vLLM filters it: fewer than 2048 tokens in all.
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99, 0.999, 1.0)
SHAREGPT_PAPER = Lengths(
    Quantiles(_SHARES, (4, 8, 13, 29, 75, 166, 297, 523, 998, 1275, 1572, 1921, 1993)),
    Quantiles(_SHARES, (4, 59, 148, 286, 412, 513, 593, 702, 844, 1023, 1248, 1727, 2002)),
    total=2047,
)
"""Chats: half of the prompts below 30 tokens, a tenth above 500; long answers."""
ALPACA_PAPER = Lengths(
    Quantiles(_SHARES, (4, 9, 11, 15, 19, 23, 27, 33, 45, 62, 91, 172, 242)),
    Quantiles(_SHARES, (1, 7, 13, 43, 77, 97, 110, 127, 161, 212, 275, 416, 622)),
)
"""Instructions: short prompts, short answers."""

# Oneiros, section 7.2, "Varied Inputs": synthetic requests of 1734 and of 634 tokens on average; it gives neither the spread nor
# how many are the prompt's. Chosen here: answers of 338 tokens on average in both, as ShareGPT's, evenly from half to one and a
# half of that; prompts have the rest, evenly within 10 %. The longest long request then has 2043 tokens (OPT holds 2048).
_ANSWER = Uniform(169, 507)
LONG = Lengths(Uniform(1256, 1536), _ANSWER)
"""Requests of 1734 tokens on average, 1396 of them the prompt's."""
SHORT = Lengths(Uniform(266, 326), _ANSWER)
"""Requests of 634 tokens on average, 296 of them the prompt's."""

# BurstGPT (Wang et al., 2024), the first week, its time compressed 300 times: gaps of cv 5.83; 1 s windows: index of dispersion
# 9.8 / here 10.1, empty 22 / 20 %; 10 s windows: 65 / 71; 60 s windows: 230 / 161 (its days are not in here).
BURSTGPT = Arrivals(rate=9.368, cv=5.83, duty=0.78, spread=0.75, spells=2.0)
"""Long swells rather than short bursts."""

ARRIVALS: Mapping[str, Arrivals] = {
    "azure-code": AZURE_CODE,
    "azure-conv": AZURE_CONVERSATION,
    "poisson": Arrivals(1.0),
    "bursty": Arrivals(1.0, cv=4.0, duty=0.25),
    "burstgpt-like": BURSTGPT,
}
"""Patterns by name; only their shape counts, the rate is the run's."""
LENGTHS: Mapping[str, Lengths] = {"sharegpt": SHAREGPT_PAPER, "alpaca": ALPACA_PAPER, "long": LONG, "short": SHORT}

_TOKENS = ("input_tokens", "output_tokens")


def arrivals_known() -> str:
    """The values of `--arrivals`, in words."""
    return f"{', '.join(ARRIVALS)}, bursty:CV:DUTY, or the path of a .csv or .csv.gz file with arrival_s"


def lengths_known() -> str:
    """The values of `--lengths`, in words."""
    return (
        f"{', '.join(LENGTHS)}, fixed:IN:OUT, or the path of a .csv or .csv.gz file with input_tokens and output_tokens"
    )


_LONGEST_S = 1e10
"""Of a run: a double of this many seconds is exact to 2 us."""


def _unknown(field: str, name: str, known: str) -> InvalidArgument:
    near = meant(nearest(name, ARRIVALS if field == "arrivals" else LENGTHS))
    return InvalidArgument(
        f"{field} {name!r} is not known{near}; there are {known}; nothing was made",
        field=field,
        value=name,
        known=known,
    )


def _is_path(name: str) -> bool:
    return name.endswith((".csv", ".csv.gz"))


def _numbers(field: str, name: str, count: int, known: str) -> list[float]:
    """The numbers behind the first colon of a name, at most `count`."""
    parts = name.split(":")[1:]
    try:
        values = [float(part) for part in parts]
    except ValueError:
        raise _unknown(field, name, known) from None
    if len(values) > count:
        raise _unknown(field, name, known)
    return values


def _arrivals(name: str) -> Arrivals:
    known = arrivals_known()
    if name.startswith("bursty:"):
        cv, duty = [*_numbers("arrivals", name, 2, known), 0.25][:2]
        return Arrivals(1.0, cv=cv, duty=duty)
    if name not in ARRIVALS:
        raise _unknown("arrivals", name, known)
    return ARRIVALS[name]


def _lengths(name: str) -> Lengths:
    known = lengths_known()
    if name.startswith("fixed:"):
        values = _numbers("lengths", name, 2, known)
        if len(values) != 2 or any(not 1 <= value < 1 << 20 or value != int(value) for value in values):
            raise _unknown("lengths", name, known)
        prompt, output = (Uniform(int(value), int(value)) for value in values)
        return Lengths(prompt, output)
    if name not in LENGTHS:
        raise _unknown("lengths", name, known)
    return LENGTHS[name]


def per_tenant(field: str, values: Sequence[str], tenants: Sequence[str]) -> tuple[str, ...]:
    """One value a tenant: those given, or the only one for all. Raises InvalidArgument (field) for any other number."""
    if len(values) not in (1, len(tenants)):
        raise InvalidArgument(
            f"{field} has {len(values)} values for {len(tenants)} tenants ({', '.join(tenants)}); give one for all, or one each; "
            "nothing was made",
            field=field,
            value=tuple(values),
            expected=len(tenants),
        )
    return tuple(values) if len(values) == len(tenants) else tuple(values) * len(tenants)


def _rates(rate: float | Sequence[float], tenants: Sequence[str]) -> tuple[float, ...]:
    """Requests per second of each tenant. One number is the total of all."""
    given = (rate,) if isinstance(rate, (int, float)) else tuple(rate)
    for value in given:
        if not 0 < value < math.inf:
            raise InvalidArgument(
                f"rate must be above 0 and finite, got {value!r}; nothing was made", field="rate", value=value
            )
    if len(given) == 1:
        return (given[0] / len(tenants),) * len(tenants)
    if len(given) != len(tenants):
        raise InvalidArgument(
            f"rate has {len(given)} values for {len(tenants)} tenants ({', '.join(tenants)}); give the total, or one each; "
            "nothing was made",
            field="rate",
            value=given,
            expected=len(tenants),
        )
    return given


def _shares(requests: int, rates: Sequence[float]) -> list[int]:
    """`requests` split in proportion to the rates: whole numbers, the largest remainders (then the first) rounded up."""
    total = math.fsum(rates)
    exact = [requests * rate / total for rate in rates]
    counts = [int(value + 1e-9) for value in exact]
    order = sorted(range(len(rates)), key=lambda place: (counts[place] - exact[place], place))
    for place in order[: requests - sum(counts)]:
        counts[place] += 1
    return counts


def load(
    tenants: Sequence[str],
    *,
    requests: int,
    rate: float | Sequence[float],
    arrivals: str | Sequence[str] = "azure-code",
    lengths: str | Sequence[str] = "sharegpt",
    seed: int = 0,
    context: Mapping[str, int] | None = None,
) -> tuple[Item, ...]:
    """Exactly `requests` requests of all tenants, in order of time; see this module's text for the names.

    rate: requests per second of all tenants together, or one number each. arrivals, lengths: one name for all, or one each.
    context: most tokens of one request, by tenant; longer prompts are cut (the answer keeps its length where it fits). The same
    arguments give the same requests, bit for bit; the seed is that of patterns and lengths, and of the order of a file's
    lengths.

    Raises InvalidArgument (field) for names that are not known, with those that are; for files without the columns or without
    rows; and for numbers out of range. An error on opening a file (FileNotFoundError) is InvalidArgument too.
    """
    if not tenants or len(set(tenants)) != len(tenants):
        raise InvalidArgument(
            f"tenants must be at least one name, each once, got {tuple(tenants)}; nothing was made",
            field="tenants",
            value=tuple(tenants),
        )
    if requests < len(tenants):
        raise InvalidArgument(
            f"requests must be at least one a tenant ({len(tenants)}), got {requests}; nothing was made",
            field="requests",
            value=requests,
        )
    rates = _rates(rate, tenants)
    whens = per_tenant("arrivals", [arrivals] if isinstance(arrivals, str) else arrivals, tenants)
    whats = per_tenant("lengths", [lengths] if isinstance(lengths, str) else lengths, tenants)
    seconds = requests / math.fsum(rates)
    if seconds > _LONGEST_S:
        raise InvalidArgument(
            f"at {math.fsum(rates):g}/s {requests} requests take {seconds:g} s, too long to tell microseconds apart; at most "
            f"{_LONGEST_S:g} s are simulated; nothing was made; give a larger rate",
            field="rate",
            value=rates,
        )
    turns = {name: itertools.count() for name in whens}
    streams = []
    for tenant, count, when, what in zip(tenants, _shares(requests, rates), whens, whats):
        first = 0.0
        rng_when, rng_what = (random.Random(f"{seed}:{tenant}:0:{purpose}") for purpose in ("when", "what"))
        if _is_path(when):
            rows = _times(when)
            first = next(turns[when]) / whens.count(when)
            times = _ring(rows, int(first * len(rows)), count, seconds)
        else:
            times = _drawn(_arrivals(when), count, seconds, rng_when)
        most = None if context is None else context.get(tenant)
        pairs: Iterator[tuple[int, int]]
        if not _is_path(what):
            pairs = _draws(_lengths(what), rng_what)
        elif what == when:
            pairs = itertools.islice(itertools.cycle(_own_pairs(what)), int(first * len(rows)), None)
        else:
            pairs = _dealt(_pairs(what), rng_what)
        if most is not None:
            pairs = (_fit(pair, most) for pair in pairs)
        streams.append([Item(tenant, time, *pair) for time, pair in zip(times, pairs)])
    return merge(*streams)


def _drawn(pattern: Arrivals, count: int, seconds: float, rng: random.Random) -> list[float]:
    """The first `count` arrivals of the pattern, scaled so that the next one would come at `seconds`."""
    times = list(itertools.islice(pattern.at(1.0).times(math.inf, rng), count + 1))
    factor = seconds / times[-1]
    return [time * factor for time in times[:-1]]


def _ring(rows: Sequence[float], first: int, count: int, seconds: float) -> list[float]:
    """`count` arrivals from row `first` on, round and round, scaled so that the next one would come at `seconds`.

    Between the last row and the first lies the mean gap.
    """
    span = rows[-1] - rows[0]
    lap = span + (span / (len(rows) - 1) if len(rows) > 1 and span > 0 else 1.0)
    places = range(first, first + count + 1)
    times = [rows[place % len(rows)] + lap * (place // len(rows)) - rows[first] for place in places]
    factor = seconds / times[-1] if times[-1] > 0 else 0.0
    return [time * factor for time in times[:-1]]


def _draws(lengths: Lengths, rng: random.Random) -> Iterator[tuple[int, int]]:
    while True:
        yield lengths.draw(rng)


def _dealt(pairs: Sequence[tuple[int, int]], rng: random.Random) -> Iterator[tuple[int, int]]:
    """All pairs in a random order, then all in another, without end."""
    while True:
        yield from rng.sample(pairs, len(pairs))


def _fit(pair: tuple[int, int], total: int) -> tuple[int, int]:
    prompt, output = pair
    output = min(output, total - 1)
    return min(prompt, total - output), output


def _rows(path: str, columns: Sequence[str], field: str) -> list[list[float]]:
    opened = gzip.open if path.endswith(".gz") else open
    try:
        with opened(Path(path), "rt", encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            rows = [] if missing else [[float(row[column]) for column in columns] for row in reader]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"{field}: {path} cannot be read ({error}); nothing was made", field=field, value=path
        ) from error
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{field}: {path} has a row that is no number ({error}); nothing was made", field=field, value=path
        ) from error
    if missing or not rows or not all(math.isfinite(value) for row in rows for value in row):
        problem = f"lacks the columns {', '.join(missing)}" if missing else "has no rows, or some that are not finite"
        raise InvalidArgument(f"{field}: {path} {problem}; nothing was made", field=field, value=path)
    return rows


def _times(path: str) -> list[float]:
    return sorted(row[0] for row in _rows(path, ("arrival_s",), "arrivals"))


def _pairs(path: str) -> list[tuple[int, int]]:
    return [(max(1, int(row[0])), max(1, int(row[1]))) for row in _rows(path, _TOKENS, "lengths")]


def _own_pairs(path: str) -> list[tuple[int, int]]:
    """Of a file that has arrivals too, in their order."""
    rows = sorted(_rows(path, ("arrival_s", *_TOKENS), "lengths"), key=lambda row: row[0])
    return [(max(1, int(row[1])), max(1, int(row[2]))) for row in rows]
