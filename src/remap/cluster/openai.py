"""OpenAI's completions and chat: bodies into requests of the engine, and answers, chunks and errors into JSON.

What the engine does not have is refused by name, unless its value asks for nothing. `top_k`, `stop_token_ids` (besides those
that the model ends with), `ignore_eos` (not those) and `token_ids` in each choice are vLLM's additions.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar

import msgspec

from remap.engine.request import Request, SamplingParams
from remap.errors import Error, InvalidArgument, InvalidState, OutOfBlocks

from .control import NoCopy
from .limits import Busy, TooLarge, longest_token

__all__ = ["Asked", "Chat", "Completion", "Served", "UnknownModel", "error_of", "parse", "status_of"]

COMPLETION_TOKENS = 16
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""As instances can send each other."""

MOST_STOPS = 4
"""As many as OpenAI takes."""


class UnknownModel(Error):
    """The body names a model that is not served. Nothing was asked. Fields: model, served."""


@dataclass(frozen=True)
class Served:
    """The model: its name, its tokenizer (None: prompts are token ids), tokens of a prompt with its answer at most, and the ids
    that end an answer. created: in seconds since 1970."""

    name: str
    tokenizer: Any
    positions: int
    stop_token_ids: frozenset[int] = frozenset()
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def most_bytes(self) -> int:
        """A prompt of more bytes of text has more tokens than there are positions."""
        return self.positions * longest_token(self.tokenizer)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: a chunk at the end says how many tokens there were."""

    include_usage: bool = False


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both have. The fields below `user`, which is ignored, are OpenAI's that ask for what there is not; `nothing` has the
    values with which they do not."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    nothing: ClassVar[dict[str, Any]] = {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Completion(_Body, kw_only=True):
    """The body of /v1/completions. prompt: a text, or token ids; or a list of one text."""

    prompt: str | list[int | str]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    nothing: ClassVar[dict[str, Any]] = _Body.nothing | {"best_of": 1, "echo": False, "logprobs": None, "suffix": ""}


class Chat(_Body, kw_only=True):
    """The body of /v1/chat/completions. messages: as the tokenizer's template takes them."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None

    nothing: ClassVar[dict[str, Any]] = _Body.nothing | {
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
    }


@dataclass(frozen=True)
class Asked:
    """A request as it came: what the engine is asked for, and how the answer is to look."""

    request: Request
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    chat: bool
    model: str
    created: int

    def answer(self, text: str, tokens: list[int], reason: str) -> dict[str, Any]:
        """The whole answer."""
        key, value = ("message", {"role": "assistant", "content": text}) if self.chat else ("text", text)
        return self._object(key, value, tokens, reason, False) | {"usage": self.usage_of(len(tokens))}

    def chunk(self, text: str, tokens: list[int], reason: str | None, first: bool) -> dict[str, Any]:
        """A part of a streamed answer."""
        delta = ({"role": "assistant"} if first else {}) | {"content": text}
        key, value = ("delta", delta) if self.chat else ("text", text)
        return self._object(key, value, tokens, reason, True)

    def last(self, tokens: int) -> dict[str, Any]:
        """The chunk behind all others, with the usage."""
        return self._object("text", "", [], None, True) | {"choices": [], "usage": self.usage_of(tokens)}

    def usage_of(self, tokens: int) -> dict[str, int]:
        """How many tokens there were."""
        prompt = len(self.request.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _object(self, key: str, value: Any, tokens: list[int], reason: str | None, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        choice = {"index": 0, key: value, "finish_reason": reason, "logprobs": None, "token_ids": tokens}
        return {
            "id": self.request.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }


def parse(text: bytes, kind: type[Completion | Chat], served: Served) -> Asked:
    """A body.

    Raises InvalidArgument (field param, where one is at fault) for a body that is not as it must be, and UnknownModel.
    """
    try:
        body = msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"the body cannot be read: {error}; nothing was asked", param=None) from error
    if body.model not in (None, served.name):
        raise UnknownModel(
            f"model {body.model!r} is not served here; nothing was asked; ask for {served.name!r}",
            model=body.model,
            served=served.name,
        )
    for name, nothing in body.nothing.items():
        value = getattr(body, name)
        if value is not None and value != nothing:
            raise _refused(name, f"is not supported: it must be left out, or be {nothing!r}, got {value!r}")
    if len(body.stops) > MOST_STOPS or not all(body.stops):
        raise _refused("stop", f"must be at most {MOST_STOPS} texts, none of them empty, got {body.stop!r}")
    if body.stops and served.tokenizer is None:
        raise _refused("stop", "needs a tokenizer, and the model has none: give stop_token_ids")
    chat = isinstance(body, Chat)
    prompt = _messages(body, served) if isinstance(body, Chat) else _prompt(body, served)
    most = body.max_tokens
    if isinstance(body, Chat):
        most = body.max_completion_tokens if body.max_completion_tokens is not None else most
        most = max(1, served.positions - len(prompt)) if most is None else most
    sampling = SamplingParams(
        max_tokens=COMPLETION_TOKENS if most is None else most,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k in (None, -1) else body.top_k,
        # A draw that nobody named a seed for is to differ each time, and be the same when the request is started again.
        seed=secrets.randbits(31) if body.seed is None else body.seed,
        stop_token_ids=(frozenset() if body.ignore_eos else served.stop_token_ids)
        | frozenset(body.stop_token_ids or ()),
    )
    id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    usage = body.stream_options is not None and body.stream_options.include_usage
    return Asked(
        Request(id, prompt, sampling),
        tuple(body.stops),
        bool(body.stream),
        usage,
        chat,
        served.name,
        int(time.time()),
    )


def _prompt(body: Completion, served: Served) -> tuple[int, ...]:
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _encoded(prompt, "prompt", served)
    if len(prompt) > served.positions:
        raise _refused("prompt", f"must have at most {served.positions} tokens, with its answer, got {len(prompt)}")
    ids = tuple(token for token in prompt if isinstance(token, int))
    if len(ids) != len(prompt) or not ids:
        raise _refused("prompt", "must be one text, or a list of one or more token ids; ask once for each prompt")
    return ids


def _messages(body: Chat, served: Served) -> tuple[int, ...]:
    if served.tokenizer is None or not served.tokenizer.chat_template:
        raise _refused("messages", "needs a chat template, and the model has none: use /v1/completions")
    try:
        text = served.tokenizer.apply_chat_template(body.messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # what a template raises is its author's choice
        raise _refused("messages", f"does not suit the model's chat template: {error}") from error
    return _encoded(text, "messages", served, special=False)


def _encoded(text: str, name: str, served: Served, special: bool = True) -> tuple[int, ...]:
    if served.tokenizer is None:
        raise _refused(name, "must be token ids: the model has no tokenizer")
    # Before it is tokenised: that can take a time that grows with the square of the length.
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > served.most_bytes:
        raise _refused(
            name, f"has {size} bytes of text, and {served.positions} tokens are at most {served.most_bytes} bytes"
        )
    ids = tuple(served.tokenizer.encode(text, add_special_tokens=special))
    if not ids:
        raise _refused(name, "must have at least one token, and has none")
    return ids


def _refused(name: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{name} {why}; nothing was asked", param=name)


def status_of(error: Error) -> int:
    """The HTTP status: 400 and 413 what the caller has to change, 404 another model, 429 too many requests, 503 what another time
    or place may do."""
    if isinstance(error, InvalidArgument):
        return 400
    if isinstance(error, UnknownModel):
        return 404
    if isinstance(error, TooLarge):
        return 413
    if isinstance(error, Busy):
        return 429
    return 503 if isinstance(error, (NoCopy, InvalidState, OutOfBlocks)) else 500


def error_of(error: Error) -> dict[str, Any]:
    """The error as OpenAI writes it."""
    status = status_of(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    param, code = error.fields.get("param"), type(error).__name__
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
