"""Text that comes token by token, against the text of all tokens at once."""

from __future__ import annotations

import pytest
from cluster_folder import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from remap_serve.cluster.answer_text import AnswerText

TOKENIZER = byte_tokenizer()


def answered(tokens: list[int], sizes: list[int], stops: list[str]) -> tuple[str, bool]:
    """The text of tokens that come so many at a time."""
    text, found = AnswerText(TOKENIZER, stops), ""
    while tokens and not text.stopped:
        size = sizes.pop() if sizes else 1
        part, tokens = tokens[:size], tokens[size:]
        found += text.add(part, not tokens)
    return found, text.stopped


def expected(tokens: list[int], stops: list[str]) -> tuple[str, bool]:
    text = TOKENIZER.decode(tokens, skip_special_tokens=True)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


@given(
    text=st.text("abé€😀 ", max_size=24),
    sizes=st.lists(st.integers(1, 6), max_size=24),
    stops=st.lists(st.text("abé ", min_size=1, max_size=4), max_size=4),
)
def test_text_is_that_of_all_tokens_up_to_the_first_stop(text: str, sizes: list[int], stops: list[str]) -> None:
    tokens = TOKENIZER.encode(text)
    assert answered(tokens, sizes, stops) == expected(tokens, stops)


@given(tokens=st.lists(st.integers(0, 256), max_size=16), sizes=st.lists(st.integers(1, 4), max_size=16))
def test_bytes_that_are_no_text_and_the_end_token_lose_nothing(tokens: list[int], sizes: list[int]) -> None:
    assert answered(tokens, sizes, []) == expected(tokens, [])


def test_nothing_that_may_still_change_is_given_out() -> None:
    text = AnswerText(TOKENIZER, ["END"])
    euro = TOKENIZER.encode("€")
    assert [text.add([byte], False) for byte in euro] == ["", "", "€"]
    assert text.add(TOKENIZER.encode("xEN"), False) == "x"
    assert text.add(TOKENIZER.encode("EN"), False) == "EN"  # "ENE" is none, but "EN" may begin one again
    assert text.add(TOKENIZER.encode("D"), False) == "" and text.stopped
    assert text.add(TOKENIZER.encode("more"), True) == ""


class Words:
    """Drops the space in front of a text, as sentencepiece does; token 0 is special."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(f" w{token}" for token in tokens if token).removeprefix(" ")


def test_a_special_token_between_two_words_keeps_the_space() -> None:
    text = AnswerText(Words())
    assert "".join(text.add([token], False) for token in (1, 0, 2, 0, 0, 3)) == "w1 w2 w3"


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert AnswerText(None).add([1, 2], True) == ""


@given(
    text=st.text("abé€ ", min_size=1, max_size=16),
    sizes=st.lists(st.integers(1, 6), max_size=16),
    stops=st.lists(st.text("abé ", min_size=1, max_size=3), max_size=3),
)
def test_how_many_tokens_an_answer_has_does_not_depend_on_how_they_come(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    def taken(sizes: list[int]) -> tuple[str, int]:
        answer, found, count, tokens = AnswerText(TOKENIZER, stops), "", 0, TOKENIZER.encode(text)
        while tokens and not answer.stopped:
            size = sizes.pop() if sizes else 1
            part, tokens = tokens[:size], tokens[size:]
            new, used = answer.take(part, not tokens)
            found, count = found + new, count + used
        return found, count

    assert taken(sizes) == taken([])
