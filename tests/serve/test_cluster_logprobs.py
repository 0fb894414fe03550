"""Logprobs and penalties through stages, changes, failures and the endpoints: the same wherever and however often a request is
computed; and how they are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("fastapi", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("prometheus_client", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("httpx", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("transformers", reason="needs the extras cluster, test-cluster and transformers")

import httpx
import torch
from cluster_folder import byte_tokenizer, save_model
from cluster_instances import Cluster, expected_tokens
from models import LAYERS, VOCAB, make
from test_cluster_stage import passed, pipeline
from test_engine_sampling import check_noted
from transformers import AutoModelForCausalLM

from remap_serve.cluster import served_model
from remap_serve.cluster.answers import Deadline, pieces
from remap_serve.cluster.app import make_app
from remap_serve.cluster.control import Control, GroupPolicy
from remap_serve.cluster.front import Front, Lost
from remap_serve.cluster.ledger import RequestLedger
from remap_serve.cluster.logprobs import LogprobText, joined
from remap_serve.cluster.messages import Part, Tokens
from remap_serve.cluster.metrics import ClusterMetrics
from remap_serve.cluster.openai import COMPLETION, parse
from remap_serve.cluster.prompts import Served
from remap_serve.cluster.vocabulary import Vocabulary, shown
from remap_serve.engine import Output, Request, SamplingParams, TokenLogprobs
from remap_serve.engine.request import Sequence
from remap_serve.engine.scheduler import Scheduler

ASKED = [
    SamplingParams(14, logprobs=2, prompt_logprobs=True, presence_penalty=1.5),
    SamplingParams(14, temperature=0.9, seed=1, logprobs=0, repetition_penalty=1.4, min_p=0.01),
    SamplingParams(14, frequency_penalty=1.0, logit_bias=((3, -100.0), (4, 2.0))),
    SamplingParams(14),
]


def asking(count: int, low: int = 20, high: int = 50) -> list[Request]:
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(low, high, (count,), generator=generator).tolist()
    texts = [tuple(torch.randint(1, VOCAB, (size,), generator=generator).tolist()) for size in sizes]
    return [Request(f"r{n}", text, ASKED[n % len(ASKED)]) for n, text in enumerate(texts)]


def test_where_layers_are_cut_changes_no_bit_of_tokens_and_logprobs() -> None:
    model, found = make("llama"), []
    for cuts in ((0, 6, 6), (0, 0, 2, 6)):
        with ExitStack() as stack:
            stages, pool = pipeline(stack, model, cuts, 40)
            scheduler = Scheduler(block_tokens=4, max_num_seqs=6, max_batch_tokens=60)
            sequences = [Sequence.of(one, order) for order, one in enumerate(asking(5))]
            for sequence in sequences:
                scheduler.add(sequence)
            while scheduler.running or scheduler.waiting:
                schedule = scheduler.schedule(pool)
                samplers, tokens = passed(stages, schedule.chunks)
                for chunk in schedule.chunks:
                    scheduler.commit(chunk)
                for chunk, token in zip(samplers, tokens, strict=True):
                    if chunk.sequence.append(token) is not None:
                        scheduler.finish(chunk.sequence, pool)
            found.append([one.output("length") for one in sequences])
    for request, output in zip(asking(5), found[0], strict=True):
        check_noted(model, request, output)
    assert found[0][0].prompt_logprobs and found[0] == found[1]


def test_logprobs_are_the_same_after_a_merger_and_the_loss_of_an_instance() -> None:
    model, requests = make("qwen2"), asking(8, 60, 110)
    expected = expected_tokens(model, requests)
    # While this thread does not run, instances may answer all before one of them is lost.
    assert any(lost_under(model, requests, expected) for _ in range(3)), (
        "each time all had been answered before the loss"
    )


def lost_under(model: Any, requests: Any, expected: Any) -> int:
    """Requests that had to start again when an instance of three was lost. All answers are right."""
    with Cluster(model, 3, blocks=120) as cluster:
        cluster.submit("i0", requests)
        cluster.until(lambda: cluster.tokens)
        cluster.change((("i0", 2), ("i1", 4), ("i2", 6)))
        cluster.until(lambda: len(cluster.tokens) >= 5)
        cluster.end("i1")
        cluster.epoch += 1
        lost = {id for name in ("i0", "i2") for id in cluster.instances[name].recover(cluster.epoch)}
        for name in ("i0", "i2"):
            cluster.groups[name] = (Part(name, 0, LAYERS),)
        # What was made before is taken before the requests start again.
        cluster.until(lambda: all(cluster.settled(name, cluster.epoch) for name in cluster.instances))
        for number, one in enumerate(request for request in requests if request.id in lost):
            cluster.instances[("i0", "i2")[number % 2]].submit(one, 2, cluster.delivered(one.id))
        found = cluster.answers(requests)
        assert found == expected
        for one in requests:
            noted = tuple(logprobs for _, logprobs in sorted(cluster.noted[one.id].items()))
            check_noted(model, one, Output(one.id, found[one.id], "length", 0, noted, cluster.prompts[one.id]))
    return len(lost)


def test_the_ledger_delivers_logprobs_once_and_with_their_tokens() -> None:
    ledger, notes = RequestLedger[str](), [TokenLogprobs(place, -float(place), ()) for place in range(4)]
    ledger.add("r", "x")
    ledger.send("r", "a")
    assert ledger.take(Tokens("r", 1, 2, (2,), None, (notes[2],))) is None
    first = ledger.take(Tokens("r", 1, 0, (0,), None, (notes[0],), (notes[3],)))
    assert first is not None and (first.noted, first.prompt) == ((notes[0],), (notes[3],))
    ledger.send("r", "b")  # what came early is made again
    second = ledger.take(Tokens("r", 2, 1, (1, 2), None, (notes[1], notes[2])))
    assert second is not None and (second.tokens, second.noted, second.prompt) == ((1, 2), (notes[1], notes[2]), ())
    last = ledger.take(Tokens("r", 2, 2, (2, 3), "length", (notes[2], notes[3])))
    assert last is not None and (last.tokens, last.noted) == ((3,), (notes[3],))


# -- how they are written ------------------------------------------------------------------------------------------------------


def sentencepiece() -> Any:
    """Words with a mark at their front, and bytes, as Llama 2 has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581one", "\u2581a", "b", "\u2581"]
    made = Tokenizer(
        models.BPE(vocab={piece: place for place, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def test_tokens_are_shown_by_their_bytes() -> None:
    tokenizer = byte_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    for text in ("a", " b", "é", "\n", "€😀"):
        assert b"".join(map(vocabulary.bytes_of, tokenizer.encode(text))) == text.encode()
    assert len({vocabulary.bytes_of(token) for token in range(256)}) == 256
    assert vocabulary.bytes_of(256) == b"</s>" and vocabulary.in_text(256, False) == b""
    assert vocabulary.bytes_of(5000) == b""  # of a model with a longer vocabulary than the tokenizer's
    assert shown(b"\xe2\x82") == "bytes:\\xe2\\x82"
    assert Vocabulary(None).bytes_of(7) == b"token_id:7"
    pieces = Vocabulary(sentencepiece())
    one, a, b, mark = range(258, 262)
    assert [pieces.bytes_of(token) for token in (one, a, b, mark, 2 + 0xE2)] == [b" one", b" a", b"b", b" ", b"\xe2"]
    assert (pieces.in_text(one, True), pieces.in_text(one, False)) == (b"one", b" one")


def test_a_completion_has_four_lists_and_offsets_in_its_text() -> None:
    tokenizer = byte_tokenizer()
    tokens = [*tokenizer.encode("aé"), 256]
    notes = [TokenLogprobs(token, -1.0, ((token, -1.0), (64, -2.0))) for token in tokens]
    written = LogprobText(Vocabulary(tokenizer), False)
    found = joined([written.of_first(64), written.of(notes[:2]), written.of(notes[2:])])
    assert found == {
        "tokens": ["a", "a", "bytes:\\xc3", "bytes:\\xa9", "</s>"],
        "token_logprobs": [None, -1.0, -1.0, -1.0, -1.0],
        "top_logprobs": [
            None,
            {"a": -1.0},  # the same text twice: the likelier one
            *({shown: -1.0, "a": -2.0} for shown in ("bytes:\\xc3", "bytes:\\xa9", "</s>")),
        ],
        "text_offset": [0, 1, 2, 2, 3],
    }
    other = LogprobText(Vocabulary(tokenizer), False).of([TokenLogprobs(64, -3.0, ((65, -0.5),))])
    assert other["top_logprobs"] == [{"b": -0.5, "a": -3.0}]  # the token itself is always there
    pieces = LogprobText(Vocabulary(sentencepiece()), False)
    assert pieces.of([TokenLogprobs(token, -1.0, ()) for token in (258, 259)])["text_offset"] == [0, 3]
    assert joined([]) is None


def test_a_chat_has_an_object_for_each_token() -> None:
    written = LogprobText(Vocabulary(byte_tokenizer()), True)
    found = written.of([TokenLogprobs(64, -3.0, ((65, -0.5),))])
    top = {"token": "b", "logprob": -0.5, "bytes": [98]}
    assert found == {"content": [{"token": "a", "logprob": -3.0, "bytes": [97], "top_logprobs": [top]}]}


# -- from end to end -----------------------------------------------------------------------------------------------------------


class Connection:
    """To an instance of this process with a model; a killed one comes back, as another."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.instance = self._make()
        self._lost = asyncio.Event()

    def _make(self) -> Any:
        return served_model.make(self.name, str(self.folder), None, 1, max_batch_tokens=64)

    async def call(self, method: str, *arguments: object) -> Any:
        lost = self._lost
        work = asyncio.ensure_future(asyncio.to_thread(getattr(self.instance, method), *arguments))
        gone = asyncio.ensure_future(lost.wait())
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if lost.is_set():
            work.cancel()
            raise Lost("the instance is gone", instance=self.name, returns=True)
        return work.result()

    def kill(self) -> None:
        self._lost.set()
        self.instance.close()
        self._lost, self.instance = asyncio.Event(), self._make()


def test_a_killed_instance_and_a_pipeline_change_no_token_and_no_logprob(tmp_path: Path) -> None:
    save_model(tmp_path)
    tokenizer = byte_tokenizer()
    served = Served("tiny", tokenizer, 256)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    drawn = {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "logit_bias": {"10": 2, "256": -100}}
    bodies: list[dict[str, Any]] = [
        {"prompt": "Once upon a time", "echo": True, "logprobs": 2, "frequency_penalty": 0.7, "temperature": 0},
        {"prompt": [5] * 40, "logprobs": 0, **drawn},
    ]
    more = {"max_tokens": 60, "ignore_eos": True}

    async def stream(front: Front[Request], body: dict[str, Any], then: Callable[[], None]) -> dict[str, Any]:
        """The choice, put together; `then` is called when it has some of its tokens."""
        asked = parse(json.dumps(body | more).encode(), COMPLETION, served)
        text, tokens, parts, called = "", [], [], False
        async for piece in pieces(front, served, ClusterMetrics(front), asked, Deadline(60.0)):
            text, tokens = text + piece.text, tokens + piece.tokens
            parts.append(piece.logprobs)
            if len(tokens) >= 8 and not called:
                called = True
                then()
        return {"text": text, "token_ids": tokens, "logprobs": joined(parts)}

    async def run(policy: str, kill: bool) -> list[dict[str, Any]]:
        connections = [Connection(name, tmp_path) for name in "ab"]
        described = connections[0].instance.describe()
        network = served_model.ASSUMED
        front = Front[Request](
            Control(described.model, network, GroupPolicy(policy, 2), 60.0), connections, lambda one: len(one.prompt)
        )
        found = []
        try:
            await front.start()
            transport = httpx.ASGITransport(make_app(front, served))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                while policy == "pipeline" and len(front.groups) > 1:
                    await asyncio.sleep(0.02)
                for body in bodies:
                    if kill:
                        found.append(await stream(front, body, connections[0].kill))
                    else:
                        found.append((await client.post("/v1/completions", json=body | more)).json()["choices"][0])
            assert front.failure is None and (front.restarts > 0) == kill
        finally:
            await front.close()
            for each in connections:
                each.instance.close()
        return found

    plain, disturbed = (
        asyncio.run(asyncio.wait_for(run(*how), 120.0)) for how in (("alone", False), ("pipeline", True))
    )
    for body, one, other in zip(bodies, plain, disturbed, strict=True):
        assert (one["text"], one["token_ids"]) == (other["text"], other["token_ids"]) and len(one["token_ids"]) == 60
        mine, its = one["logprobs"], other["logprobs"]
        assert (mine["tokens"], mine["text_offset"]) == (its["tokens"], its["text_offset"])
        echoed = list(body["prompt"].encode()) if body.get("echo") else []
        known = [*(tokenizer.encode(body["prompt"]) if echoed else body["prompt"]), *one["token_ids"]]
        with torch.no_grad():
            values = model(torch.tensor([known])).logits[0].log_softmax(-1)
        shown = len(mine["tokens"])
        places = range(len(known) - shown, len(known))
        wanted = [float(values[place - 1, known[place]]) if place else None for place in places]
        assert shown == 60 + len(echoed)
        for found in (mine, its):
            assert found["token_logprobs"] == [pytest.approx(each, abs=1e-4) for each in wanted]
        for place, top in zip(places, mine["top_logprobs"], strict=True):
            assert top is None or max(top.values()) <= float(values[place - 1].max()) + 1e-4
