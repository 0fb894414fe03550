"""`bench.lab offline` with tiny random models: the whole command, what its runs copy, the slower link, the order of copies."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("typer")

from bench.lab import rounds, slow_link
from bench.lab.commands import app
from bench.lab.hybridserve.batches import Batch
from bench.lab.offline import command
from bench.lab.offline.cases import AMPLE, FULL, GROUPED, POLICIES, QUICK, find
from bench.lab.offline.one import refusal, serve
from bench.lab.offline.order import order
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from remap.errors import InvalidArgument
from remap.policy import kv_stream


def here(kind: str, module: str, *names: str, threads: int) -> Any:
    """`run_apart` without the process, which loads torch anew: as JSON gives it back."""
    assert (module, threads) == ("bench.lab.offline.one", 1)
    return json.loads(json.dumps(refusal() if names == (GROUPED.name,) else serve(*names)))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the quick suite, measured in this process, and its page."""
    path = tmp_path_factory.mktemp("offline") / "offline.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "run_apart", here)
        patch.setattr(command, "run_apart", here)
        found = CliRunner().invoke(app, ["offline", "--quick", "--results", str(path)])
    assert found.exit_code == 0, found.output
    return path


def test_all_serve_the_same_tokens_and_copy_what_they_keep(measured: Path) -> None:
    data = json.loads(measured.read_text(encoding="utf-8"))
    assert set(data["points"]) == {rounds.run_name(case.name, policy, 0) for case in QUICK.cases for policy in POLICIES}
    for case in QUICK.cases:
        tokens = data["tokens"][case.name]
        assert len(set(tokens.values())) > len(tokens) / 2  # the answers vary, so equal ones say something
        found = {policy: data["points"][rounds.run_name(case.name, policy, 0)] for policy in POLICIES}
        assert {(one["requests"], one["generated_tokens"]) for one in found.values()} == {
            (case.count, case.count * case.answer)
        }
        ample = found.pop(AMPLE)
        assert ample["weights_in_bytes"] == ample["cache_in_bytes"] == ample["cache_out_bytes"] == 0
        kv, activations = found["KV"], found["activations"]
        assert kv["activation_share"] == kv["activations_in_bytes"] == kv["activations_out_bytes"] == 0
        assert activations["activation_share"] == 1 and activations["kv_in_bytes"] == activations["kv_out_bytes"] == 0
        assert 2 * activations["activations_out_bytes"] == kv["kv_out_bytes"] > 0
        for one in found.values():
            assert one["weights_in_bytes"] > 0 and one["expected_tokens_per_s"] > 0 and one["choosing_s"] > 0
            assert one["cache_in_bytes"] >= one["kv_in_bytes"] + one["activations_in_bytes"] > 0
            assert 0 <= one["waiting_s"] <= one["seconds"]
        # With host memory for half of the KV, twice as many requests run at once with activations.
        assert (kv["running_peak"] < activations["running_peak"]) is (case.host < 1)


def test_the_page(measured: Path) -> None:
    page = measured.with_suffix(".md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith(("| OPT | ", "| Llama | "))]
    assert [row[1] for row in rows] == [*POLICIES, *POLICIES] and {row[2] for row in rows} == {"1"}
    assert all(str(case) in page for case in QUICK.cases)
    assert "has 512 bytes, its keys and values have 256" in " ".join(page.split()) and "takes 0:1." in page
    assert sum(line.startswith("| OPT-") for line in page.splitlines()) == len(command.ORDERS)
    assert command.run_offline(measured, "quick", report_only=True) == page


def test_what_the_words_say_is_what_is_stored() -> None:
    """ "within 3 %", "a fifth more", "half as many", "within 2 %", "up to two fifths too short"."""
    data = json.loads(command.RESULTS.read_text(encoding="utf-8"))
    assert data["settings"] == json.loads(json.dumps(FULL.settings()))

    def middle(case: str, policy: str, figure: str) -> float:
        names = [rounds.run_name(case, policy, number) for number in range(FULL.rounds)]
        return statistics.median(data["points"][name][figure] for name in names)

    off = []
    for case in FULL.cases:
        rates = {policy: middle(case.name, policy, "tokens_per_s") for policy in POLICIES}
        fixed = max(rates["KV"], rates["activations"], rates["Algorithm 1"])
        assert rates["best"] > 0.97 * fixed
        ratio = rates["activations"] / rates["KV"]
        assert 1.19 < ratio < 1.24 if case.link else 0.45 < ratio < 0.65
        expected = {policy: middle(case.name, policy, "expected_pass_s") for policy in POLICIES if policy != AMPLE}
        measured = {policy: middle(case.name, policy, "full_pass_s") for policy in expected}
        if case.link:
            assert all(abs(expected[policy] / measured[policy] - 1) < 0.02 for policy in expected)
        off += [1 - expected[policy] / measured[policy] for policy in expected]
        if not case.link:
            assert middle(case.name, "best", "activation_share") == 0
    assert 0.35 < max(off) < 0.42


def test_what_is_run() -> None:
    assert list(POLICIES) == ["ample", "KV", "activations", "Algorithm 1", "best"] and FULL.rounds == 3
    assert {case.model.family for case in FULL.cases} == {"opt", "llama"}
    assert all(case.memory < 1 and case.model.kv_heads in (0, case.model.heads) for case in FULL.cases)
    assert json.loads(json.dumps(FULL.settings())) == FULL.settings()
    with pytest.raises(InvalidArgument) as refused:
        find("nothing", "one")
    assert refused.value.fields == {"suite": "nothing", "case": "one"}


def test_a_finer_order_is_worth_what_the_buffers_lack() -> None:
    found = order(Batch("RTX-4090", "OPT-30b", 1920))
    assert found.parts_s < found.whole_s < 1.1 * found.parts_s  # with buffers for the whole batch
    assert found.wanted_bytes > found.buffer_bytes and found.batches > 1 and found.split_s > found.whole_s
    small = order(Batch("RTX-4090", "OPT-30b", 128, size=8))
    assert small.wanted_bytes <= small.buffer_bytes and (small.batches, small.split_s) == (1, small.whole_s)


class _Tenant:
    """Of layers that take a second to compute each, on a clock that only computing and sleeping move."""

    def __init__(self, sizes: list[int], streamed: list[int], ring: int, kv_layers: int) -> None:
        self.layer_bytes, self.streamed, self.buffers = sizes, streamed, ring
        self.kv = SimpleNamespace(
            spec=SimpleNamespace(layers=kv_layers), geometry=SimpleNamespace(unit_bytes=1), streamed=None
        )

    @contextlib.contextmanager
    def forward(self, **more: Any):
        yield

    def wait(self, layer: int) -> None: ...

    def done(self, layer: int) -> None: ...


@settings(deadline=None)
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, 4), min_size=n, max_size=n),
            st.lists(st.integers(1, 5), min_size=n, max_size=n),
            st.sets(st.integers(0, n - 1)),
            st.integers(1, n),
        )
    ),
    st.integers(1, 2),
    st.integers(0, 3),
)
def test_a_slower_link_makes_passes_as_long_as_certified(
    case: tuple[list[int], list[int], set[int], int], ring: int, blocks: int
) -> None:
    compute, sizes, chosen, kv_layers = case
    streamed = sorted(chosen) if len(chosen) > ring else []
    now, lengths = [0.0], []
    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    link = slow_link.SlowLink(_Tenant(sizes, streamed, ring, kv_layers), 1.0, clock)
    for _ in range(6):
        begun = now[0]
        with link.forward(phase="decode", tokens=1, streamed=list(range(blocks))):
            for layer, seconds in enumerate(compute):
                link.wait(layer)
                now[0] += seconds
                link.done(layer)
        lengths.append(now[0] - begun)
    certified = kv_stream.pass_seconds(compute, sizes, streamed, ring, 2.0 * blocks, kv_layers, 2)
    assert max(lengths[3:]) == pytest.approx(certified)
    assert math.fsum(lengths) - 6 * sum(compute) == pytest.approx(link.waited_s)
