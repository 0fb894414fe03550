"""A trainer's new weights, loaded between requests through a worker extension, are what layers stream afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import HERE, Vllm
from test_tokens import BURST, answers, assert_remapped, remap, stock

EXTENSION = {"worker_extension_cls": "trainer.Trainer"}


@pytest.fixture(scope="module")
def one(vllm: Vllm) -> Any:
    new, tied = str(vllm.folder / "tiny-new"), str(vllm.folder / "tied-new")
    return vllm.serve(
        [
            stock("old", [BURST]),
            {**stock("new", [BURST]), "model": "tiny-new"},
            {**stock("tied, new", [BURST]), "model": "tied-new"},
            {**remap("loaded", [BURST], **EXTENSION), "keep": True},
            {"name": "load", "use": "loaded", "remap": True, "load": ["load", new], "rounds": [BURST]},
            {**remap("tied", [BURST], **EXTENSION), "model": "tied", "keep": True},
            {"name": "tied, load", "use": "tied", "remap": True, "load": ["load", tied], "rounds": [BURST]},
            {**remap("away", [BURST], **EXTENSION), "calls": [["load", new]], "calls_at": 90},
        ],
        plain_linear=True,
        PYTHONPATH=str(HERE),
    )


def test_streamed_layers_have_the_new_weights(one: Any):
    assert answers(one["loaded"]) == answers(one["old"])
    assert one["load"]["loaded"]["gave"] > 8 * 5
    assert_remapped(one["load"])
    assert answers(one["load"]) == answers(one["new"]) != answers(one["old"])


def test_a_tensor_that_is_embedding_and_head_has_them_too(one: Any):
    assert_remapped(one["tied, load"])
    assert answers(one["tied, load"]) == answers(one["tied, new"]) != answers(one["tied"])


def test_while_layers_are_away_nothing_is_written(one: Any):
    (said,) = one["away"]["called"]
    assert said["remapped"] > 0 and said["error"] == "InvalidState", said
    assert answers(one["away"]) == answers(one["old"])
