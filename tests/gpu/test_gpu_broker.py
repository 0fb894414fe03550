"""A broker whose pages are the device's, with members in processes of their own: KV and weights go from one to another, whole.

The same on the host, and much more of it: tests/python/test_broker.py, which also runs on the emulated driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PAGES, LARGE = 72, 2 << 20


@pytest.fixture
def start(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Callable[[str, int], Any]]]:
    """(the broker, what starts a member)."""
    pytest.importorskip("msgspec", reason="messages between processes need msgspec")
    from broker_member import Process

    from remap.broker.server import Broker

    monkeypatch.setenv("REMAP_TEST_PAGE", str(LARGE))
    made: list[Process] = []
    with Broker(tmp_path / "s", PAGES * LARGE, LARGE, "cuda:0") as broker:

        def one(name: str, layers: int) -> Process:
            made.append(Process(str(broker.path), name, layers))
            return made[-1]

        yield broker, one
        for each in made:
            if each.process.poll() is None:
                each.kill()


def test_kv_and_weights_go_from_process_to_process(start: tuple[Any, Callable[[str, int], Any]]) -> None:
    from broker_member import until

    broker, begin = start
    one, two = begin("one", 12), begin("two", 12)
    assert int(one("take", 200, 0)) > 8
    assert broker.ledger.free == 0
    assert one("check") == two("check") == "right"
    assert one("free") == "freed"
    # Layers of the one that sleeps become the other's KV, which has none of its bytes, and come home.
    assert one("sleep") == "asleep"
    assert int(two("take", 200, 0)) > 8
    until(lambda: int(one("gone").split()[0]) > 0, "layers of the first are lent")
    assert two("check") == "right"
    assert two("free") == "freed"
    until(lambda: one("wake").split()[::2] == ["True", "0"], "all layers come home")
    assert one("check") == two("check") == "right"
    assert one("close") == two("close") == "closed"
    until(lambda: broker.ledger.free == PAGES, "all has come back")


def test_a_member_that_is_killed_gives_all_back_and_others_go_on(start: tuple[Any, Callable[[str, int], Any]]) -> None:
    from broker_member import until

    broker, begin = start
    one, two = begin("one", 4), begin("two", 4)
    assert int(one("take", 100, 0)) == 100
    one.kill()
    until(lambda: list(broker.ledger.held) == [2], "the broker hears of its end")
    most = int(two("usable")) + 4 * broker.ledger.free  # blocks of four layers
    assert two("take", most) == str(most)  # and none had bytes of the first
    assert two("check") == "right"
    assert two("close") == "closed"
