"""The README and docs/: the example runs, quoted lines of code are there, and what is linked to exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOR_CONTRIBUTORS = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]
PAGES = [
    ROOT / "README.md",
    *FOR_CONTRIBUTORS,
    *sorted((ROOT / "docs").glob("*.md")),
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


def test_the_readmes_example_runs_and_tokens_are_identical(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "tokens identical: True" in said
    assert re.search(r"^\d+ blocks usable, streaming layers \(.+\)$", said, re.MULTILINE)


def test_a_figure_of_the_readmes_results_stands_in_the_pages_that_say_how_it_was_measured() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## What it gives")[2].partition("\n[All results")[0]
    pages = " ".join((ROOT / page).read_text(encoding="utf-8") for page in ("docs/results.md", "docs/gpu-run.md"))
    figures = re.findall(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)", table)
    assert len(figures) > 40
    assert [each for each in figures if not re.search(rf"(?<![\d.,]){re.escape(each)}(?![\d]|[.,]\d)", pages)] == []


@pytest.mark.parametrize(("file", "rate"), [("gpu-h100-sharing", 8), ("gpu-h100-sharing-12", 12)])
def test_the_table_of_three_models_on_a_gpu_has_the_medians_and_ranges_of_its_file(file: str, rate: int) -> None:
    results = json.loads((ROOT / f"bench/results/{file}.json").read_text(encoding="utf-8"))["results"]
    figures = {each["name"].split("turns of 1 s, ")[1]: each for each in results}
    page = (ROOT / "docs/gpu-run.md").read_text(encoding="utf-8")
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
