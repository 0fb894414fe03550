# SPDX-License-Identifier: Apache-2.0
"""A user's request (`Request`, `SamplingParams`), its answer (`Output`), and the engine's own record of it
(`Sequence`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from remap.errors import InvalidArgument

__all__ = ["MOST_LOGPROBS", "Output", "Request", "RequestState", "SamplingParams", "Sequence", "TokenLogprobs"]

MOST_LOGPROBS = 20
"""Alternatives of a token whose logprobs a request may ask for."""


class TokenLogprobs(NamedTuple):
    """The natural logarithm of a token's probability, and (token, logprob) of the likeliest tokens in its place, the likeliest
    first and of equal ones the smallest id: as many as were asked for. By the model's logits alone, before penalties, bias and
    temperature; at least -9999."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    temperature 0 is greedy. Otherwise the token is drawn from softmax(logits / temperature), cut to the `top_k` most
    likely (0: all), to those at least `min_p` times as likely as the likeliest, and to the smallest set whose probability
    reaches `top_p`. A token that ties with the last one kept is kept. The random numbers depend on (seed, position, token) only:
    neither the batch nor a preemption changes them.

    Both look at logits that are changed before, in this order. `logit_bias` is added ((token, bias) pairs, each token once).
    Logits of tokens that the prompt or the answer has are divided by `repetition_penalty` if they are above 0, else multiplied
    by it. `frequency_penalty` is subtracted once for each time that the answer has the token, `presence_penalty` once if it has
    it.

    logprobs: note each token's `TokenLogprobs` with that many alternatives (None: note nothing). prompt_logprobs: also those of
    the prompt's tokens but the first.

    json_schema: the answer's text is to be JSON that matches this schema. That takes an engine with grammars (vLLM, in a
    cluster); the reference engine has none, and refuses such a request.

    Raises InvalidArgument (field param: its name, and a field of that name) for a value outside of its range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    json_schema: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))
        biases = [bias for _, bias in self.logit_bias]
        for name, fits, expected in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "0.01 to 100"),
            ("logit_bias", all(-100 <= bias <= 100 for bias in biases), "of -100 to 100 for each token"),
            ("logit_bias", len(dict(self.logit_bias)) == len(biases), "of each token once"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MOST_LOGPROBS, f"0 to {MOST_LOGPROBS}"),
            ("prompt_logprobs", self.logprobs is not None or not self.prompt_logprobs, "false without logprobs"),
        ):
            if not fits:
                value = getattr(self, name)
                raise InvalidArgument(f"{name} must be {expected}, got {value}", **{"param": name, name: value})

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before a token is chosen: by the bias or a penalty."""
        penalties = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        return penalties or bool(self.logit_bias)

    @property
    def plain(self) -> bool:
        """The next token is that of the largest logit, and nothing else is asked: no logits are needed beyond that."""
        return self.temperature == 0 and self.logprobs is None and not self.changes_logits


@dataclass(frozen=True)
class Request:
    """One prompt. `arrival_s` counts from the start of `LLMEngine.run`; ids are the caller's and must be unique."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", tuple(int(token) for token in self.prompt))
        if not self.prompt:
            raise InvalidArgument(f"request {self.id!r}: the prompt must have at least one token", id=self.id)
        if self.arrival_s < 0:
            raise InvalidArgument(f"request {self.id!r}: arrival_s must be >= 0, got {self.arrival_s}", id=self.id)

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV can be live at once. The last token generated is never fed back, so it needs no slot."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    def require_fitting(self, vocabulary: int, positions: int) -> None:
        """Raises InvalidArgument if a token is none of the model's (of `logit_bias` too), or it needs more positions than there
        are."""
        # The embedding would fail on it in the middle of a pass, and every request of that pass with it.
        strange = next((token for token in self.prompt if not 0 <= token < vocabulary), None)
        if strange is not None:
            raise InvalidArgument(
                f"request {self.id!r}: the prompt has token {strange}, the model's are 0 to {vocabulary - 1}; "
                "nothing was queued",
                token=strange,
                vocabulary=vocabulary,
            )
        strange = next((token for token, _ in self.sampling.logit_bias if not 0 <= token < vocabulary), None)
        if strange is not None:
            raise InvalidArgument(
                f"request {self.id!r}: logit_bias has token {strange}, the model's are 0 to {vocabulary - 1}; "
                "nothing was queued",
                param="logit_bias",
                token=strange,
                vocabulary=vocabulary,
            )
        if self.max_kv_tokens > positions:
            raise InvalidArgument(
                f"request {self.id!r} needs {self.max_kv_tokens} positions, the model has {positions}; "
                f"nothing was queued, shorten the prompt or lower max_tokens",
                needed=self.max_kv_tokens,
                limit=positions,
            )


@dataclass(frozen=True)
class Output:
    """A finished request: the tokens generated (stop token included) and why it ended: "stop", "length" or "abort".

    logprobs: of each token generated, and prompt_logprobs: of each token of the prompt but the first, if they were asked for.
    """

    id: str
    tokens: tuple[int, ...]
    finish_reason: str
    preemptions: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """The engine's record of one request.

    Invariants between steps: `computed` tokens of `tokens` have their KV in `blocks`, so computed <= len(blocks) *
    block_tokens and computed < len(tokens); a waiting sequence has no blocks, and computed = 0 unless its KV lies in
    host memory. `host`: host blocks that hold the KV of its first len(host) blocks; while it runs they are complete blocks,
    which never change. `streamed`: how many of its first blocks are of `kv.host.stream`, and show the first of `host`; `homing`:
    a ticket, and blocks into which the last of them are being copied back. `high_water` = the most
    tokens whose KV ever existed, so computing token i < high_water is recomputing. `blocks` is extended in place; code that
    changes an entry, or takes any away, replaces the list (a block table knows by that what to write again). `relocated`: the
    last move of blocks that the tables follow (`Scheduler.relocate`). `noted`: logprobs that were asked for, by the place of
    their token in `tokens`; a pass that is run again notes the same again.
    Times are on the engine's clock: when it arrived, and when its first and its last token came (None before the first);
    longest_s is its longest gap between two tokens.

    Scheduler, loop and metrics ask for lengths, not for values: `id`, `length`, `prompt_tokens`, `append` and `output`
    are all that a sequence without values (remap_serve.sim.sequences) has to bring.
    """

    request: Request
    order: int
    tokens: list[int]
    arrived_s: float = 0.0
    state: RequestState = RequestState.WAITING
    computed: int = 0
    high_water: int = 0
    blocks: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    streamed: int = 0
    homing: tuple[int, list[int]] | None = None
    relocated: int = 0
    noted: dict[int, TokenLogprobs] = field(default_factory=dict)
    preemptions: int = 0
    first_s: float | None = None
    last_s: float | None = None
    longest_s: float = 0.0

    @classmethod
    def of(cls, request: Request, order: int, arrived_s: float = 0.0) -> Sequence:
        return cls(request, order, list(request.prompt), arrived_s)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def held_blocks(self) -> int:
        """Blocks of the pool that it holds: those that stream are none, those that are being copied back are."""
        return len(self.blocks) - self.streamed + (len(self.homing[1]) if self.homing is not None else 0)

    @property
    def length(self) -> int:
        """Tokens known: those of the prompt, and those generated."""
        return len(self.tokens)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return self.length - self.prompt_tokens

    def append(self, token: int) -> str | None:
        """Add a generated token; returns the finish reason if it was the last one."""
        self.tokens.append(token)
        return self.ended

    @property
    def ended(self) -> str | None:
        """The finish reason if its last token was generated; else None."""
        if self.generated and self.tokens[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if self.generated >= self.request.sampling.max_tokens else None

    def output(self, reason: str) -> Output:
        prompt, tokens = self.prompt_tokens, tuple(self.tokens[self.prompt_tokens :])
        return Output(
            self.id, tokens, reason, self.preemptions, self.noted_of(prompt, self.length), self.noted_of(1, prompt)
        )

    def noted_of(self, first: int, end: int) -> tuple[TokenLogprobs, ...]:
        """Logprobs of the tokens first <= i < end: of none unless they were asked for."""
        if self.sampling.logprobs is None or (first < self.prompt_tokens and not self.sampling.prompt_logprobs):
            return ()
        return tuple(self.noted[place] for place in range(first, end) if place in self.noted)
