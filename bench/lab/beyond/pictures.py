"""The four pictures of `bench.lab beyond`. Need matplotlib (the extra `sim` or `bench`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from bench.lab.paper.experiments import BASELINE

from remap_serve.cli.simulate_plots import STYLE, colours, need_matplotlib
from remap_serve.sim.policies import OURS

from .donors import SOURCES
from .exact import Compared
from .processes import MEASURES, SIDES

__all__ = ["donors", "exactness", "lending", "regret"]

_STYLE = {**STYLE, "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 8.5}
_PAINTED = dict(zip(SOURCES, ("#9ca3af", "#8d5fb0", "#4f97d7", "#1466b8", "#e0a100")))
_OURS, _THEIRS = "#1466b8", "#a5581b"


def _figure(rows: int, columns: int, width: float, height: float, **settings: Any) -> tuple[Any, Any]:
    figure = import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **settings)


def regret(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Any:
    """found: title of a figure -> policy -> its regret of each load, as a share. A dot is a load."""
    with need_matplotlib().rc_context(_STYLE):
        figure, ((*axes,),) = _figure(1, len(found), 9.2, 2.7, sharey=True)
        for axis, (title, policies) in zip(axes, found.items()):
            for place, (policy, values) in enumerate(reversed(list(policies.items()))):
                spread = [place + 0.5 * (number / max(1, len(values) - 1) - 0.5) for number in range(len(values))]
                colour = _OURS if policy == OURS else "#6b7280"
                axis.plot([100 * value for value in sorted(values)], spread, "o", ms=3, color=colour, alpha=0.7)
            axis.set_xscale("symlog", linthresh=10)
            axis.set_xlim(left=-1)
            axis.axvline(10, color="#666666", lw=0.7, ls=":")
            axis.set_yticks(range(len(policies)), [*policies][::-1])
            axis.set_title(title, loc="left")
            axis.set_xlabel("% worse than the best policy")
        return figure


def donors(runs: Mapping[str, Mapping[str, Sequence[float]]]) -> Any:
    """KV of the default by where it is from, and requests that wait under it and under the baseline."""
    with need_matplotlib().rc_context(_STYLE):
        figure, ((upper,), (lower,)) = _figure(2, 1, 9.2, 4.4, sharex=True, gridspec_kw={"height_ratios": (3, 1)})
        ours = runs[OURS]
        upper.stackplot(
            ours["time_s"],
            [[size / 1e3 for size in ours[name]] for name in SOURCES],
            labels=[*SOURCES.values()],
            colors=[_PAINTED[name] for name in SOURCES],
            step="post",
            lw=0,
        )
        upper.set_ylabel("KV, GB")
        upper.legend(loc="upper center", frameon=False, fontsize=7, ncols=len(SOURCES))
        upper.set_ylim(top=1.15 * max(map(sum, zip(*(ours[name] for name in SOURCES)))) / 1e3)
        painted = colours((BASELINE, OURS))
        for policy in (BASELINE, OURS):
            run = runs[policy]
            lower.step(run["time_s"], run["waiting"], where="post", lw=1.2, color=painted[policy], label=policy)
        lower.set_ylabel("requests waiting")
        lower.set_xlabel("s")
        lower.legend(loc="upper left", frameon=False, fontsize=7)
        return figure


def lending(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> Any:
    """A bar is the median of the rounds, a dot a round."""
    with need_matplotlib().rc_context(_STYLE):
        figure, ((*axes,),) = _figure(1, len(MEASURES), 9.2, 2.5)
        for axis, (key, title) in zip(axes, MEASURES.items()):
            for place, side in enumerate(SIDES):
                values = [one[side][key] for one in rounds]
                colour = (_THEIRS, "#4f97d7", _OURS)[place]
                axis.bar(place, statistics.median(values), width=0.7, color=colour, label=SIDES[side])
                axis.plot([place] * len(values), values, "o", ms=2.5, color="#111827")
            axis.set_title(title, loc="left")
            axis.set_xticks([])
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SIDES), frameon=False)
        return figure


def exactness(found: Sequence[Compared]) -> Any:
    """Requests with the reference's tokens, in percent: where memory moves, and the baselines that were counted too."""
    with need_matplotlib().rc_context(_STYLE):
        figure, ((axis,),) = _figure(1, 1, 9.2, 0.28 * len(found) + 0.7)
        places = range(len(found) - 1, -1, -1)
        ours = [100 * one.same / one.requests for one in found]
        axis.plot(ours, places, "o", ms=6, color=_OURS, label="with memory that moves")
        pairs = [(place, one.others) for place, one in zip(places, found) if one.others]
        others = [100 * same / count for _, (same, count) in pairs]
        axis.plot(others, [place for place, _ in pairs], "x", ms=5, color=_THEIRS, label="baselines in the same memory")
        for place, one in zip(places, found):
            axis.annotate(f"{one.same:,} of {one.requests:,}", (100.15, place), va="center", annotation_clip=False)
        axis.set_yticks([*places], [one.what for one in found])
        axis.set_ylim(-0.6, len(found) - 0.4)
        axis.set_xlim(min([97.5, *ours, *others]) - 0.1, 100.1)
        axis.set_xlabel("requests with the reference's tokens, %")
        axis.legend(loc="lower left", frameon=False)
        return figure
