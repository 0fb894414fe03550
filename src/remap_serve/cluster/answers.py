# SPDX-License-Identifier: Apache-2.0
"""Answers as they come: the front's tokens of each choice as text, of several choices in the order in which they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from remap.errors import Error, OutOfBlocks

from .access_log import GONE, RequestLine
from .answer_text import AnswerText
from .asked import AnswerPiece
from .caller import Caller
from .http_errors import TooLate, error_of
from .logprobs import LogprobText, joined

if TYPE_CHECKING:
    from remap_serve.engine.request import Request as EngineRequest

    from .asked import AnswerAsked
    from .ledger import Delivery
    from .metrics import RequestMetrics
    from .prompts import Served

__all__ = ["AnswerPiece", "Answering", "Deadline", "events", "pieces", "whole"]

ValueT = TypeVar("ValueT")

PROMPT_PART = 64
"""Tokens of a prompt whose logprobs are written at once."""


class Answering(Protocol):
    """What serves a model's requests: a `Front`, or one model of several."""

    def generate(
        self, id: str, request: EngineRequest, *, caller: Caller | None = None
    ) -> AsyncGenerator[Delivery, None]: ...


class Deadline:
    """When a request's time is over. seconds: from now on. Made in the event loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at_s = asyncio.get_running_loop().time() + seconds

    @property
    def left_s(self) -> float:
        """Seconds, 0 when it is over."""
        return max(0.0, self.at_s - asyncio.get_running_loop().time())

    def error(self, tokens: int = 0) -> TooLate:
        """The answer to a request that had `tokens` tokens then."""
        return TooLate(
            f"the request was not answered within {self.seconds:g} s, and has {tokens} tokens; it is ended; ask for less, or "
            "serve with a longer --deadline",
            deadline_s=self.seconds,
            tokens=tokens,
        )


def pieces(
    source: Answering, served: Served, metrics: RequestMetrics, asked: AnswerAsked, deadline: Deadline
) -> AsyncGenerator[AnswerPiece, None]:
    """The answer as it comes. Closing this cancels its requests, and so does the end of one of them by an error."""
    return _merged([_choice(source, served, metrics, asked, number, deadline) for number in range(len(asked.requests))])


async def whole(asked: AnswerAsked, found: AsyncGenerator[AnswerPiece, None], line: RequestLine) -> dict[str, Any]:
    """All of it as one object."""
    tried: list[list[AnswerPiece]] = [[] for _ in asked.requests]
    async for piece in found:
        tried[piece.choice].append(piece)
        line.generated += len(piece.tokens)
    return asked.answer([_one(pieces) for pieces in tried])


def _one(pieces: Sequence[AnswerPiece]) -> AnswerPiece:
    """All pieces of a choice."""
    text, tokens = "".join(each.text for each in pieces), [token for each in pieces for token in each.tokens]
    logprobs = joined([each.logprobs for each in pieces if each.logprobs is not None])
    return AnswerPiece(
        pieces[0].choice, text, tokens, pieces[-1].reason, logprobs, sum(each.logprob for each in pieces)
    )


async def events(
    asked: AnswerAsked, first: AnswerPiece, rest: AsyncGenerator[AnswerPiece, None], line: RequestLine
) -> AsyncGenerator[bytes, None]:
    """All of it as server-sent events; an error is one of them, for the status was sent long ago. The line has its status."""
    begun = {first.choice}
    line.status, line.generated = GONE, len(first.tokens)  # until it has ended otherwise
    yield _event(asked.chunk(first, True))
    try:
        async for piece in rest:
            line.generated += len(piece.tokens)
            yield _event(asked.chunk(piece, piece.choice not in begun))
            begun.add(piece.choice)
    except Error as error:
        line.failed(error)
        yield _event(error_of(error))
        return
    if asked.usage:
        yield _event(asked.last(line.generated))
    yield b"data: [DONE]\n\n"
    line.status = None


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _choice(
    source: Answering,
    served: Served,
    metrics: RequestMetrics,
    asked: AnswerAsked,
    number: int,
    deadline: Deadline,
) -> AsyncGenerator[AnswerPiece, None]:
    request = asked.requests[number]
    text, echo = AnswerText(served.tokenizer, asked.stops), asked.echo(number)
    written = LogprobText(served.vocabulary, asked.chat) if asked.logprobs else None
    begin = first = last = time.monotonic()
    tokens, outcome = 0, "cancelled"

    caller = Caller()

    def late() -> None:
        caller.put(deadline.error(tokens))

    timer = asyncio.get_running_loop().call_at(deadline.at_s, late)
    try:
        async with aclosing(source.generate(request.id, request, caller=caller)) as deliveries:
            async for delivery in deliveries:
                last = time.monotonic()
                if not tokens and delivery.tokens:
                    first = last
                    metrics.first(served.name, first - begin)
                tokens += len(delivery.tokens)
                reason = delivery.finish_reason
                if reason == "out_of_blocks":
                    raise OutOfBlocks(
                        f"the request needs KV for {len(request.prompt) + tokens} tokens, which no instance has, alone or in its "
                        "group; it is ended; ask for less, or serve with more memory",
                        requested=len(request.prompt) + tokens,
                    )
                logprobs = [] if written is None else [part async for part in _prompt(written, request, delivery)]
                if asked.echo_only and delivery.tokens:
                    outcome = "length"
                    yield AnswerPiece(number, echo, [], outcome, joined(logprobs))
                    return
                part, count = text.take(delivery.tokens, reason is not None)
                part, echo = echo + part, ""
                reason = "stop" if text.stopped else reason
                outcome = reason or outcome
                noted = delivery.noted[:count]
                if written is not None:
                    logprobs.append(written.of(noted))
                likely = sum(one.logprob for one in noted)
                yield AnswerPiece(number, part, list(delivery.tokens[:count]), reason, joined(logprobs), likely)
                if reason is not None:
                    return
    except Error as error:
        outcome = type(error).__name__
        raise
    finally:
        timer.cancel()
        metrics.ended(served.name, outcome, len(request.prompt), tokens, last - first, time.monotonic() - begin)


async def _prompt(
    written: LogprobText, request: EngineRequest, delivery: Delivery
) -> AsyncGenerator[dict[str, Any], None]:
    """The prompt's logprobs, where an answer begins with them. Others have their turn between two parts."""
    if request.sampling.prompt_logprobs and delivery.first == 0 and delivery.tokens:
        yield written.of_first(request.prompt[0])
        for begin in range(0, len(delivery.prompt), PROMPT_PART):
            await asyncio.sleep(0)
            yield written.of(delivery.prompt[begin : begin + PROMPT_PART])


async def _merged(sources: Sequence[AsyncGenerator[ValueT, None]]) -> AsyncGenerator[ValueT, None]:
    """Their parts, as they come. The first error of one ends all; so does closing this."""
    if len(sources) == 1:
        async with aclosing(sources[0]):
            async for value in sources[0]:
                yield value
        return
    came = asyncio.Queue["ValueT | asyncio.Task[None]"]()

    async def pump(source: AsyncGenerator[ValueT, None]) -> None:
        async with aclosing(source):
            async for value in source:
                came.put_nowait(value)

    tasks = [asyncio.ensure_future(pump(source)) for source in sources]
    for task in tasks:
        task.add_done_callback(came.put_nowait)
    try:
        left = len(tasks)
        while left:
            found = await came.get()
            if isinstance(found, asyncio.Task):
                found.result()
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
