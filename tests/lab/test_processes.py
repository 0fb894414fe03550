"""`python -m bench.processes`, with a tiny model: what it serves, and that all sides give the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="servers need torch")
pytest.importorskip("transformers", reason="servers need transformers")
pytest.importorskip("msgspec", reason="messages between processes need msgspec")

from bench.processes import __main__ as processes
from bench.processes.server import SIDES, load, requests_of
from near_tokens import Near

TINY = {"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": True}  # fmt: skip
LOAD = processes.Load(blocks=24, burst=4, gap_s=0.5, every_s=1.0, tokens=(8, 24), running=8, model=TINY)


def test_bursts_come_one_after_another_and_are_the_same_every_time() -> None:
    configs = LOAD.configs("broker", "unix:x")
    assert [config.bursts for config in configs] == [(1.0,), (1.5,), (2.0,)]
    for config in configs:
        made = requests_of(config, 512)
        assert made == requests_of(config, 512)
        assert sum(each.arrival_s == config.bursts[0] for each in made) == LOAD.burst
        assert all(8 <= len(each.prompt) <= 24 and 8 <= each.sampling.max_tokens <= 24 for each in made)


def test_the_table_has_medians_and_ranges() -> None:
    rounds = [{side: {key: float(n) for key, _ in processes.FIELDS} for side in SIDES} for n in (3, 1, 2)]
    lines = processes.table(rounds).splitlines()
    assert len(lines) == 2 + len(SIDES)
    assert lines[2].startswith("| static | 2 (1 to 3) |")


@pytest.mark.slow
def test_three_servers_on_one_broker_give_the_tokens_of_three_alone() -> None:
    pages = processes.pages_of(LOAD)
    said: list[str] = []
    found: dict[str, list[dict[str, Any]]] = {
        side: processes.run_side(side, LOAD, pages, said.append) for side in (SIDES[0], SIDES[-1])
    }
    alone, together = found.values()
    # Who runs beside whom is the clock's, and a row may round otherwise among other rows: see near_tokens.
    model, _ = load(LOAD.configs("static", 0)[0])
    for config, mine, theirs in zip(LOAD.configs("static", 0), alone, together, strict=True):
        requests = requests_of(config, model.config.vocab_size)
        assert len(requests) == len(mine["tokens"]) == len(theirs["tokens"]) > 4
        for request, one, other in zip(requests, mine["tokens"], theirs["tokens"], strict=True):
            assert len(one) == request.sampling.max_tokens and Near(model, request, one) == tuple(other)
    assert len(said) == 2
    assert json.loads(json.dumps(processes.summary(together)))["tokens_per_s"] > 0


def test_results_are_written_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = {"ttft_s": [1.0], "tbt_s": [0.1], "seconds": 2.0, "tokens": [[1, 2]], "preemptions": 0, "recomputed": 0,
              "blocks_peak": 3, "layers_away_peak": 0}  # fmt: skip
    orders: list[str] = []

    def run(side: str, *_: object) -> list[dict[str, Any]]:
        orders.append(side)
        return [server] * 3

    monkeypatch.setattr(processes, "run_side", run)
    monkeypatch.setattr(processes, "pages_of", lambda load: 7)
    assert processes.main(["--rounds", "2", "--out", str(tmp_path / "p.json")]) == 0
    assert orders == [*SIDES, *SIDES[1:], SIDES[0]]
    kept = json.loads((tmp_path / "p.json").read_text())
    assert kept["same_tokens_as_static"]["broker"] == [[3, 3], [3, 3]]
    assert kept["rounds"][0]["static"]["tokens_per_s"] == 3.0
