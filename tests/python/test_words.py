"""One word, one sense: what the table of docs/concepts.md excludes stands on no page for users and in no public docstring."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONCEPTS = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in CONCEPTS.partition("| word | meaning | not |")[2].partition("\n\n")[0].splitlines()[2:]
]
NOT_SAID = [word for row in ROWS for word in row[2].split(", ") if word]
PUBLIC = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)


def docstrings(name: str) -> str:
    """Of the object, and of what it defines itself."""
    found = pkgutil.resolve_name(name)
    texts = [inspect.getdoc(found) or ""]
    for key, value in vars(found).items() if hasattr(found, "__dict__") else ():
        if not key.startswith("_") and (
            inspect.isfunction(value) or inspect.isclass(value) or isinstance(value, property)
        ):
            texts.append(inspect.getdoc(value) or "")
    return "\n".join(texts)


def said(text: str) -> list[str]:
    plain = " ".join(re.sub(r"`[^`]*`", "code", text).split())
    return [word for word in NOT_SAID if re.search(rf"\b{re.escape(word)}\b", plain, re.IGNORECASE)]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_a_page_keeps_to_the_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "concepts.md":
        text = text.replace(text.partition("| word | meaning | not |")[2].partition("\n\n")[0], "")
    assert said(text) == []


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_docstring_keeps_to_the_words(name: str) -> None:
    assert said(docstrings(name)) == []


def test_the_table_is_read_and_no_word_is_both() -> None:
    assert len(ROWS) > 20 and all(len(row) == 3 for row in ROWS) and len(NOT_SAID) > 15
    words = {word for row in ROWS for word in row[0].split(", ")}
    assert not words & set(NOT_SAID) and said("Spare  KV is asleep") == ["asleep", "spare KV"]
