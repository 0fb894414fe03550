"""A trainer's new weights, loaded through a worker extension or by vLLM's own calls, are what computes and streams afterwards:
between requests, and while requests are kept and layers are away."""

from __future__ import annotations

import os
from typing import Any

import pytest
from conftest import HERE, Vllm
from test_tokens import BURST, answers, assert_remapped, remap, stock

EXTENSION = {"worker_extension_cls": "trainer.Trainer"}
TRANSFER = {"weight_transfer_config": {"backend": "folder"}}


def RELOAD(new: str) -> list[Any]:
    return ["reload_weights", None, new]


def transfer(new: str) -> list[list[Any]]:
    chunks = [["update_weights", {"folder": new, "number": number, "of": 3}] for number in range(3)]
    return [["init_weight_transfer_engine", {}], ["start_weight_update"], *chunks, ["finish_weight_update"]]


# In the middle of a burst: the requests go on with the new weights, and the KV of the old ones.
KEPT = {
    "load_weights": (lambda new: [["load", new]], {}),
    "reload_weights": (lambda new: [RELOAD(new)], {}),
    "update_weights": (transfer, TRANSFER),
    "reset_weights": (lambda new: [["reset_weights"]], {}),
}


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
            {**remap("idle, reloaded", [BURST]), "keep": True},
            {"name": "reload", "use": "idle, reloaded", "remap": True, "load": RELOAD(new), "rounds": [BURST]},
            *[
                {**make(f"{kind}, {name}", [BURST], **EXTENSION, **more), "calls": calls(new), "calls_at": 90}
                # The extension becomes a base of stock's worker, and so of ours: then it is not put there again.
                for kind, make in (("remap", remap), ("stock", stock))
                for name, (calls, more) in KEPT.items()
            ],
        ],
        plain_linear=True,
        PYTHONPATH=os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
    )


def test_streamed_layers_have_the_new_weights(one: Any):
    assert answers(one["loaded"]) == answers(one["old"])
    assert one["load"]["loaded"]["gave"] > 8 * 5
    assert_remapped(one["load"])
    assert answers(one["load"]) == answers(one["new"]) != answers(one["old"])


def test_a_tensor_that_is_embedding_and_head_has_them_too(one: Any):
    assert_remapped(one["tied, load"])
    assert answers(one["tied, load"]) == answers(one["tied, new"]) != answers(one["tied"])


def test_vllms_own_call_between_requests(one: Any):
    assert "error" not in one["reload"]["loaded"], one["reload"]["loaded"]
    assert_remapped(one["reload"])
    assert answers(one["reload"]) == answers(one["new"])


@pytest.mark.parametrize("name", KEPT)
def test_while_requests_are_kept_and_layers_are_away(one: Any, name: str):
    """As a stock vLLM to which the same happens before the same step."""
    mine, stocks = one[f"remap, {name}"], one[f"stock, {name}"]
    for said in (*mine["called"], *stocks["called"]):
        assert "error" not in said, said
    assert all(said["remapped"] > 0 for said in mine["called"])
    assert mine["rounds"][0]["steps"] == stocks["rounds"][0]["steps"]
    assert answers(mine) == answers(stocks) != answers(one["old"])
    assert_remapped(mine)
