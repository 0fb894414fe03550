"""The logits processor chooses what the reference engine would, whatever rows of the batch a request has had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams as VllmSampling
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from remap_serve.cluster.vllm_sampling import OWNER, ChosenTokens, chosen_by_us
from remap_serve.engine.request import Request, SamplingParams, Sequence
from remap_serve.engine.sampling import sample

KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.2, top_k=5, seed=4),
    SamplingParams(temperature=1.0, top_p=0.7, min_p=0.02, seed=5),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.4),
    SamplingParams(temperature=0.6, logit_bias=((3, 9.0), (5, -100.0)), seed=6),
]
PROMPT, MADE, VOCABULARY = [4, 9, 4, 17], [9, 9, 30], 64


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> ChosenTokens:
    monkeypatch.delenv(OWNER, raising=False)  # it would end this process with that one
    return ChosenTokens(None, torch.device("cpu"), False)


def params(sampling: SamplingParams, given: tuple[int, ...] = ()) -> VllmSampling:
    return VllmSampling(temperature=0.0, extra_args=chosen_by_us(sampling, len(PROMPT), given))


def by_reference(sampling: SamplingParams, row: Any) -> int:
    sequence = Sequence.of(Request("r", tuple(PROMPT), sampling), 0)
    sequence.tokens += MADE
    (token,) = sample([SimpleNamespace(sequence=sequence, end=sequence.length)], row[None])
    return token


def test_the_tokens_are_the_reference_engines(processor: ChosenTokens) -> None:
    """Half of the tokens came before a restart: they are of the prompt for vLLM, and not for penalties."""
    generator = torch.Generator().manual_seed(0)
    for behind in range(len(MADE) + 1):
        known, made = PROMPT + MADE[:behind], MADE[behind:]
        added = [(index, params(sampling), known, made) for index, sampling in enumerate(KINDS)]
        processor.update_state(BatchUpdate(len(KINDS), [], added, []))
        for _ in range(10):
            logits = torch.randn(len(KINDS), VOCABULARY, generator=generator)
            expected = [by_reference(sampling, logits[index]) for index, sampling in enumerate(KINDS)]
            assert processor.apply(logits.clone()).argmax(-1).tolist() == expected


def test_rows_move_and_leave(processor: ChosenTokens) -> None:
    logits = torch.zeros(3, VOCABULARY)
    added = [(0, params(SamplingParams(), (7, 8)), PROMPT, []), (2, params(SamplingParams(), (9,)), PROMPT, [])]
    processor.update_state(BatchUpdate(3, [], added, []))
    assert processor.apply(logits.clone()).argmax(-1).tolist() == [7, 0, 9]
    processor.update_state(BatchUpdate(3, [], [], [(0, 1, MoveDirectionality.UNIDIRECTIONAL)]))
    assert processor.apply(logits.clone()).argmax(-1).tolist() == [0, 7, 9]
    processor.update_state(BatchUpdate(3, [], [], [(1, 2, MoveDirectionality.SWAP)]))
    assert processor.apply(logits.clone()).argmax(-1).tolist() == [0, 9, 7]
    processor.update_state(BatchUpdate(2, [2], [], []))
    processor.update_state(None)
    assert processor.apply(logits.clone()).argmax(-1).tolist() == [0, 9, 0]


def test_a_request_with_a_grammar_gets_the_tokens_again_that_it_had(processor: ChosenTokens) -> None:
    made: list[int] = []
    processor.update_state(BatchUpdate(1, [], [(0, params(SamplingParams(), (7, 8)), PROMPT, made)], []))
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 33] = 5.0
    for expected in (7, 8, 33, 33):
        made.append(int(processor.apply(logits.clone()).argmax()))
        assert made[-1] == expected


def test_vllm_chooses_for_itself_where_that_is_the_same(processor: ChosenTokens) -> None:
    assert chosen_by_us(SamplingParams(logprobs=3), 4, ()) is None
    processor.update_state(BatchUpdate(1, [], [(0, params(SamplingParams()), PROMPT, [])], []))
    logits = torch.randn(1, VOCABULARY)
    assert torch.equal(processor.apply(logits.clone()), logits)
    assert not processor.is_argmax_invariant()
