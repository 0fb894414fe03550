"""How many distinct experts a batch of tokens selects, by drawing each token's selection: a Monte-Carlo reference."""

from __future__ import annotations

import random
import statistics


def drawn_experts(experts: int, active: int, tokens: int, *, batches: int, seed: int = 0) -> tuple[float, float]:
    """(mean, standard error) over `batches`. A token selects `active` experts, all different; the first half of the experts
    gets 90 % of the selections, or as many as it has experts, and each of a half is as likely as another."""
    rng, popular = random.Random(seed), experts // 2
    assert 2 * popular == experts
    mean = min(0.9 * active, popular)
    sizes = []
    for _ in range(batches):
        seen: set[int] = set()
        for _ in range(tokens):
            often = int(mean) + (rng.random() < mean - int(mean))
            seen.update(rng.sample(range(popular), often))
            seen.update(rng.sample(range(popular, experts), active - often))
        sizes.append(len(seen))
    return statistics.fmean(sizes), statistics.stdev(sizes) / batches**0.5
