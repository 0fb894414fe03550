# SPDX-License-Identifier: Apache-2.0
"""Bodies of OpenAI's completions and chat into requests of the engine; vLLM's /tokenize, with its answer.

A feature that the engine does not have is refused by name, unless its value asks for nothing; so is a field that the server does
not know, unless its value is one that usually asks for nothing. `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids` (besides
those that the model ends with), `ignore_eos` (not those), `add_special_tokens`, `chat_template_kwargs`, `return_token_ids` (those
of the prompt) and `token_ids` in each choice are vLLM's additions.
"""

from __future__ import annotations

import hashlib
import inspect
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from remap.errors import InvalidArgument
from remap_serve.engine.request import MOST_LOGPROBS, Request, SamplingParams

from .asked import AnswerAsked
from .prompts import Catalog, Served, Wanted, always, encoded, ids_of, refused, still

__all__ = ["CHAT", "COMPLETION", "Chat", "Completion", "parse", "tokenize"]

COMPLETION_TOKENS = 16
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""As instances can send each other."""

if TYPE_CHECKING:
    Whole = int
else:
    Whole = Int | Annotated[float, msgspec.Meta(ge=-(2**53), le=2**53)]
    """As languages with one kind of number write it: 4.0. `_whole` makes it the other."""

WHOLE = ("max_tokens", "max_completion_tokens", "top_k", "seed", "n", "best_of", "logprobs", "top_logprobs")

MOST_STOPS = 32
"""OpenAI takes 4; editors that complete code send more."""

MOST_CHOICES = 128
"""Of one body: n choices, or best_of tries, of each of its prompts. OpenAI takes as many of one prompt."""

MOST_KEY = 256
"""Characters of an Idempotency-Key."""

MOST_BIASES = 1024
"""Tokens of logit_bias: each pass has them all."""

NO_GRAMMARS = (
    "this server's engine has no grammars; serve the model, with its tokenizer, by remap cluster serve --engine vllm"
)
ANY_OBJECT = '{"type": "object"}'

LABELS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "parallel_tool_calls"),
    }
)
"""Fields that name the caller, say what to do beside the answer, or how it may come sooner: ignored, whatever their values."""

NOTHING: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "include_reasoning": (True,),
    "best_of": (1,),
}
"""Fields that bodies need not know, with values that ask for nothing. Of all others None, false, 0 and empty values do."""

BodyT = TypeVar("BodyT")


class StreamOptions(msgspec.Struct):
    """include_usage: a chunk at the end says how many tokens there were. Other fields that clients write there are about chunks
    that there are not."""

    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    """The fields of both."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    n: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Completion(_Body, kw_only=True):
    """The body of /v1/completions. prompt: a text, or token ids; or a list of such."""

    prompt: str | list[int | str | list[int]]
    echo: bool | None = None
    best_of: Whole | None = None
    logprobs: Whole | bool | None = None


class Chat(_Body, kw_only=True):
    """The body of /v1/chat/completions. messages: as the tokenizer's template takes them; of content in parts, their texts.
    chat_template_kwargs, reasoning_effort: what the template may ask for."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})


class _Tokenize(msgspec.Struct, kw_only=True):
    """A prompt, or messages, as vLLM's /tokenize has them. add_special_tokens: by itself with a prompt, and not with messages,
    whose template has them. chat_template_kwargs: of that."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


# Decoders are made here, by one thread. By a class alone msgspec would decode as well, and learn it when it meets it first; a
# second thread that meets it meanwhile takes what is half learnt, and the process dies (msgspec 0.22).
COMPLETION = msgspec.json.Decoder(Completion)
CHAT = msgspec.json.Decoder(Chat)
_TOKENIZE = msgspec.json.Decoder(_Tokenize)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse(
    text: bytes,
    decoder: msgspec.json.Decoder[Any],
    served: Served | Catalog,
    wanted: Wanted = always,
    key: str | None = None,
) -> AnswerAsked:
    """A body. decoder: COMPLETION or CHAT. wanted: asked between steps; CancelledError is raised when no caller waits any more.
    key: the caller's name for it: the same body with the same key asks for the same requests, ids and seeds included.

    Raises InvalidArgument (field param, where one is at fault) for a body that is not as it must be, or a key of more than
    MOST_KEY characters; and UnknownModel.
    """
    body: Completion | Chat = _decoded(text, decoder)
    served = served.find(body.model)
    _whole(body)
    _require_supported(body, text, served)
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MOST_CHOICES:
        raise refused("n", f"must be 1 to {MOST_CHOICES}, got {n}")
    tries, logprobs = _tries(body, n), _logprobs(body)  # which a choice among tries needs as well
    still(wanted)
    chat, echoes, echo_only = isinstance(body, Chat), [""], False
    if isinstance(body, Chat):
        written = _messages_text(body.messages, served, body.template_kwargs)
        prompts = [encoded("messages", written, served, special=bool(body.add_special_tokens))]
    else:
        prompts, echoes = _prompts(body, tries, served, wanted)
        echo_only = bool(body.echo) and body.max_tokens == 0
    own = _own_name(key)
    id = f"{'chatcmpl' if chat else 'cmpl'}-{own[:24]}"
    drawn = int(own[24:], 16)
    requests: list[Request] = []
    for prompt in prompts:
        sampling = _sampling(body, len(prompt), served, 0 if logprobs is None and tries > n else logprobs)
        for choice in range(tries):
            # A draw without a given seed is to differ each time, and be the same when the request is started again.
            seed = (drawn + len(requests)) % 2**31 if body.seed is None else _seed(body.seed + choice)
            name = id if len(prompts) * tries == 1 else f"{id}-{len(requests)}"
            requests.append(Request(name, prompt, replace(sampling, seed=seed)))
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    stops, now = tuple(body.stops), int(time.time())
    return AnswerAsked(
        id,
        tuple(requests),
        n,
        tries,
        tuple(echoes),
        stops,
        bool(body.stream),
        usage,
        chat,
        served.name,
        now,
        logprobs is not None,
        echo_only,
        bool(body.return_token_ids),
    )


def tokenize(text: bytes, served: Served | Catalog, wanted: Wanted = always) -> dict[str, Any]:
    """The answer to this body. Raises InvalidArgument (field param, where a field is at fault) and UnknownModel."""
    body = _decoded(text, _TOKENIZE)
    served = served.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("either prompt or messages must be given; nothing was asked", param="prompt")
    still(wanted)
    name, asked = ("prompt", body.prompt)
    special = body.add_special_tokens is not False
    if body.messages is not None:
        variables, generates = body.chat_template_kwargs or {}, body.add_generation_prompt
        name, asked = "messages", _messages_text(body.messages, served, variables, generates)
        special = bool(body.add_special_tokens)
    if not asked:
        raise refused(name, "must have at least one token, and has none")
    ids = encoded(name, asked, served, special)
    return {"tokens": ids, "count": len(ids), "max_model_len": served.positions}


def _own_name(key: str | None) -> str:
    """40 hexadecimal digits: of the key, or drawn."""
    if key is None:
        return secrets.token_hex(20)
    if not 0 < len(key) <= MOST_KEY:
        raise refused("Idempotency-Key", f"must have 1 to {MOST_KEY} characters, got {len(key)}")
    return hashlib.sha256(key.encode()).hexdigest()[:40]


def _decoded(text: bytes, decoder: msgspec.json.Decoder[BodyT]) -> BodyT:
    """Raises InvalidArgument for a text that is no such body."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"the body cannot be read: {error}; nothing was asked", param=None) from error


def _messages_text(
    messages: list[dict[str, Any]], served: Served, variables: dict[str, Any], generates: bool = True
) -> str:
    """The chat as the model's template writes it. variables: of the template, as callers name them. Raises InvalidArgument (field
    param)."""
    if served.tokenizer is None or not served.tokenizer.chat_template:
        raise refused("messages", "needs a chat template, and the model has none: use /v1/completions")
    write, template = served.tokenizer.apply_chat_template, str(served.tokenizer.chat_template)
    # What is none of the template's: another template, for one.
    for name in inspect.signature(write).parameters.keys() & variables.keys():
        raise refused("chat_template_kwargs", f"has variables of the model's template, and {name} is none")
    plain = [_message(one, "developer" in template) for one in messages]
    try:
        return str(write(plain, add_generation_prompt=generates, tokenize=False, **variables))
    except Exception as error:  # what a template raises is its author's choice
        raise refused("messages", f"does not suit the model's chat template: {error}") from error


def _message(given: dict[str, Any], developers: bool) -> dict[str, Any]:
    """As templates take it: without what is null, with which OpenAI's client sends an answer back, and which they take for
    something. developers: whether the template knows that role, OpenAI's newer name for system."""
    found = {name: value for name, value in given.items() if value is not None}
    if found.get("role") == "developer" and not developers:
        found["role"] = "system"
    return found | {"content": _content(found.get("content", ""))}


def _content(content: Any) -> Any:
    """Parts of text as one text, each on its own line, as vLLM joins them. Raises InvalidArgument for other parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
            raise refused("messages", f"must have parts of text only, got one of type {kind!r}")
        texts.append(part["text"])
    return "\n".join(texts)


def _require_supported(body: Completion | Chat, text: bytes, served: Served) -> None:
    """Raises InvalidArgument (field param) for what there is not."""
    if isinstance(body, Chat):
        for many, name in (("tools", "tool_choice"), ("functions", "function_call")):
            choice = getattr(body, name)
            if choice == "none":
                continue
            if getattr(body, many):
                raise refused(many, f'are not supported: leave them out, or give {name} "none"')
            if choice not in (None, "auto"):
                raise refused(name, f"is not supported: it must be left out, got {choice!r}")
    known = set(body.__struct_fields__) | LABELS
    for name, raw in _FIELDS.decode(text).items():
        if name in known:
            continue
        value = msgspec.json.decode(raw)
        nothing = value in NOTHING[name] if name in NOTHING else not value
        if value is not None and not nothing:
            raise refused(name, f"is not supported: it must be left out, got {value!r}")
    if len(body.stops) > MOST_STOPS or not all(body.stops):
        raise refused("stop", f"must be at most {MOST_STOPS} texts, none of them empty, got {body.stop!r}")
    if body.stops and served.tokenizer is None:
        raise refused("stop", "needs a tokenizer, and the model has none: give stop_token_ids")


def _whole(body: Completion | Chat) -> None:
    """Of numbers that were written as 4.0 make 4. Raises InvalidArgument (field param) for one that is not whole."""
    for name in WHOLE:
        value: object = getattr(body, name, None)
        if isinstance(value, float):
            if not value.is_integer():
                raise refused(name, f"must be a whole number, got {value}")
            setattr(body, name, int(value))


def _tries(body: Completion | Chat, n: int) -> int:
    """Answers to each prompt, of which the likeliest n are the choices."""
    if isinstance(body, Chat) or body.best_of is None:
        return n
    if not n <= body.best_of <= MOST_CHOICES:
        raise refused("best_of", f"must be n to {MOST_CHOICES}, got {body.best_of} with n {n}")
    if body.stream and body.best_of > n:
        raise refused("best_of", f"must be left out, or be n, with stream, got {body.best_of} with n {n}")
    return body.best_of


def _logprobs(body: Completion | Chat) -> int | None:
    """How many alternatives to each token; None: no logprobs are asked for."""
    name, count = "logprobs", body.logprobs
    if isinstance(body, Chat):
        if not body.logprobs:
            if body.top_logprobs:
                raise refused("top_logprobs", f"must be left out without logprobs, got {body.top_logprobs}")
            return None
        name, count = "top_logprobs", body.top_logprobs or 0
    if count is None or count is False:
        return None
    if count is True or not 0 <= count <= MOST_LOGPROBS:
        raise refused(name, f"must be 0 to {MOST_LOGPROBS}, got {count}")
    return count


def _biases(body: Completion | Chat) -> tuple[tuple[int, float], ...]:
    """Those that are not 0."""
    given = body.logit_bias or {}
    if len(given) > MOST_BIASES:
        raise refused("logit_bias", f"must have at most {MOST_BIASES} tokens, got {len(given)}")
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) < 19):
            raise refused("logit_bias", f"must have token ids as its keys, got {token!r}")
    return tuple((int(token), bias) for token, bias in given.items() if bias)


def _prompts(body: Completion, n: int, served: Served, wanted: Wanted) -> tuple[list[tuple[int, ...]], list[str]]:
    """The prompts' tokens, and the texts that answers to them begin with."""
    given: Any = body.prompt
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    each = given if several else [given]
    if len(each) * n > MOST_CHOICES:
        raise refused(
            "prompt",
            f"and n, or best_of, must ask for at most {MOST_CHOICES} choices, got {len(each)} prompts of {n} each",
        )
    prompts, echoes = [], []
    for one in each:
        still(wanted)
        if not isinstance(one, (str, list)):
            raise refused("prompt", "must be a text, or a list of one or more token ids, or a list of such")
        prompts.append(ids_of("prompt", one, served, body.add_special_tokens is not False))
        text = one if isinstance(one, str) else ""
        if body.echo and not text and served.tokenizer is not None:
            text = served.tokenizer.decode(prompts[-1])
        echoes.append(text if body.echo else "")
    return prompts, echoes


def _sampling(body: Completion | Chat, prompt: int, served: Served, logprobs: int | None) -> SamplingParams:
    """Of a prompt of `prompt` tokens, but for the seed."""
    echo = not isinstance(body, Chat) and bool(body.echo)
    most = body.max_tokens
    if isinstance(body, Chat):
        most = body.max_completion_tokens if body.max_completion_tokens is not None else most
        most = max(1, served.positions - prompt) if most is None else most
    elif most == 0 and echo:
        most = 1  # an engine has no passes without a token; no caller gets this one (`AnswerAsked.echo_only`)
    return SamplingParams(
        max_tokens=COMPLETION_TOKENS if most is None else most,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k in (None, -1) else body.top_k,
        min_p=0.0 if body.min_p is None else body.min_p,
        stop_token_ids=(frozenset() if body.ignore_eos else served.stop_token_ids)
        | frozenset(body.stop_token_ids or ()),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_biases(body),
        logprobs=logprobs,
        prompt_logprobs=echo and _logprobs(body) is not None,
        json_schema=_json_schema(body.response_format, served),
    )


def _json_schema(wanted: dict[str, Any] | None, served: Served) -> str | None:
    """The schema that `response_format` asks for; None for text. Raises InvalidArgument (field param)."""
    kind = "text" if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    if not served.grammars:
        raise refused("response_format", f"must be left out, or of type text, got {kind!r}: {NO_GRAMMARS}")
    if kind == "json_object":
        return ANY_OBJECT
    given = wanted.get("json_schema") if kind == "json_schema" else None
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(schema, dict):
        raise refused(
            "response_format", f"must be of type text, json_object, or json_schema with a schema, got {kind!r}"
        )
    return msgspec.json.encode(schema).decode()


def _seed(seed: int) -> int:
    """As an instance can be sent: of 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63
