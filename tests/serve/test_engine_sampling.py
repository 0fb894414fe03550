"""Penalties, biases, cuts and logprobs against a slow reference, and of whole engines against transformers' own logits."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from near_tokens import near_tokens  # noqa: E402
from test_engine_runner import make_model, make_tenant, prompts  # noqa: E402

from reference import sampling_reference as reference  # noqa: E402
from remap.errors import InvalidArgument  # noqa: E402
from remap_serve.engine import LLMEngine, Request, SamplingParams, sampling  # noqa: E402
from remap_serve.engine.chunk import Chunk  # noqa: E402
from remap_serve.engine.request import Sequence  # noqa: E402
from remap_serve.engine.sampling import changed_logits, logprobs_of, sample, scores  # noqa: E402
from remap_serve.engine.throughput import ThroughputEngine  # noqa: E402

VOCABULARY = 9
# Halves, so that there are ties, and no sum rounds.
LOGITS = st.lists(st.integers(-16, 16).map(lambda each: each / 2), min_size=VOCABULARY, max_size=VOCABULARY)
TEXTS = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
PENALTY = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 2.0])
BIASES = st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.0, 0.5, 100.0]), max_size=3)


@given(
    LOGITS, TEXTS.filter(bool), TEXTS, PENALTY, PENALTY, st.sampled_from([0.5, 1.0, 2.0]), BIASES, st.integers(0, 12)
)
def test_penalties_and_logprobs_are_the_references(
    logits, prompt, answer, presence, frequency, repetition, bias, count
):
    asked = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
        logprobs=count,
    )
    changed = reference.changed(
        logits, prompt, answer, presence=presence, frequency=frequency, repetition=repetition, bias=bias
    )
    given_logits = torch.tensor(logits)
    assert changed_logits(given_logits, asked, prompt + answer, len(prompt)).tolist() == pytest.approx(changed)
    assert given_logits.tolist() == logits
    sequence = Sequence.of(Request("r", tuple(prompt), asked), 0)
    sequence.tokens += answer
    length = sequence.length
    (token,) = sample([Chunk(sequence, length - 1, 1)], torch.tensor([logits]))
    assert token == changed.index(max(changed))
    noted = sequence.noted[length]
    each, top = reference.logprobs(logits, count)  # by the model's logits alone
    assert noted.token == token and noted.logprob == pytest.approx(each[token])
    assert [one for one, _ in noted.top] == [one for one, _ in top]
    assert [value for _, value in noted.top] == pytest.approx([value for _, value in top])


@given(LOGITS, st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.01, 0.25, 0.6, 1.0]), PENALTY)
def test_min_p_keeps_the_references_tokens_of_changed_logits(logits, temperature, min_p, presence):
    asked = SamplingParams(temperature=temperature, min_p=min_p, presence_penalty=presence)
    prompt, answer = [0], [1, 2]
    changed = reference.changed(logits, prompt, answer, presence=presence)
    likely = reference.softmax([each / temperature for each in changed])
    found = scores(changed_logits(torch.tensor(logits), asked, prompt + answer, 1), asked, 3)
    for token, kept in enumerate(reference.kept(changed, temperature, min_p)):
        if abs(likely[token] - min_p * max(likely)) > 1e-12:  # else rounding decides
            assert math.isfinite(found[token]) == kept


def test_logprobs_are_numbers_that_json_has():
    found = logprobs_of(torch.tensor([0.0, -math.inf, -1e30]), 1, 3)
    assert found.logprob == -9999.0 and [token for token, _ in found.top] == [0, 1, 2]
    assert math.isfinite(logprobs_of(torch.tensor([0.0, math.nan]), 0, 2).logprob)


@pytest.mark.parametrize(
    "wrong",
    [
        {"presence_penalty": math.nan},
        {"frequency_penalty": 2.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
        {"logprobs": 21},
        {"prompt_logprobs": True},
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong):
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**wrong)
    assert [caught.value.param] == list(wrong) and next(iter(wrong)) in str(caught.value)


def test_a_bias_of_a_token_that_the_model_has_not_is_refused_before_anything_runs():
    model = make_model("llama")
    for runner in ("cpu", "gpu"):
        engine = LLMEngine(model, make_tenant(model), runner=runner)
        with pytest.raises(InvalidArgument) as caught:
            engine.add_request(Request("r", (1,), SamplingParams(logit_bias=((97, 1.0),))))
        assert (caught.value.param, engine.unfinished) == ("logit_bias", 0)


def test_offline_batches_have_no_logprobs_of_prompts():
    with pytest.raises(InvalidArgument) as caught:
        ThroughputEngine.add_request(None, Request("r", (1, 2), SamplingParams(logprobs=1, prompt_logprobs=True)))
    assert caught.value.param == "prompt_logprobs"


ASKED = [
    SamplingParams(20, logprobs=2, prompt_logprobs=True),
    SamplingParams(20, logprobs=0, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(20, temperature=0.9, seed=3, logprobs=3, repetition_penalty=1.5, logit_bias=((7, 4.0), (9, -100.0))),
    SamplingParams(20, temperature=0.9, seed=4, min_p=0.02, presence_penalty=-1.0),
    SamplingParams(20),
]


@torch.no_grad()
def check_noted(model, request, output):
    """Logprobs of transformers' own logits, behind the same tokens."""
    known, first = [*request.prompt, *output.tokens], len(request.prompt)
    asked = request.sampling
    places = range(1 if asked.prompt_logprobs else first, len(known)) if asked.logprobs is not None else ()
    noted = [*output.prompt_logprobs, *output.logprobs]
    assert [one.token for one in noted] == [known[place] for place in places]
    logits = model(torch.tensor([known]), use_cache=False).logits[0].double().log_softmax(-1)
    for place, one in zip(places, noted, strict=True):
        values = logits[place - 1]
        assert one.logprob == pytest.approx(float(values[one.token]), abs=1e-4)
        top, likely = [value for _, value in one.top], values.topk(asked.logprobs).values.tolist()
        assert top == pytest.approx(likely, abs=1e-4)
        assert top == pytest.approx([float(values[token]) for token, _ in one.top], abs=1e-4)


@pytest.mark.parametrize("runner", ["cpu", "gpu"])
def test_engines_note_logprobs_and_count_what_was_said_whoever_is_preempted(runner):
    """Prompts are cut, and requests lose their KV and are computed again."""
    model = make_model("qwen2")
    requests = [
        Request(f"r{n}", text, ASKED[n % len(ASKED)]) for n, text in enumerate(prompts(7, seed=5, low=20, high=40))
    ]
    roomy = LLMEngine(model, make_tenant(model, blocks=200), runner=runner).run(requests)
    tight = LLMEngine(
        model,
        make_tenant(model, blocks=24),
        max_num_seqs=3,
        max_batch_tokens=32,
        runner=runner,
        reserve_full_prompt=False,
    ).run(requests)
    assert tight.metrics.preemptions > 0
    near = near_tokens(model, requests, roomy.outputs)
    for result in (roomy, tight):
        assert {id: one.tokens for id, one in result.outputs.items()} == near
        for request in requests:
            check_noted(model, request, result.outputs[request.id])
    said = Counter(roomy.outputs["r1"].tokens).most_common(1)[0][1]
    free = replace(requests[1], id="free", sampling=SamplingParams(20))
    plain = LLMEngine(model, make_tenant(model), runner=runner).run([free]).outputs["free"]
    assert said < Counter(plain.tokens).most_common(1)[0][1]  # or this test shows nothing


@pytest.mark.parametrize("runner", ["cpu", "gpu"])
def test_who_asks_for_nothing_costs_nothing(runner, monkeypatch):
    """Greedy requests need the largest logit alone: no call beyond that, and no second product with the head."""
    called, heads = Counter(), []
    for name in ("scores", "changed_logits", "logprobs_of"):
        plain = getattr(sampling, name)
        monkeypatch.setattr(
            sampling, name, lambda *args, plain=plain, name=name: (called.update([name]), plain(*args))[1]
        )
    model = make_model("llama")

    def run(*asked):
        called.clear()
        engine = LLMEngine(model, make_tenant(model), runner=runner, graphs="off")
        head = engine.runner.decoder.head
        heads.clear()
        monkeypatch.setattr(engine.runner.decoder, "head", lambda hidden: (heads.append(len(hidden)), head(hidden))[1])
        engine.run([Request(str(n), (1, 2, 3, 4), one) for n, one in enumerate(asked)])
        return dict(called), list(heads)

    greedy = SamplingParams(4)
    calls, alone = run(greedy, greedy)
    assert calls == {} and len(alone) == 4  # one product for each pass
    calls, beside = run(greedy, SamplingParams(4, logprobs=0, presence_penalty=1.0))
    assert calls == dict.fromkeys(("scores", "changed_logits", "logprobs_of"), 4)  # of the one who asks
    assert len(beside) == (8 if runner == "gpu" else 4)
