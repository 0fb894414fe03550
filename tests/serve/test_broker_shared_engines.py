"""`SharedEngines` in several processes, on pages of one broker that suffice for the models of one: each ends its turn for the
others, and all tokens are those that each model gives alone. Sessions of one process stand for the processes, each with its own
membership; test_two_processes has real ones."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")
pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from broker_paused_serving import CONFIG, PAGE
from effort import some

import remap
from remap.broker.server import Broker
from remap.errors import InvalidArgument, OutOfMemory
from remap.model.footprint import footprint
from remap_serve.engine import LLMEngine, Request, SamplingParams, SharedEngines

TOKENS, REQUESTS = 12, 6
FEW = 10
"""Pages of KV and of what stays, beside one model's layers."""


def model_of(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()


def requests_of(seed: int, count: int = REQUESTS) -> list[Request]:
    rng = random.Random(seed)
    made = []
    for number in range(count):
        prompt = tuple(rng.randrange(512) for _ in range(20 + 4 * (number % 4)))
        made.append(Request(f"{seed}-{number}", prompt, SamplingParams(max_tokens=TOKENS)))
    return made


def weight_pages() -> int:
    return footprint(model_of(0), None, embedding_part=False).pages(PAGE)


class Process:
    """One session with an engine of each of these models."""

    def __init__(
        self, seeds: Sequence[int], swap: bool, turn_s: float = 0.0, mode: str = "temporal", **where: Any
    ) -> None:
        self.session = remap.Session(**where)
        spec = remap.KVSpec(
            layers=4, kv_heads=2, head_dim=16, block_tokens=16, dtype="float32", min_blocks=4, max_blocks=400,
            host_blocks=400 if swap else None,
        )  # fmt: skip
        engines = {}
        for seed in seeds:
            model, name = model_of(seed), f"m{seed}"
            tenant = self.session.attach(model, name=name, kv=spec, hooks=False, active=False, pages="none")
            engines[name] = LLMEngine(model, tenant, session=self.session, max_num_seqs=4)
        self.shared = SharedEngines(
            self.session, engines, mode, quantum_s=0.02, turn_s=turn_s, sleep=lambda seconds: time.sleep(seconds / 50)
        )
        self.tokens: dict[str, list[int]] = {}

    def ask(self, count: int = REQUESTS) -> None:
        for name, engine in self.shared.engines.items():
            for request in requests_of(int(name[1:]), count):
                engine.add_request(request)

    def step(self) -> bool:
        """Whether a pass was computed."""
        done = self.shared.step()
        for one in done.values():
            self.tokens.update((output.id, list(output.tokens)) for output in one.finished)
        return any(one.computed for one in done.values())

    def abort(self, id: str) -> None:
        with suppress(InvalidArgument):  # it has ended
            self.shared.engines[f"m{id.partition('-')[0]}"].abort(id)


def id_of(each: tuple[Process, str]) -> str:
    return each[1]


def alone(seed: int) -> dict[str, list[int]]:
    with ExitStack() as stack:
        process = Process([seed], False, capacity=400 * PAGE, page_bytes=PAGE)
        stack.callback(process.session.close)
        process.ask()
        while process.shared.unfinished:
            process.step()
        return process.tokens


@pytest.fixture(scope="module")
def expected() -> Mapping[int, dict[str, list[int]]]:
    return {seed: alone(seed) for seed in (1, 2, 3, 4)}


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr("remap.process_turn.ASKS_S", 0.2)
    with ExitStack() as stack:
        yield stack


def joined(stack: ExitStack, tmp_path: Path, pages: int) -> Broker:
    return stack.enter_context(Broker(tmp_path / "s", pages * PAGE, PAGE))


def process_of(stack: ExitStack, broker: Broker, seeds: Sequence[int], swap: bool, **more: Any) -> Process:
    made = Process(seeds, swap, device=f"unix:{broker.path}", **more)
    stack.callback(made.session.close)
    return made


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("mode", ["temporal", "spatial"])
def test_servers_that_never_pause_take_turns_and_their_tokens_stay(
    tmp_path: Path, stack: ExitStack, expected: Mapping[int, dict[str, list[int]]], swap: bool, mode: str
) -> None:
    broker = joined(stack, tmp_path, weight_pages() + FEW)
    processes = [process_of(stack, broker, [seed], swap, mode=mode, turn_s=0.02) for seed in (1, 2, 3)]
    for process in processes:
        process.ask()
    seen: list[int] = []
    end = time.monotonic() + 120
    while any(process.shared.unfinished for process in processes):
        assert time.monotonic() < end, seen
        for place, process in enumerate(processes):
            if process.step() and seen[-1:] != [place]:
                seen.append(place)
    assert {*seen} == {0, 1, 2} and len(seen) > 3, seen  # a turn ends before its requests do
    for seed, process in enumerate(processes, 1):
        assert process.tokens == expected[seed]
        remap.advanced.check(process.session)


@pytest.mark.parametrize("seed", range(some(3, 24)))
def test_any_processes_with_any_models(
    tmp_path: Path, stack: ExitStack, expected: Mapping[int, dict[str, list[int]]], seed: int
) -> None:
    """Two to four processes with one model or two each, requests that come at any time, some of them aborted."""
    rng = random.Random(seed)
    processes = []
    # Two models side by side, what the others' models keep, of which there are eight at most, and some KV.
    broker = joined(stack, tmp_path, 2 * weight_pages() + 2 * 8 + rng.randrange(4, 40))
    for _ in range(rng.randint(2, 4)):
        seeds = rng.sample((1, 2, 3, 4), rng.randint(1, 2))
        mode = rng.choice(["temporal", "temporal", "spatial"])
        process = process_of(stack, broker, seeds, rng.random() < 0.5, mode=mode, turn_s=rng.choice([0.0, 0.02, 0.1]))
        processes.append(process)
    pending = [
        (process, name, request)
        for process in processes
        for name in process.shared.engines
        for request in requests_of(int(name[1:]))
    ]
    rng.shuffle(pending)
    aborted = set()
    end = time.monotonic() + 240
    while pending or any(process.shared.unfinished for process in processes):
        assert time.monotonic() < end
        for _ in range(min(len(pending), rng.choice([0, 0, 1, 4]))):
            process, name, request = pending.pop()
            process.shared.engines[name].add_request(request)
            if rng.random() < 0.1:
                aborted.add((process, request.id))
        for process in rng.sample(processes, len(processes)):
            for _ in range(rng.randint(1, 3)):
                process.step()
            for other, id in rng.sample(sorted(aborted, key=id_of), min(len(aborted), 1)):
                if other is process and id not in process.tokens and rng.random() < 0.3:
                    process.abort(id)
    for process in processes:
        remap.advanced.check(process.session)
        for id, tokens in process.tokens.items():
            assert tokens == expected[int(id.partition("-")[0])][id]
        wanted = {request.id for name in process.shared.engines for request in requests_of(int(name[1:]))}
        assert wanted - {id for other, id in aborted if other is process} <= process.tokens.keys() <= wanted


def test_models_of_one_process_go_on_while_another_one_of_it_waits_for_pages_elsewhere(
    tmp_path: Path, stack: ExitStack, expected: Mapping[int, dict[str, list[int]]]
) -> None:
    broker = joined(stack, tmp_path, 2 * weight_pages() + 2 * FEW)
    here = process_of(stack, broker, [1, 2], True, turn_s=1e9)
    there = process_of(stack, broker, [3, 4], True, turn_s=1e9)
    processes = [here, there]
    for process in processes:
        process.ask()
    end = time.monotonic() + 120
    while any(process.shared.unfinished for process in processes):
        assert time.monotonic() < end
        for process in processes:
            process.step()
    assert here.tokens == expected[1] | expected[2] and there.tokens == expected[3] | expected[4]


@pytest.mark.parametrize("mode", ["temporal", "spatial"])
def test_a_server_without_requests_gives_its_turn_at_once(tmp_path: Path, stack: ExitStack, mode: str) -> None:
    broker = joined(stack, tmp_path, weight_pages() + FEW)
    one, two = (process_of(stack, broker, [seed], True, turn_s=1e9, mode=mode) for seed in (1, 2))
    one.ask(1)
    while one.shared.unfinished:
        one.step()
    assert one.shared.active == ("m1",)
    two.ask(1)
    end = time.monotonic() + 60
    while two.shared.unfinished:
        assert time.monotonic() < end
        two.step()
        one.step()
    assert one.shared.active == ()
    one.ask(2)  # and it has its turn again
    while one.shared.unfinished:
        assert time.monotonic() < end
        one.step()
        two.step()
    assert two.shared.active == ()
    for _ in range(5):  # and who has no request asks for nothing
        two.step()
    assert two.shared.active == () and one.shared.active == ("m1",)


def test_a_turn_lasts_and_the_kv_of_an_engine_that_swaps_is_kept(
    tmp_path: Path, stack: ExitStack, expected: Mapping[int, dict[str, list[int]]]
) -> None:
    broker = joined(stack, tmp_path, weight_pages() + FEW)
    one, two = (process_of(stack, broker, [seed], True, turn_s=1e9) for seed in (1, 2))
    one.ask()
    two.ask()
    while one.shared.unfinished > 1:
        one.step()
        assert not two.step()
    one.shared._process.turn_s = 0.0  # type: ignore[union-attr]
    end = time.monotonic() + 60
    while two.shared.unfinished:
        assert time.monotonic() < end
        one.step()
        two.step()
    while one.shared.unfinished:
        assert time.monotonic() < end
        one.step()
        two.step()
    assert one.tokens == expected[1] and two.tokens == expected[2]
    assert sum(engine.metrics.recomputed_tokens for engine in one.shared.engines.values()) == 0


def test_more_than_there_is_anywhere_is_an_error_and_not_waited_for(tmp_path: Path, stack: ExitStack) -> None:
    broker = joined(stack, tmp_path, weight_pages() - 2)
    one = process_of(stack, broker, [1], True)
    one.ask(1)
    with pytest.raises(OutOfMemory):
        one.step()
    assert one.shared.beginning == "m1"


def test_requests_can_be_aborted_while_they_wait_for_another_process(tmp_path: Path, stack: ExitStack) -> None:
    broker = joined(stack, tmp_path, weight_pages() + FEW)
    one, two = (process_of(stack, broker, [seed], True, turn_s=1e9) for seed in (1, 2))
    one.ask(2)
    one.step()
    two.ask(2)
    two.step()
    two.shared.engines["m2"].abort_all()
    assert two.shared.step() == {} and two.shared.unfinished == 0
    while one.shared.unfinished:
        one.step()
        two.step()
    remap.advanced.check(two.session)


def test_engines_in_threads_of_their_own(
    tmp_path: Path, stack: ExitStack, expected: Mapping[int, dict[str, list[int]]]
) -> None:
    """As in processes: no engine steps for another."""
    broker = joined(stack, tmp_path, weight_pages() + FEW)
    processes = [process_of(stack, broker, [seed], swap) for seed, swap in ((1, True), (2, False))]
    end = time.monotonic() + 120

    def serve(process: Process) -> None:
        while process.shared.unfinished and time.monotonic() < end:
            process.step()
        while any(one.shared.unfinished for one in processes) and time.monotonic() < end:
            process.step()
            time.sleep(0.01)

    for process in processes:
        process.ask()
    threads = [threading.Thread(target=serve, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, process in enumerate(processes, 1):
        assert process.tokens == expected[seed]
        remap.advanced.check(process.session)
