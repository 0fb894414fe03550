"""What reads or writes all weights while layers are away is right, or refused before anything has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Vllm
from safetensors.torch import load_file
from test_tokens import BURST, PLENTY, answers, assert_remapped, remap

REFUSED = [
    ["sleep", 1],
    ["wake_up"],
    ["checkpoint_prepare"],
    ["checkpoint_restore"],
]


@pytest.fixture(scope="module")
def saved(vllm: Vllm) -> Any:
    """Engines that are called in the middle of a burst: one with layers away, one with room for all. vLLM without remap is no
    reference: on a CPU it gives linear weights away, and saves what is left of them."""
    for name in ("home", "away"):
        (vllm.folder / name).mkdir()
    reads = {
        name: [["save_sharded_state", str(vllm.folder / name)], ["compute_weight_checksums"]]
        for name in ("home", "away")
    }
    return vllm.serve(
        [
            {**remap("home", [BURST], **PLENTY), "calls": reads["home"], "calls_at": 90},
            {
                **remap("away", [BURST]),
                "calls": [*reads["away"], ["save_tensorized_model", None], *REFUSED],
                "calls_at": 90,
            },
            {
                **remap("packed", [BURST[:1]], **PLENTY),
                "settings": {"cpu_linear": "packed"},
                "calls": [["save_sharded_state", str(vllm.folder)], ["save_tensorized_model", None]],
                "calls_at": 2,
            },
        ]
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def test_sharded_state_is_what_was_loaded(vllm: Vllm, saved: Any):
    for name in ("home", "away"):
        called = saved[name]["called"][0]
        assert "error" not in called, called
        assert (called["remapped"] > 0) is (name == "away")
    loaded, home, away = (weights(vllm.folder / name) for name in ("tiny", "home", "away"))
    assert sorted(home) == sorted(away) and len(away) > 8 * 6
    assert [name for name in home if not torch.equal(home[name], away[name])] == []
    alike = sorted(loaded.keys() & away.keys())  # what vLLM has not put together
    assert len(alike) > 8 * 4
    assert [name for name in alike if not torch.equal(loaded[name], away[name])] == []


@pytest.mark.parametrize(("call", "name"), [(1, "compute_weight_checksums"), (2, "save_tensorized_model")])
def test_what_reads_weights_where_they_lie_is_refused_while_layers_are_away(saved: Any, call: int, name: str):
    said = saved["away"]["called"][call]
    assert said["remapped"] > 0
    assert said.get("error") == "InvalidState", said
    assert name in said["text"] and "nothing was read or written" in said["text"]
    assert len(saved["home"]["called"][1]["gave"]) > 8 * 6


def test_packed_weights_are_not_written(saved: Any):
    for said in saved["packed"]["called"]:
        assert said.get("error") == "InvalidState" and "REMAP_CPU_LINEAR" in said["text"], said


def test_what_would_write_is_refused_and_nothing_changes(saved: Any):
    for call, said in zip(REFUSED, saved["away"]["called"][3:]):
        assert said.get("error") == "InvalidState", (call, said)
        assert "nothing" in said["text"]
    assert_remapped(saved["away"])
    assert answers(saved["away"]) == answers(saved["home"])
