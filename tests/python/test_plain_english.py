"""What a stranger reads: no sentence above 35 words, no paragraph above 90, no cell of a table above 35."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "src/remap_serve/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SENTENCE, PARAGRAPH = 35, 90
# Pages that do not keep it yet. One that does is no longer named here.
NOT_YET = {f"docs/notes/{name}.md" for name in ("gpu-run", "paper-vs-ours", "results")}


def too_long(text: str) -> list[str]:
    """Sentences, paragraphs and cells that are."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)  # of a link its words
    text = re.sub(r"`[^`]*`", "code", text)
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.strip().splitlines()]
        if not lines or lines[0].startswith("#"):
            continue
        if lines[0].startswith("|"):
            parts = [cell for line in lines for cell in line.strip("|").split("|")]
        else:
            parts = re.split(r"\n(?:[-*]|\d+\.) ", "\n" + "\n".join(lines))
            found += [part for part in parts if len(part.split()) > PARAGRAPH]
        sentences = [each for part in parts for each in re.split(r"(?<=[.!?:;])\s", part)]
        found += [each for each in sentences if len(each.split()) > SENTENCE]
    return [" ".join(each.split()) for each in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_plain_english(page: Path) -> None:
    found = too_long(page.read_text(encoding="utf-8"))
    if page.relative_to(ROOT).as_posix() in NOT_YET:
        assert found, "take it out of NOT_YET"
        return
    assert found == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("word " * 34 + "end.", 0),
        ("word " * 35 + "end.", 1),
        ("Short one. " * 50, 1),
        ("| " + "word " * 36 + "| b |", 1),
        ("```\n" + "word " * 99 + "\n```", 0),
        ("- " + "word " * 30 + "\n- " + "word " * 30 + "\n- " + "word " * 36, 1),
    ],
)
def test_what_is_too_long_is_seen(text: str, count: int) -> None:
    assert len(too_long(text)) == count
