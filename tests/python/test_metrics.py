"""Figures for Prometheus: of a session, of a broker with its members; the page, the dashboard and the code say the same."""

from __future__ import annotations

import ast
import gc
import json
import logging
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from subprocesses import ROOT

pytest.importorskip("prometheus_client", reason="needs the extra metrics")
pytest.importorskip("msgspec", reason="messages between processes need msgspec")

from arena_worlds import PAGE, forward, make_layers, make_spec
from broker_member import attached, opened
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_cli import run

import remap
import remap.metrics
from remap.broker.metrics import BROKER, LABELS, MEMBER, UP, BrokerCollector, serve_metrics
from remap.broker.server import Broker
from remap.errors import InvalidArgument
from remap.metrics import SESSION, TENANT, TENANT_LABELS, Family, collector

DOCS, SOURCES = ROOT / "docs/metrics.md", ROOT / "src/remap"
PAGES = 96
Figures = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def figures(text: str) -> Figures:
    """(name of a sample, its labels, sorted) -> its value."""
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    found = {(each.name, tuple(sorted(each.labels.items()))): each.value for each in samples}
    assert len(found) == len(samples), "two series are one"
    return found


def scraped(registry: CollectorRegistry) -> Figures:
    return figures(generate_latest(registry).decode())


def test_a_session_has_the_figures_of_its_snapshot_until_it_is_closed() -> None:
    registry = CollectorRegistry(auto_describe=True)
    with remap.Session(48 * PAGE, page_bytes=PAGE) as session:
        registry.register(collector(session))
        layers = make_layers([2] * 6)
        tenant = session.attach_bytes(layers, name="m", kv=make_spec(6, max_blocks=160))
        forward(session, tenant, layers)
        remap.advanced.remap(session, "m", 2, 2)
        forward(session, tenant, layers)
        session.step({"m": 10_000})
        tenant.kv.allocate(3)
        found, snapshot = scraped(registry), session.snapshot()
        own = snapshot.tenants["m"]
        for owner in ("free", "params", "kv", "ring"):
            assert found["remap_session_pages", (("owner", owner),)] == getattr(snapshot.pages, owner)
        for name, value in (
            ("layers_away", own.remapped),
            ("passes_total", own.passes),
            ("copies_total", own.copies),
            ("copied_bytes_total", own.copied_bytes),
            ("kv_usable_blocks", own.usable_blocks),
        ):
            assert found[f"remap_tenant_{name}", (("tenant", "m"),)] == value, name
        assert own.copies > 0 and own.remapped >= 2
        assert found["remap_tenant_kv_blocks", (("state", "live"), ("tenant", "m"))] == 3
        assert found["remap_tenant_pages", (("owner", "params"), ("tenant", "m"))] == own.pages.params
        assert found["remap_tenant_shortages_total", (("outcome", "unmet"), ("tenant", "m"))] == 1
        with pytest.raises(ValueError, match="Duplicated"):
            registry.register(collector(session))
        assert session.snapshot() == snapshot
    assert scraped(registry) == {}
    dropped = remap.Session(4 * PAGE, page_bytes=PAGE)
    other, gone = CollectorRegistry(), weakref.ref(dropped)
    other.register(collector(dropped))
    assert scraped(other)
    del dropped
    gc.collect()
    assert gone() is None and scraped(other) == {}
    with pytest.raises(InvalidArgument, match="session must be"):
        collector(3)  # type: ignore[arg-type]


def test_layers_that_a_model_has_given_up_are_counted_here_and_through_a_broker(tmp_path: Path) -> None:
    registry = CollectorRegistry(auto_describe=True)
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE) as broker, opened(broker) as session:
        attached(session, "m")
        registry.register(collector(session))
        assert scraped(registry)["remap_tenant_cold_layers", (("tenant", "m"),)] == 0
        session.deactivate("m", pages="none")
        found = scraped(registry)["remap_tenant_cold_layers", (("tenant", "m"),)]
        assert found == len(session.snapshot().tenants["m"].cold) > 0
        shared = CollectorRegistry(auto_describe=True)
        shared.register(BrokerCollector(str(broker.path)))
        counts = [value for (name, _), value in scraped(shared).items() if name == "remap_tenant_cold_layers"]
        assert counts == [found]


def test_a_broker_has_its_own_figures_and_its_members(tmp_path: Path) -> None:
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE) as broker, opened(broker) as one, opened(broker) as two:
        attached(one, 'one "\n\\')
        attached(two, "x" * 80)
        attached(two, "x" * 81)  # cut, it has the other's name
        url, close = serve_metrics(str(broker.path), "127.0.0.1", 0)
        try:
            with pytest.raises(InvalidArgument, match="listened at"):
                serve_metrics(str(broker.path), "127.0.0.1", int(url.split(":")[2].partition("/")[0]))
            with urlopen(url, timeout=60) as answer:
                found = figures(answer.read().decode())
        finally:
            close()
        assert found["remap_broker_up", ()] == 1
        assert found["remap_broker_free_pages", ()] == broker.ledger.free
        members = {labels: value for (name, labels), value in found.items() if name == "remap_broker_member_pages"}
        assert sorted(members.values()) == sorted(broker.ledger.held.values())
        (usable,) = (
            value
            for (name, labels), value in found.items()
            if name == "remap_tenant_kv_usable_blocks" and dict(labels)["tenant"] == 'one "\n\\'
        )
        assert usable == one.snapshot().tenants['one "\n\\'].usable_blocks
    registry = CollectorRegistry()
    registry.register(BrokerCollector(str(tmp_path / "s")))
    assert scraped(registry) == {("remap_broker_up", ()): 0}


@pytest.mark.parametrize("given", ["", "http", "-1", "65536", ":9400", "box:", "\u0663"])
def test_an_address_that_is_none_starts_nothing(tmp_path: Path, given: str) -> None:
    found = run("serve", "--socket", str(tmp_path / "s"), "--capacity", "6MiB", "--metrics", given)
    assert found.exit_code == 2 and "metrics must be" in " ".join(found.output.split())
    assert not (tmp_path / "s").exists()


def test_the_command_answers_at_an_address_of_this_machine_alone(tmp_path: Path) -> None:
    code = "from remap.cli import main; main()"
    command = [
        "serve",
        "--socket",
        str(tmp_path / "s"),
        "--capacity",
        "6MiB",
        "--page-bytes",
        "64KiB",
        "--metrics",
        "0",
    ]
    with subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            url = served.stdout.readline().split("; ")[-1].strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
            with urlopen(url, timeout=60) as answer:
                assert figures(answer.read().decode())["remap_broker_pages", ()] == PAGES
            served.terminate()
            assert served.wait(60) == 0
        finally:
            served.kill()  # else a test that fails waits for it for ever


def of_vllm() -> tuple[tuple[str, str, bool], ...]:
    """Its adapter's figures, read off the source: that needs vLLM."""
    tree = ast.parse((SOURCES / "adapters/vllm/metrics.py").read_text(encoding="utf-8"))
    assigned = (each for each in tree.body if isinstance(each, ast.Assign))
    found: Any = next(ast.literal_eval(each.value) for each in assigned if ast.unparse(each.targets[0]) == "FIELDS")
    return found


def every() -> list[tuple[Family, tuple[str, ...]]]:
    """Each family, and its labels."""
    return [
        *((each, each.labels) for each in (*SESSION, UP, *BROKER)),
        *((each, (*TENANT_LABELS, *each.labels)) for each in TENANT),
        *((each, (*LABELS, *each.labels)) for each in MEMBER),
    ]


def test_the_page_has_every_figure_with_its_unit_and_labels() -> None:
    said = {
        name: (kind, unit.strip(), set(re.findall(r"`(\w+)`", labels)))
        for name, kind, unit, labels in re.findall(
            r"^\| `(\w+)` \| (\w+) \| ([^|`]+) \|([^|]*)\| [^|]+ \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert said == {
        each.name: ("counter" if each.rises else "gauge", each.unit, set(labels)) for each, labels in every()
    }
    vllm = re.findall(r"^\| `(remap_\w+)` \| (\w+) \| `engine` \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert vllm == [(f"remap_{name}", "counter" if rises else "gauge") for name, _, rises in of_vllm()]


def test_each_query_of_the_dashboard_asks_for_figures_and_labels_that_there_are() -> None:
    board = json.loads((ROOT / "examples/grafana.json").read_text(encoding="utf-8"))
    known = {f"{each.name}_total" if each.rises else each.name: {*labels, *LABELS} for each, labels in every()}
    known |= {f"remap_{name}_total" if rises else f"remap_{name}": {"engine"} for name, _, rises in of_vllm()}
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = set()
    for query in queries:
        names = re.findall(r"\bremap_\w+", query)
        assert names and set(names) <= known.keys(), query
        labels = set(re.findall(r"(\w+)\s*[=!]~?\"", query))
        labels |= {one for many in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for one in re.findall(r"\w+", many)}
        assert labels <= {"job", "instance"}.union(*(known[name] for name in names)), query
        for counter in (name for name in names if name.endswith("_total")):
            assert re.search(rf"rate\({counter}\[", query), query
        asked.update(names)
    assert len(asked) > 25
    for name in ("refusals", "moved_blocks", "allocations_beyond"):
        assert f"remap_{name}_total" in asked
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_page_names_every_logger() -> None:
    named = set(re.findall(r"`((?:remap|vllm)\.[\w.]+)`", DOCS.read_text(encoding="utf-8").partition("## Logs")[2]))
    used = set()
    for path in SOURCES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        used.update(re.findall(r'getLogger\("((?:remap|vllm)[\w.]*)"\)', text))  # not Ray's, which gets a filter
        if "getLogger(__name__)" in text:
            used.add(".".join(("remap", *path.relative_to(SOURCES).parts[:-1])))
    assert used - {"remap", "vllm"} <= named
    assert named - used <= {"remap.report.DecisionRecord", "remap.report.StallShare"}


def test_a_record_of_a_decision_has_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with remap.Session(48 * PAGE, page_bytes=PAGE) as session, caplog.at_level(logging.DEBUG, logger="remap.decisions"):
        tenant = session.attach_bytes(make_layers([2] * 6), name="m", kv=make_spec(6, max_blocks=160))
        caplog.clear()
        session.step({"m": 1})
        assert not caplog.records  # nothing was decided
        session.step({"m": tenant.kv.free_blocks + 4})
        session.step({"m": 10_000})
        decided = session.snapshot().decisions[-2:]
        debug = [each for each in caplog.records if each.levelno == logging.DEBUG]
        assert [each.decision for each in debug] == list(decided)  # type: ignore[attr-defined]
        assert all(record.reason in each.getMessage() for record, each in zip(decided, debug))
        (refused,) = (each for each in caplog.records if each.levelno == logging.WARNING)
        assert refused.decision == decided[1] and decided[1].unmet_blocks > 0  # type: ignore[attr-defined]
