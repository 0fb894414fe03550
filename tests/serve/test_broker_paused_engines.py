"""Two servers in two processes on the pages of one broker: while one is paused its KV goes to its host memory, the other one
grows into its place, and both give the tokens that each gives alone."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from broker_paused_serving import PAGE, Server, Serving

from remap.broker.server import Broker

PAGES, REQUESTS = 60, 12


def alone(seed: int) -> dict[str, list[int]]:
    server = Server(str(400 * PAGE), seed)
    with closing(server.session):
        server.ask(REQUESTS, 0)
        tokens: dict[str, list[int]] = json.loads(server.finish())
        return tokens


def test_a_server_grows_by_the_kv_of_one_that_is_paused_and_the_tokens_of_both_stay(tmp_path: Path) -> None:
    where = f"unix:{tmp_path / 's'}"
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE) as broker, closing(Serving(where, 2)) as two:
        one = Server(where, 1)
        with closing(one.session):
            two.await_ready()
            one.ask(REQUESTS, 20)
            one.pause()
            before, pages = one.live_blocks, one.pages
            two("ask", REQUESTS, 0)
            while two("step") != "0":
                one.rest()
            assert two("preempted") == "0 0"
            assert one.live_blocks < before, "live blocks went to host memory"
            assert one.pages < pages
            assert broker.ledger.lent == {}, "no layer went"
            one.resume()
            tokens = {1: json.loads(one.finish()), 2: json.loads(two("finish"))}
            assert one.preempted().endswith(" 0"), "nothing was recomputed"
    for seed, found in tokens.items():
        assert found == alone(seed)
        assert len(found) == REQUESTS
