"""The examples in Python run on a CPU, as they stand, and say what their readers are told."""

from __future__ import annotations

import ast
import json
import re
import runpy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from subprocesses import ROOT

import remap

pytest.importorskip("torch", reason="the examples serve models")
pytest.importorskip("transformers", reason="the examples serve models")

EXAMPLES = ROOT / "examples"


def said(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_tried() -> None:
    named = ("python/test_examples.py", "python/test_transformers_adapter.py", "engines/vllm/test_example.py")
    tests = "".join((ROOT / "tests" / name).read_text(encoding="utf-8") for name in named)
    files = [path.relative_to(EXAMPLES) for kind in ("*.py", "*.ipynb") for path in EXAMPLES.rglob(kind)]
    assert len(files) >= 7 and [str(path) for path in files if f'"{path}"' not in tests] == []
    assert all((EXAMPLES / path.parent / "README.md").is_file() for path in files if path.parent.name)


def test_layers_become_blocks_and_come_home(capsys: pytest.CaptureFixture[str]) -> None:
    text = said("01_attach.py", capsys)
    assert re.findall(r"tokens identical.*: (\w+)", text) == ["True", "True"]
    (start, grown) = map(int, re.findall(r"^(\d+) (?:KV blocks|after)", text, re.MULTILINE))
    assert start == 16 and grown >= 150 and "all layers are home after" in text


def test_an_own_engine_preempts_nobody_once_layers_give_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of another batch may round otherwise (docs/promises.md, 4), so one answer of eight may differ."""
    without, with_layers = (
        tuple(map(int, found))
        for found in re.findall(
            r"(\d+) preemptions, (\d+) layers streamed, .*: (\d) of 8", said("02_own_engine.py", capsys)
        )
    )
    assert without[0] > 0 and without[1] == 0 and without[2] >= 7
    assert with_layers[0] == 0 and with_layers[1] > 0 and with_layers[2] >= 7


def test_idle_models_lend_to_the_busy_one_and_get_it_back(capsys: pytest.CaptureFixture[str]) -> None:
    turns = said("03_three_models.py", capsys).splitlines()
    assert len(turns) == 6
    for turn in turns:
        name, before, after, same, pages = re.findall(
            r"^(\w+)'s turn: (\d+) blocks, then (\d+); tokens identical: (\w+); pages lent: (.*)$", turn
        )[0]
        lent = {one: int(count) for one, count in re.findall(r"'(\w+)': (\d+)", pages)}
        assert int(before) < 200 <= int(after) and same == "True"
        assert lent.pop(name) == 0 and sum(lent.values()) > 0


def cells_of(name: str) -> list[tuple[str, list[Any]]]:
    """(source, stored outputs) of each cell of code, of a notebook as nbformat 4 has it."""
    book = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    assert (book["nbformat"], book["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    return [("".join(cell["source"]), cell["outputs"]) for cell in book["cells"] if cell["cell_type"] == "code"]


def blank(text: str) -> str:
    """Without numbers and addresses, which another run may have others of."""
    return re.sub(r"\d+x?[0-9a-f]*", "", text)


def shown(value: object) -> tuple[str, str]:
    """The text and the table that a notebook shows of a value."""
    text = "Snapshot(...)" if isinstance(value, remap.Snapshot) else repr(value)
    return blank(text), blank(value._repr_html_() if hasattr(value, "_repr_html_") else "")


def test_the_notebook_runs_and_shows_what_is_stored_in_it() -> None:
    """Without a kernel: a cell shows its last expression. The session is closed by the last cell, or here."""
    names: dict[str, Any] = {}
    tables = 0
    try:
        for source, outputs in cells_of("06_notebook.ipynb"):
            tree = ast.parse(source)
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "06_notebook.ipynb", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "06_notebook.ipynb", "eval"), names) if last else None
            expected = [] if value is None else [shown(value)]
            stored = [[each["data"]["text/plain"], each["data"].get("text/html", "")] for each in outputs]
            assert [tuple(blank("".join(part)) for part in each) for each in stored] == expected, source
            tables += bool(expected and expected[0][1])
        assert tables == 4 and names["session"].closed
    finally:
        if "session" in names:
            names["session"].close()


class Cluster(BaseHTTPRequestHandler):
    """Two instances that are a pipeline from the first completion on."""

    def reply(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        pipeline = [{"stages": [{"instance": "i0"}, {"instance": "i1"}]}]
        alone = [{"stages": [{"instance": name}]} for name in ("i0", "i1")]
        merged = self.server.asked.is_set()  # type: ignore[attr-defined]
        if self.path == "/cluster":
            (self.server.seen_merged if merged else self.server.seen_alone).set()  # type: ignore[attr-defined]
        self.reply({"data": [{"id": "m"}]} if self.path == "/v1/models" else {"groups": pipeline if merged else alone})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (
            self.path == "/v1/completions"
            and body["model"] == "m"
            and self.headers["Content-Type"] == "application/json"
        )
        self.server.seen_alone.wait(60)  # type: ignore[attr-defined]
        self.server.asked.set()  # type: ignore[attr-defined]
        self.server.seen_merged.wait(60)  # type: ignore[attr-defined]
        self.reply({"usage": {"completion_tokens": body["max_tokens"]}})

    def log_message(self, *_: Any) -> None:
        pass


def test_the_burst_shows_how_instances_merge(capsys: pytest.CaptureFixture[str]) -> None:
    """With a double of the server; test_cluster_command.py sends it to a cluster."""
    main = runpy.run_path(str(EXAMPLES / "05_cluster/burst.py"))["main"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Cluster) as server:
        server.asked, server.seen_alone, server.seen_merged = (threading.Event() for _ in range(3))  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert main(f"http://127.0.0.1:{server.server_port}", 3, 7) == ["i0 | i1", "i0+i1"]
        finally:
            server.shutdown()
            thread.join()
    first, second, last = capsys.readouterr().out.splitlines()
    assert (first, second) == ("groups: i0 | i1", "groups: i0+i1") and last.startswith("3 answers, 21 tokens in ")
