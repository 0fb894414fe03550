"""The README and docs/: the example runs, quoted lines of code are there, and what is linked to exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOR_CONTRIBUTORS = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]
PAGES = [
    ROOT / "README.md",
    *FOR_CONTRIBUTORS,
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples/cpp/README.md",
]


def test_the_lines_that_the_adoption_page_quotes_are_in_the_reference_engine() -> None:
    text = (ROOT / "docs/adopt.md").read_text(encoding="utf-8")
    quotes = re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL)
    assert len(quotes) == 5  # one a call
    for file, code in quotes:
        source = (ROOT / file).read_text(encoding="utf-8").splitlines()
        found = [source.index(line) for line in code.splitlines()]  # ValueError names a line that is not there
        assert found == sorted(found), file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_links_to_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_readmes_examples_run_on_a_small_model() -> None:
    """As they are but for the device, the sizes and the shape."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    here = {
        "20GiB": "64MiB",
        "cuda:0": "cpu",
        "layers=32": "layers=4",
        "kv_heads=8": "kv_heads=2",
        "head_dim=128": "head_dim=16",
    }
    here |= {"bfloat16": "float32", "100_000": "2000"}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    for code in blocks:
        for given, small in here.items():
            code = code.replace(given, small)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_hidden_layers=4, vocab_size=100, eos_token_id=None, **shape)
        ).eval()
        inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
        expected = model(**inputs).logits
        names: dict[str, Any] = {"model": model, "inputs": inputs, "blocks": [], "wanted": 100}
        exec(compile(code, "README.md", "exec"), names)
        assert torch.equal(model(**inputs).logits, expected)
        if "session" in names:
            assert len(names["blocks"]) == 100
            names["session"].close()


@pytest.mark.parametrize(
    ("page", "begins", "ends", "least"),
    [
        ("README.md", "## What it changes", "\nMedians of", 16),
        ("docs/results.md", "## At a glance", "\n![The page", 41),
    ],
)
def test_a_figure_at_a_glance_stands_where_it_says_how_it_was_measured(
    page: str, begins: str, ends: str, least: int
) -> None:
    table = (ROOT / page).read_text(encoding="utf-8").partition(begins)[2].partition(ends)[0]
    told = ("docs/results.md", *(f"docs/notes/{name}.md" for name in ("results", "gpu-run", "vllm")))
    pages = " ".join((ROOT / page).read_text(encoding="utf-8") for page in told).replace(table, "")
    figures = re.findall(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)", table)
    assert len(figures) >= least
    assert [each for each in figures if not re.search(rf"(?<![\d.,]){re.escape(each)}(?![\d]|[.,]\d)", pages)] == []


def test_the_page_of_errors_has_each_type() -> None:
    from remap import errors

    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.Error)}
    assert {*re.findall(r"^\| `(\w+)`", page, re.MULTILINE)} == kinds - {"Error"}


def test_the_readme_is_read_in_two_minutes() -> None:
    """Its first screen ends where figures begin."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 700 and len(readme.partition("## What it changes")[0].split()) <= 280
    cells = [cell for line in readme.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
    assert max(len(cell.split()) for cell in cells) <= 15


def test_pages_for_users_are_short() -> None:
    """How and why, and what was measured, stands in docs/notes."""
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")}
    assert sum(words.values()) < 25_000
    assert {name for name, count in words.items() if count > 1500} <= {"adopt.md"}


@pytest.mark.parametrize(("file", "rate"), [("gpu-h100-sharing", 8), ("gpu-h100-sharing-12", 12)])
def test_the_table_of_three_models_on_a_gpu_has_the_medians_and_ranges_of_its_file(file: str, rate: int) -> None:
    results = json.loads((ROOT / f"bench/results/{file}.json").read_text(encoding="utf-8"))["results"]
    figures = {each["name"].split("turns of 1 s, ")[1]: each for each in results}
    page = (ROOT / "docs/notes/gpu-run.md").read_text(encoding="utf-8")
    rows = page.partition("Medians, lowest to highest:")[2].partition(f"\n| {rate} |")[2].splitlines()[:4]
    ways = {
        "`remap`": "remap",
        "`kv-pool+swap`": "kv-pool+swap",
        "whole models": "whole models+swap",
        "`recompute`": "recompute",
    }
    for row, (told, way) in zip(rows, ways.items()):
        assert told in row
        cells = [each.strip(" *") for each in row.strip("| ").split("|")][-5:]
        wanted = [figures[f"{way}, first token, P99{simulated}"] for simulated in ("", ", simulated")]
        wanted += [figures[f"{way} (us: between tokens)"], figures[f"{way}, between tokens, P99"]]
        for cell, figure, unit in zip(cells, wanted, (1e3, 1e3, 1, 1e3)):
            each = [float(number.replace(",", "")) for number in re.findall(r"[\d.,]+", cell)]
            exact = [figure["value"], figure["detail"]["least"], figure["detail"]["most"]]
            digits = [len(number.partition(".")[2]) for number in re.findall(r"[\d.,]+", cell)]
            assert each == [pytest.approx(one / unit, abs=0.51 * 10**-digit) for one, digit in zip(exact, digits)], (
                told,
                cell,
            )
        assert int(cells[4].replace(",", "")) == figures[f"{way}, tokens recomputed"]["value"]
