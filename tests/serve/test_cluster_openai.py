"""Bodies of OpenAI's endpoints into requests of the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("transformers")

from cluster_folder import byte_tokenizer

from remap.errors import DriverError, InvalidArgument, InvalidState, OutOfBlocks
from remap_serve.cluster.asked import AnswerAsked, AnswerPiece
from remap_serve.cluster.control import NoCopy
from remap_serve.cluster.http_errors import UnknownModel, error_of, status_of
from remap_serve.cluster.openai import CHAT, COMPLETION, parse, tokenize
from remap_serve.cluster.prompts import Served
from remap_serve.engine.request import SamplingParams

SERVED = Served("tiny", byte_tokenizer(), 100, frozenset({256}), 0)
BARE = Served("tiny", None, 100, frozenset(), 0)
HELLO = tuple(byte_tokenizer().encode("hello"))


def completion(served: Served = SERVED, **body: Any) -> AnswerAsked:
    return parse(json.dumps({"prompt": "hello"} | body).encode(), COMPLETION, served)


def chat(served: Served = SERVED, **body: Any) -> AnswerAsked:
    messages = [{"role": "user", "content": "hi"}]
    return parse(json.dumps({"messages": messages} | body).encode(), CHAT, served)


def test_a_prompt_is_text_or_token_ids() -> None:
    assert completion().request.prompt == completion(prompt=["hello"]).request.prompt == HELLO
    assert completion(BARE, prompt=[1, 2]).request.prompt == (1, 2)
    assert completion().request.id != completion().request.id


def test_a_chat_goes_through_the_models_template_and_may_fill_all_positions() -> None:
    asked = chat()
    assert SERVED.tokenizer.decode(asked.request.prompt) == "user: hi\nassistant:"
    assert asked.request.sampling.max_tokens == 100 - len(asked.request.prompt)
    assert chat(max_tokens=3).request.sampling.max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=4).request.sampling.max_tokens == 4


def test_sampling_is_the_engines_with_openais_defaults() -> None:
    found = completion(temperature=0.5, top_p=0.9, top_k=7, seed=3, max_tokens=9, stop_token_ids=[1]).request.sampling
    assert found == SamplingParams(9, 0.5, 7, 0.9, 3, frozenset({1, 256}))
    assert completion(ignore_eos=True, stop_token_ids=[1]).request.sampling.stop_token_ids == {1}
    assert completion(top_k=-1).request.sampling.top_k == 0
    plain = completion().request.sampling
    assert (plain.max_tokens, plain.temperature, plain.top_p, plain.top_k) == (16, 1.0, 1.0, 0)
    assert plain.stop_token_ids == {256}
    assert len({completion().request.sampling.seed for _ in range(8)}) > 1  # nobody named one


def test_stops_and_streams() -> None:
    assert completion(stop="x").stops == completion(stop=["x"]).stops == ("x",)
    asked = completion(stream=True, stream_options={"include_usage": True})
    assert (asked.stream, asked.usage, completion().stream) == (True, True, False)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 65, "best_of": 2}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"max_tokens": 4.5}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "b"]}, "prompt"),
    ],
)
def test_what_there_is_not_is_refused_by_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        completion(**body)
    assert caught.value.param == named and named in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        {"top_logprobs": 2},
        {"top_logprobs": 21, "logprobs": True},
        {"tools": [{}]},
        {"tools": [{}], "tool_choice": "auto"},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"functions": [{}]},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    ],
)
def test_what_a_chat_has_not_is_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat(**body)
    assert caught.value.param == next(iter(body)) and next(iter(body)) in str(caught.value)


def test_an_answers_format_is_a_schema_where_the_engine_has_grammars() -> None:
    able = replace(SERVED, grammars=True)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    of = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    for asked in (chat, completion):
        for served in (able, SERVED):
            assert asked(served, response_format={"type": "text"}).request.sampling.json_schema is None
        found = asked(able, response_format={"type": "json_object"}).request.sampling.json_schema
        assert json.loads(found or "") == {"type": "object"}
        assert json.loads(asked(able, response_format=of).request.sampling.json_schema or "") == schema


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "grammar"},
        {},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": [1]},
        {"type": "json_schema", "json_schema": {"schema": "text"}},
    ],
)
def test_a_format_that_is_none_is_refused_by_name(wanted: dict[str, Any]) -> None:
    for served in (SERVED, replace(SERVED, grammars=True)):
        with pytest.raises(InvalidArgument) as caught:
            chat(served, response_format=wanted)
        assert caught.value.param == "response_format"


def test_penalties_biases_and_logprobs_are_the_engines() -> None:
    body = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25}
    bias = {"5": -100, "7": 0, "200": 2}  # which asks for nothing
    found = completion(**body, logit_bias=bias, logprobs=3, seed=1).request.sampling
    assert {name: getattr(found, name) for name in body} == body
    assert (found.logit_bias, found.logprobs, found.prompt_logprobs) == (((5, -100), (200, 2)), 3, False)
    asked = chat(**body, logit_bias=bias, logprobs=True, top_logprobs=2)
    assert asked.logprobs and asked.request.sampling.logprobs == 2
    assert chat(logprobs=True).request.sampling.logprobs == 0
    echoed = completion(echo=True, logprobs=0).request.sampling
    assert (echoed.logprobs, echoed.prompt_logprobs) == (0, True)


def test_an_echo_may_be_the_whole_answer() -> None:
    asked = completion(echo=True, max_tokens=0, logprobs=1)
    assert asked.echo_only and asked.request.sampling.max_tokens == 1
    assert not completion(echo=True).echo_only


def test_the_best_of_several_are_asked_for_with_their_logprobs() -> None:
    asked = completion(prompt=["a", "b"], n=2, best_of=3)
    assert (asked.n, asked.tries, len(asked.requests), asked.logprobs) == (2, 3, 6, False)
    assert {one.sampling.logprobs for one in asked.requests} == {0}
    tried = [
        AnswerPiece(number, str(number), [0] * size, "length", None, logprob)
        for number, (size, logprob) in enumerate([(1, -3.0), (4, -4.0), (2, -1.0), (1, -2.0), (1, -2.0), (1, -2.5)])
    ]
    found = asked.answer(tried)
    assert [(one["index"], one["text"]) for one in found["choices"]] == [(0, "2"), (1, "1"), (2, "3"), (3, "4")]
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 10, "total_tokens": 12}
    assert completion(n=2, best_of=2).request.sampling.logprobs is None


def test_what_asks_for_nothing_is_taken() -> None:
    body = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {"5": 0}}
    found = completion(n=1, best_of=1, echo=False, logprobs=None, suffix="", user="me", temperature=0, **body)
    assert found.request.sampling.plain and not found.logprobs
    chat(logprobs=False, tools=[], tool_choice="none", response_format={"type": "text"}, logit_bias={})
    assert not chat(logprobs=None, top_logprobs=0).logprobs and not completion(logprobs=False).logprobs


@pytest.mark.parametrize(
    "body",
    [
        {"nonsense": 1},
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_p": 0},
        {"max_tokens": 0},
        {"top_k": -2},
        {"seed": 1 << 64},  # instances could not tell each other
        {"seed": 1e300},
        {"top_k": 1 << 63},
        {"stop_token_ids": [1 << 64]},
    ],
)
def test_values_that_cannot_be_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        completion(**body)
    assert next(iter(body)) in str(caught.value)


def test_what_agents_send_without_asking_for_anything_is_taken() -> None:
    """They could not connect: each of these was refused."""
    for body in (
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"tool_choice": "auto", "function_call": "auto", "parallel_tool_calls": True},
        {"reasoning_effort": "medium", "verbosity": "medium"},
        {"prediction": {"type": "content", "content": "hi"}, "prompt_cache_retention": "24h", "best_of": 1},
    ):
        assert chat(**body).request.prompt == chat().request.prompt
    asked = completion(max_tokens=4.0, n=2.0, top_k=3.0, logprobs=1.0, stop=["a"] * 32, add_special_tokens=True)
    sampling = asked.request.sampling
    assert (sampling.max_tokens, asked.n, sampling.top_k, sampling.logprobs) == (4, 2, 3, 1)
    assert all(type(one) is int for one in (sampling.max_tokens, asked.n, sampling.top_k, sampling.logprobs))


def test_what_a_template_knows_can_be_asked_for() -> None:
    template = "{{ enable_thinking }} {{ reasoning_effort }} {% for one in messages %}{{ one.content }}{% endfor %}"
    served = Served("tiny", byte_tokenizer(template), 100)
    asked = chat(served, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert served.tokenizer.decode(asked.request.prompt) == "False low hi"
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": 1}}
    assert served.tokenizer.decode(tokenize(json.dumps(body).encode(), served)["tokens"]) == "1  hi"


def test_special_tokens_are_added_as_a_body_says() -> None:
    class Marking:
        chat_template = "x"

        def get_vocab(self) -> dict[str, int]:
            return {"<s>": 1, "a": 2}

        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return "a"

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1, 2] if add_special_tokens else [2]

    served = Served("tiny", Marking(), 100)
    for given, plain, templated in ((None, (1, 2), (2,)), (True, (1, 2), (1, 2)), (False, (2,), (2,))):
        assert completion(served, add_special_tokens=given).request.prompt == plain
        assert chat(served, add_special_tokens=given).request.prompt == templated


def test_messages_that_come_back_with_nulls_are_read() -> None:
    """`"content": null` failed with "no attribute", as did an answer of OpenAI's client that was sent back."""
    template = (
        "{% for one in messages %}{% if one.tool_calls is defined %}{{ one.tool_calls[0] }}{% endif %}"
        "{{ one.role }}:{{ one.content.strip() }};{% endfor %}"
    )
    served = Served("tiny", byte_tokenizer(template), 100)
    own = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}
    messages = [{"role": "developer", "content": "be"}, own, {"role": "assistant"}, {"role": "user", "content": "hi"}]
    text = served.tokenizer.decode(chat(served, messages=messages).request.prompt)
    assert text == "system:be;assistant:;assistant:;user:hi;"
    knows = Served("tiny", byte_tokenizer(template + "{# developer #}"), 100)
    assert served.tokenizer.decode(chat(knows, messages=messages[:1]).request.prompt) == "developer:be;"


def test_a_prompts_tokens_are_said_where_vllm_says_them() -> None:
    asked = completion(prompt=["hello", [1, 2]], n=2, return_token_ids=True)
    pieces = [AnswerPiece(number, "x", [9], "length") for number in range(4)]
    found = [tuple(one["prompt_token_ids"]) for one in asked.answer(pieces)["choices"]]
    assert found == [HELLO, HELLO, (1, 2), (1, 2)]
    assert tuple(asked.chunk(pieces[2], True)["choices"][0]["prompt_token_ids"]) == (1, 2)
    assert "prompt_token_ids" not in str(asked.chunk(pieces[2], False))
    talk = chat(return_token_ids=True)
    for object in (talk.answer(pieces[:1]), talk.chunk(pieces[0], True)):
        assert object["prompt_token_ids"] == talk.request.prompt
        assert "prompt_token_ids" not in object["choices"][0] and object["choices"][0]["token_ids"] == [9]
    assert "prompt_token_ids" not in str(talk.chunk(pieces[0], False))
    assert "prompt_token_ids" not in str([completion().answer(pieces[:1]), chat().answer(pieces[:1])])


DEEP = b'{"prompt": "hello", "other": %s}' % (b"[" * 60_000 + b"]" * 60_000)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"prompt": 7}', b"{}", b"\xff", DEEP])
def test_what_is_no_body_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parse(text, COMPLETION, SERVED)


def test_a_model_without_a_tokenizer_or_a_template_says_so() -> None:
    for call, body, served in (
        (completion, {"prompt": "text"}, BARE),
        (completion, {"prompt": [1], "stop": "x"}, BARE),
        (chat, {}, BARE),
        (chat, {}, Served("tiny", byte_tokenizer(None), 100)),
    ):
        with pytest.raises(InvalidArgument):
            call(served, **body)


def test_a_template_that_fails_is_the_bodys_fault() -> None:
    strict = Served("tiny", byte_tokenizer("{{ raise_exception('roles must alternate') }}"), 100)
    with pytest.raises(InvalidArgument) as caught:
        chat(strict)
    assert caught.value.param == "messages" and "roles must alternate" in str(caught.value)


def test_errors_have_openais_form_and_the_right_status() -> None:
    with pytest.raises(UnknownModel) as caught:
        completion(model="other")
    assert (caught.value.model, caught.value.served) == ("other", "tiny")
    statuses = {
        InvalidArgument("x", param="n"): 400,
        caught.value: 404,
        NoCopy("x"): 503,
        InvalidState("x"): 503,
        OutOfBlocks("x"): 503,
        DriverError("x"): 500,
    }
    for error, status in statuses.items():
        assert status_of(error) == status
        assert error_of(error)["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error_of(InvalidArgument("why", param="n")) == {
        "error": {"message": "why", "type": "invalid_request_error", "param": "n", "code": "InvalidArgument"}
    }


class NeverTokenises:
    """A tokenizer that must not be asked for the tokens of a text."""

    chat_template = "x"

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "four": 1}

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        return "a" * 401

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise AssertionError


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    served = Served("tiny", NeverTokenises(), 100)
    for ask, named in (
        (lambda: completion(served, prompt="a" * 401), "prompt"),
        (lambda: completion(served, prompt=["a" * 401]), "prompt"),
        (lambda: completion(served, prompt=[1] * 101), "prompt"),
        (lambda: chat(served), "messages"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            ask()
        assert caught.value.fields["param"] == named
    with pytest.raises(AssertionError):
        completion(served, prompt="a" * 400)  # as long as a prompt may be


def test_choices_are_of_each_prompt_and_have_their_own_seeds() -> None:
    asked = completion(prompt=["a", [1, 2]], n=2, seed=2**63 - 1)
    assert [one.prompt for one in asked.requests] == [(64,), (64,), (1, 2), (1, 2)]
    assert [one.sampling.seed for one in asked.requests] == [2**63 - 1, -(2**63)] * 2
    assert [one.id for one in asked.requests] == [f"{asked.id}-{number}" for number in range(4)]
    assert asked.usage_of(10) == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}
    assert len({one.sampling.seed for one in completion(n=8).requests}) == 8
    assert completion(best_of=3, n=3).n == 3


def test_an_echo_is_the_prompt_as_text() -> None:
    assert completion(prompt=["hello", list(HELLO)], echo=True).echoes == ("hello", "hello")
    assert completion(BARE, prompt=[1], echo=True).echoes == completion().echoes == ("",)


def test_content_in_parts_of_text_is_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    asked = chat(messages=[{"role": "user", "content": parts}])
    assert SERVED.tokenizer.decode(asked.request.prompt) == "user: one\ntwo\nassistant:"
    with pytest.raises(InvalidArgument) as caught:
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert caught.value.param == "messages" and "image_url" in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        {"nonsense": None, "guided_json": None, "use_beam_search": False, "min_tokens": 0, "prompt_logprobs": None},
        {"repetition_penalty": 1.0, "length_penalty": 1, "skip_special_tokens": True},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    ],
)
def test_fields_that_ask_for_nothing_are_ignored(body: dict[str, Any]) -> None:
    assert completion(**body).request.prompt == HELLO


@pytest.mark.parametrize("body", [{"nonsense": 1}, {"prompt_logprobs": 1}, {"skip_special_tokens": False}])
def test_fields_that_ask_for_something_are_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        completion(**body)
    assert [caught.value.param] == list(body)


def test_the_tokens_of_a_prompt_and_of_a_chat() -> None:
    def found(**body: Any) -> Any:
        return tokenize(json.dumps(body).encode(), SERVED)

    assert found(prompt="hello") == {"tokens": HELLO, "count": 5, "max_model_len": 100}
    messages = [{"role": "user", "content": "hi"}]
    assert found(messages=messages)["tokens"] == chat().request.prompt
    for wrong in ({}, {"prompt": "a", "messages": messages}, {"prompt": ""}, {"prompt": "a" * 10**4}):
        with pytest.raises(InvalidArgument):
            found(**wrong)
    with pytest.raises(UnknownModel):
        found(prompt="a", model="other")


def test_a_key_makes_the_same_requests_again_and_other_keys_others() -> None:
    body = json.dumps({"prompt": ["a", "b"], "n": 2, "temperature": 1}).encode()
    one, again, other = (parse(body, COMPLETION, SERVED, key=key).requests for key in ("k", "k", "l"))
    assert one == again and len({(each.id, each.sampling.seed) for each in one + other}) == 8
    assert parse(body, COMPLETION, SERVED).requests != parse(body, COMPLETION, SERVED).requests
    for key in ("", "k" * 257):
        with pytest.raises(InvalidArgument) as caught:
            parse(body, COMPLETION, SERVED, key=key)
        assert caught.value.fields["param"] == "Idempotency-Key"


FIRST_BODIES = """
import json, os, sys, threading
from remap_serve.cluster.openai import CHAT, COMPLETION, parse, tokenize
from test_cluster_openai import BARE, SERVED

sys.setswitchinterval(1e-6)
bodies = json.dumps({"prompt": [1, 2]}).encode(), json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
kinds = (
    lambda: parse(bodies[0], COMPLETION, BARE),
    lambda: parse(bodies[1], CHAT, SERVED),
    lambda: tokenize(bodies[1], SERVED),
)

def many(kind, begin):
    begin.wait()
    for _ in range(40):
        kind()

def life(kind):
    begin = threading.Barrier(4)
    threads = [threading.Thread(target=many, args=(kind, begin)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

# A copied process has met no body.
for kind in kinds * 12:
    child = os.fork()
    if not child:
        life(kind)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("lived")
"""


def test_the_first_bodies_of_a_server_come_in_several_threads() -> None:
    here = Path(__file__).parent
    found = subprocess.run([sys.executable, "-c", FIRST_BODIES], cwd=here, capture_output=True, text=True, check=False)
    assert found.stdout == "lived\n", found.stderr
