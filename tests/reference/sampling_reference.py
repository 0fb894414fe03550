"""What `SamplingParams` says of penalties, cuts and logprobs, in plain Python over lists: slow, and as it is written there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def changed(
    logits: Sequence[float],
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
    bias: Mapping[int, float] | None = None,
) -> list[float]:
    """Logits after the bias and the penalties."""
    found = []
    for token, logit in enumerate(logits):
        logit += (bias or {}).get(token, 0.0)
        if token in prompt or token in answer:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= frequency * answer.count(token)
        if token in answer:
            logit -= presence
        found.append(logit)
    return found


def kept(logits: Sequence[float], temperature: float, min_p: float) -> list[bool]:
    """Tokens at least min_p times as likely as the likeliest."""
    likely = softmax([logit / temperature for logit in logits])
    return [each >= min_p * max(likely) for each in likely]


def logprobs(logits: Sequence[float], count: int) -> tuple[list[float], list[tuple[int, float]]]:
    """Of each token; and of the likeliest ones, of equal ones the smaller id first."""
    found = [max(math.log(each), -9999.0) if each > 0 else -9999.0 for each in softmax(logits)]
    ordered = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    return found, [(token, found[token]) for token in ordered[:count]]


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities, by exact sums."""
    weights = [math.exp(logit - max(logits)) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
