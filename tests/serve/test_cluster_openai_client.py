"""OpenAI's own client against the endpoints: it parses every answer into its own types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs openai, which no extra brings")
pytest.importorskip("msgspec", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("fastapi", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("transformers", reason="needs the extras cluster, test-cluster and transformers")

import httpx
import openai
from test_cluster_server import SERVED, client_of, expected, serving


def test_openais_client_gets_what_it_asks_for(tmp_path: Path) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]

    async def body(http: httpx.AsyncClient, *_: Any) -> None:
        app = http._transport.app  # type: ignore[attr-defined]
        client = openai.AsyncOpenAI(
            api_key="none", base_url="http://test/v1", http_client=client_of(app), max_retries=0
        )
        assert [one.id async for one in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"

        found = await client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=5, echo=True, seed=1)
        assert [one.index for one in found.choices] == [0, 1, 2, 3]
        tokens = expected(f"{found.id}-2", 5)
        assert found.choices[2].text == "b" + SERVED.tokenizer.decode(tokens)
        assert (found.choices[2].finish_reason, found.usage.completion_tokens) == ("length", 20)

        # The double has no logits: that the fields are taken, and the answers are the client's types, is all to see here.
        asked: Any = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"5": 1}}
        whole = await client.chat.completions.create(
            model="tiny", messages=messages, max_completion_tokens=5, user="me", logprobs=True, top_logprobs=2, **asked
        )
        assert whole.choices[0].logprobs.content == []
        scored = await client.completions.create(model="tiny", prompt="a", logprobs=1, best_of=2, **asked)
        assert scored.choices[0].logprobs.tokens == []

        assert whole.choices[0].message.content == SERVED.tokenizer.decode(expected(whole.id, 5))

        # An answer goes back with its nulls, and what an agent sends beside it asks for nothing.
        own = whole.choices[0].message.model_dump() | {"content": None}
        more_of_it: Any = [{"role": "developer", "content": "b"}, own]
        tools: Any = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
        again = await client.chat.completions.create(
            model="tiny",
            messages=more_of_it,
            max_tokens=5,
            reasoning_effort="low",
            extra_headers={"X-Request-Id": "me"},
            **tools,
        )
        assert again._request_id == "me" and again.usage.prompt_tokens > whole.usage.prompt_tokens

        more: Any = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 20}
        stream = await client.chat.completions.create(model="tiny", messages=messages, **more)
        chunks = [one async for one in stream]
        text = "".join(one.choices[0].delta.content for one in chunks if one.choices)
        assert text == SERVED.tokenizer.decode(expected(chunks[0].id, 20))
        assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 20)

        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="tiny", messages=messages, response_format={"type": "json_object"}
            )
        assert (caught.value.param, caught.value.code) == ("response_format", "InvalidArgument")
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="a")

    serving(tmp_path, body)
